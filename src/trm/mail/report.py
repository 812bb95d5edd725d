"""The report on a trained mail model: its data, its measured quality, and whether mail changes with time."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from macbook_optimization.json_types import JsonMapping, JsonObject
from macbook_optimization.units import counted
from trm.mail.fitting import ClassifierMetrics, Drift


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The quality of the model on messages that nothing was chosen on."""

    messages: int
    columns: dict[str, ClassifierMetrics]  # of each path, of both together, and of TF-IDF + LinearSVC
    decided: float  # share of the messages that were not unsure
    error_of_decided: float
    calibration_error: float


@dataclass(frozen=True, slots=True)
class Report:
    run: str
    quality: JsonObject
    held_out: HeldOut | None
    drift: Drift | None
    seconds: float
    gate: float | None = None  # of the recursive path; None without one, 0 where it is not used

    def to_json(self) -> JsonObject:
        return asdict(self)

    def text(self) -> str:
        lines = []
        if self.held_out is not None:
            lines += held_out_lines(asdict(self.held_out))
        if self.gate is not None:
            lines.append(f"The recursive path is {use_of(self.gate)}.")
        if self.held_out is not None and not self.held_out.decided:
            lines.append(
                "Every answer is unsure: no confidence keeps the error budget. Train on more messages, "
                "or raise --max-error when you classify."
            )
        if self.drift is not None and self.drift.breaks_promise:
            lines.append(
                f"Warning: mail changes with time. A model of the older messages was wrong about "
                f"{self.drift.newest_error:.1%} of the newest that it decided, instead of "
                f"{self.drift.promised_error:.1%}."
            )
        return "\n".join([*lines, f"The model is in {self.run}; it took {self.seconds:.0f} s."])


def use_of(gate: float) -> str:
    """Return whether recursion is used, in words."""
    return f"added with a gate of {gate:g}" if gate else "not used: it did not help on messages kept from it"


def held_out_lines(found: JsonMapping) -> list[str]:
    """Return the quality of each path on held-out messages as a table; `found` is a `HeldOut` as JSON."""
    columns = found["columns"]
    return [
        f"On {counted(int(found['messages']), 'held-out message')}:",
        f"  {'':24}{'accuracy':>9}{'macro-F1':>10}",
        *(f"  {name:24}{each['accuracy']:>9.1%}{each['macro_f1']:>10.3f}" for name, each in columns.items()),
        f"  {found['decided']:.1%} decided, {_wrong(found)}",
    ]


def _wrong(found: JsonMapping) -> str:
    decided = round(found["decided"] * found["messages"])
    wrong = round(found["error_of_decided"] * decided)
    return f"{found['error_of_decided']:.1%} of those wrong ({wrong:,} of {decided:,})"
