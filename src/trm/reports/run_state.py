"""The state of a run as one sentence, for its report."""

from __future__ import annotations

from dataclasses import dataclass

from macbook_optimization.terminal_text import one_line
from trm.reports.event_text import describe_event
from trm.runs.directory import Run
from trm.runs.state import Name, RunState


@dataclass(frozen=True, slots=True)
class DescribedState:
    name: Name
    text: str


def describe_state(run: Run, state: RunState) -> DescribedState:
    return DescribedState(state.name, _sentence(run, state))


def _sentence(run: Run, state: RunState) -> str:
    if state.name == "running":
        return f"It is being trained now; the last row is of step {state.step:,}."
    if state.name == "new":
        return "No step of it has been recorded yet."
    if state.name == "crashed":
        return (
            f"It crashed after step {state.step:,}: the process was killed, or the machine went down. "
            f"`trm train {run.path}` resumes it from its newest checkpoint."
        )
    how = f"ended after step {state.step:,}" if state.stop is None else one_line(describe_event(state.stop))
    return f"It {how}." if state.has_ended else f"It {how}. `trm train {run.path}` resumes it."
