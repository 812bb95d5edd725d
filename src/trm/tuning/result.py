"""The result of a search: the best recipe, the comparison with the start, and all candidates."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from macbook_optimization.durable_files import replace_file
from macbook_optimization.errors import RunError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.json_types import JsonObject
from macbook_optimization.terminal_text import align
from macbook_optimization.units import counted
from trm.reports.comparison import differ_clearly
from trm.reports.differences import differences
from trm.runs.metric import metric_label
from trm.tasks.metrics import shown_value, smaller_is_better
from trm.tuning.facts import Facts
from trm.tuning.picture import draw
from trm.tuning.space import described, with_values
from trm.tuning.study import Study, TrialSummary

RECIPE_FILE = "recipe.yaml"
PICTURE_FILE = "tuning.png"
RESULT_FILE = "result.json"


@dataclass(frozen=True, slots=True)
class Change:
    """A key of the best recipe that differs from the start."""

    key: str
    start: object
    best: object


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a search. Without a complete candidate there is no best one."""

    directory: str
    metric: str
    evaluated_on: str
    seconds_per_trial: float
    wall_seconds: float
    trials: list[TrialSummary]
    start: TrialSummary | None
    best: TrialSummary | None
    changes: list[Change]
    is_clear: bool | None  # whether best and start differ by more than their examples explain
    recipe: str | None  # the file
    picture: str | None
    is_interrupted: bool

    def to_json(self) -> JsonObject:
        return asdict(self)


def result_of(facts: Facts, study: Study, *, is_interrupted: bool) -> Result:
    trials = study.trials()
    complete = [each for each in trials if each.state == "complete"]
    start = next((each for each in complete if dict(each.values) == study.start), None)
    scored = [each for each in complete if each.score is not None]
    best = max(scored, key=lambda each: (each.score, -each.number), default=None)
    return Result(
        directory=str(facts.directory),
        metric=facts.metric,
        evaluated_on=facts.data.description,
        seconds_per_trial=facts.seconds,
        wall_seconds=study.wall_seconds(),
        trials=trials,
        start=start,
        best=best,
        changes=_changes(facts, best),
        is_clear=_is_clear(facts.metric, start, best),
        recipe=None if best is None else str(facts.directory / RECIPE_FILE),
        picture=None if best is None else str(facts.directory / PICTURE_FILE),
        is_interrupted=is_interrupted,
    )


def _changes(facts: Facts, best: TrialSummary | None) -> list[Change]:
    if best is None:
        return []
    before = facts.start.model_dump(mode="json")
    after = with_values(facts.start, best.values).model_dump(mode="json")
    return [Change(each.key, each.first, each.second) for each in differences(before, after)]


def _is_clear(metric: str, start: TrialSummary | None, best: TrialSummary | None) -> bool | None:
    rows = [each.evaluation for each in (start, best) if each is not None and each.evaluation is not None]
    if len(rows) < 2 or smaller_is_better(metric):
        return None
    first, second = ((float(row[metric]), int(row["examples"])) for row in rows)
    return differ_clearly(first, second)


def write_result(result: Result, facts: Facts, study: Study) -> None:
    """Write the best recipe with its origin, a picture, and everything as JSON."""
    if result.best is None:
        return
    recipe = with_values(facts.start, result.best.values)
    comment = "\n".join(f"# {line}" for line in _origin(result))
    content = {
        RECIPE_FILE: f"{comment}\n{recipe.to_yaml()}".encode(),
        RESULT_FILE: json.dumps(result.to_json(), indent=2).encode(),
        PICTURE_FILE: draw(result.trials, study, facts),
    }
    for name, each in content.items():
        file = facts.directory / name
        try:
            replace_file(file, each)
        except OSError as error:
            raise RunError(f"Cannot write {file}: {reason_of(error)}", hint=hint_for(error)) from error


def _origin(result: Result) -> list[str]:
    best, start = result.best, result.start
    assert best is not None
    lines = [
        "Found by `trm tune`, which trained every candidate for "
        f"{result.seconds_per_trial:.0f} s on this machine.",
        f"It reached {_value(result, best)} on {result.evaluated_on}.",
    ]
    if start is not None and best.number != start.number:
        lines.append(f"The recipe that it started from reached {_value(result, start)}.")
    return lines


def _value(result: Result, trial: TrialSummary) -> str:
    value = (trial.evaluation or {}).get(result.metric)
    return (
        f"{metric_label(result.metric)} {shown_value(result.metric, value)}"
        if value is not None
        else "no evaluation"
    )


def describe_result(result: Result) -> str:
    """Return the result as text for a terminal."""
    counts = Counter(each.state for each in result.trials)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = [
        f"{counted(len(result.trials), 'candidate')} in {result.wall_seconds / 60:.1f} min"
        + (f" ({states})." if states else ".")
    ]
    if result.best is None:
        lines.append("None of them was trained to its end, so there is no best recipe yet.")
    else:
        lines += [*_comparison(result), "", *_files(result)]
    if result.is_interrupted:
        lines.append("Stopped. The same command continues from here.")
    return "\n".join(lines)


def _comparison(result: Result) -> list[str]:
    best, start = result.best, result.start
    assert best is not None
    rows = [["", metric_label(result.metric), "steps", "run", ""]]
    for name, trial in (("start", start), ("best", best)):
        if trial is not None:
            value = (trial.evaluation or {}).get(result.metric, 0.0)
            run = str(Path(result.directory) / (trial.run or ""))
            cells = [name, shown_value(result.metric, value), f"{trial.step:,}", run, described(trial.values)]
            rows.append(cells)
    lines = [*align(rows), f"On {result.evaluated_on}; {result.seconds_per_trial:.0f} s of training each."]
    if start is not None and best.number == start.number:
        lines.append("No candidate was better than the recipe itself.")
        return lines
    if result.is_clear is False:
        lines.append("With so few examples, the difference may be chance: compare both in longer runs.")
    lines += ["", "Changes:", *(f"  {each.key}: {each.start} -> {each.best}" for each in result.changes)]
    return lines


def _files(result: Result) -> list[str]:
    return [
        f"Train it: trm train {result.recipe}",
        f"Picture: {result.picture}",
        f"All candidates: trm runs {Path(result.directory) / 'trials'}",
    ]
