"""Keys that were renamed. Saved runs, scripts and recipes that use the earlier names stay valid.

A file that gives both names with different values is refused. An override always wins over the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Tree: TypeAlias = dict[str, object]

_MIXERS = {"mlp_t": "mlp", "neighbourhood": "neighbourhood", "candidates": "candidates"}


def _same(value: object) -> object:
    return value


def _retries(tries: object) -> object:
    """The first attempt used to be counted."""
    is_count = isinstance(tries, int) and not isinstance(tries, bool)
    return tries - 1 if is_count else tries  # type: ignore[operator]


Convert = Callable[[object], object]
RENAMED: dict[tuple[str, str], tuple[str, str, Convert]] = {
    ("evaluation", "depth"): ("inference", "depth", _same),
    ("evaluation", "settle"): ("inference", "converged_after", _same),
    ("evaluation", "halt"): ("inference", "halt", _same),
    ("evaluation", "tries"): ("inference", "retries", _retries),
    ("evaluation", "noise"): ("inference", "noise", _same),
    ("evaluation", "guesses"): ("inference", "guesses", _same),
    ("plan", "lanes"): ("plan", "workers", _same),
    **{
        ("plan", name): ("limits", name, _same)
        for name in (
            "memory_limit_mb",
            "memory_fraction",
            "dynamic_batch_sizing",
            "memory_pressure_threshold",
            "garbage_collection_frequency",
            "low_battery_percent",
            "enable_thermal_monitoring",
            "thermal_throttle_threshold",
            "cooling_delay_seconds",
        )
    },
}


def with_current_keys(tree: Tree, *, earlier_wins: bool = False) -> Tree:
    """Return the recipe with every renamed key under its present name.

    With `earlier_wins` an earlier name replaces the present one: an override that uses it was given later.
    """
    current = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
    for (section, key), (new_section, new_key, convert) in RENAMED.items():
        source = current.get(section)
        if isinstance(source, dict) and key in source:
            value = convert(source.pop(key))
            target = current.setdefault(new_section, {})
            if isinstance(target, dict):
                _put(target, new_key, value, f"{section}.{key}", f"{new_section}.{new_key}", earlier_wins)
    model = current.get("model")
    if isinstance(model, dict):
        current["model"] = model_with_mixer(model, earlier_wins=earlier_wins)
    return current


def _put(target: Tree, key: str, value: object, old: str, new: str, earlier_wins: bool) -> None:
    if not earlier_wins and key in target and target[key] != value:
        raise ValueError(f"{old} is now {new}; both are given, with different values")
    target[key] = value


def model_with_mixer(section: Tree, *, earlier_wins: bool = False) -> Tree:
    """Replace `mlp_t`, `neighbourhood` and `candidates`, of which one could be set, by `mixer`."""
    current = dict(section)
    given = {key: current.pop(key) for key in _MIXERS if key in current}
    for key in ("mlp_t", "candidates"):
        if not isinstance(given.get(key, False), bool):
            raise ValueError(f"{key} is {given[key]!r}: it should be true or false")
    size = given.get("neighbourhood")
    if size is not None and not size:
        raise ValueError(f"neighbourhood is {size!r}: it should be 3, 5, 7 or null")
    chosen = [key for key, value in given.items() if value]
    if len(chosen) > 1:
        raise ValueError("positions are mixed by one of mlp_t, neighbourhood and candidates")
    if chosen:
        mixer = _MIXERS[chosen[0]]
        _put(current, "mixer", mixer, f"model.{chosen[0]}", "model.mixer", earlier_wins)
        if size:
            earlier, present = "model.neighbourhood", "model.neighbourhood_size"
            _put(current, "neighbourhood_size", size, earlier, present, earlier_wins)
        return current
    for key in given:
        if current.get("mixer") == _MIXERS[key]:  # attention remains when the only other mixer is off
            _put(current, "mixer", "attention", f"model.{key}", "model.mixer", earlier_wins)
    return current
