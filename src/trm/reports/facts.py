"""Everything that a report says, gathered once for its three forms: HTML, Markdown and JSON.

A report is made of whatever the run has. A file that is missing or damaged costs its section, and a line that
says so.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from macbook_optimization.errors import ConfigError, RunError
from macbook_optimization.file_errors import reason_of
from macbook_optimization.input_files import read_input
from macbook_optimization.json_types import JsonObject
from macbook_optimization.terminal_text import one_line, visible
from macbook_optimization.units import MIB
from trm.config import RunConfig
from trm.plan import Plan
from trm.reports.confusion import Confusion, confusion_of
from trm.reports.curves import Chart, make_charts
from trm.reports.description import Choice, Fact, machine_facts, plan_choices, read_object, recipe_facts
from trm.reports.diagnosis import diagnose
from trm.reports.event_groups import MarkGroup, group_of
from trm.reports.event_text import describe_event
from trm.reports.examples import Examples
from trm.reports.finding import UNKNOWN_GAIN, Finding
from trm.reports.history import History
from trm.reports.machines import MachineFacts, machines_of
from trm.reports.run_state import DescribedState, describe_state
from trm.reports.targets import ResourceSummary, scales_of, summarise_resources
from trm.reports.wording import duration, significant
from trm.runs.directory import EVENTS, MAIL, METRICS, RESOURCES, Run
from trm.runs.events import Advised
from trm.runs.metric import USUAL_METRICS, metric_label, primary_metric
from trm.runs.reading import Follower
from trm.runs.rows import Row, number
from trm.runs.state import state_of
from trm.tasks.metrics import goodness, shown_value, smaller_is_better

MAX_EVENTS_SHOWN = 200
REPEATED = "repeated after a crash"
_FILES = ("recipe.yaml", METRICS, EVENTS, "plan.json", "checkpoints", MAIL)
_NOT_METRICS = (
    "kind", "time", "step", "seconds", "examples", "mean_steps", "evaluation_seconds", "tasks_evaluated",
    "tasks_total",
)  # fmt: skip
_MAX_RECIPE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class TimeShare:
    activity: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class EventLine:
    when: str
    step: int | None
    group: MarkGroup
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """The metrics of the best evaluation and of the last one."""

    primary: str
    best_step: int | None
    last_step: int
    rows: list[tuple[str, str, str]]  # metric, best, last


@dataclass(frozen=True, slots=True)
class Report:
    run: str
    state: DescribedState
    overview: list[Fact]
    recipe: list[Fact]
    recipe_text: str
    machine: list[Fact]
    plan: list[Choice]
    plan_warnings: list[str]
    result: Result | None
    charts: list[Chart]
    time: list[TimeShare]
    machines: list[MachineFacts]
    resources: ResourceSummary
    events: list[EventLine]  # the newest ones
    num_events: int
    confusion: Confusion | None
    examples: Examples
    findings: list[Finding]
    problems: list[str]  # files that could not be read

    def to_json(self) -> JsonObject:
        """Return the facts as JSON-able values, without the pictures."""
        facts = asdict(self)
        for example in facts["examples"]["shown"]:
            del example["png"]
        return facts


def open_reported_run(path: Path) -> Run:
    """Return a run with at least one of the files of a run; raise `RunError` for anything else."""
    if not any(os.path.lexists(path / name) for name in _FILES):
        problem = "is not a run" if path.is_dir() else "is not a directory"
        raise RunError(f"{path} {problem}", hint="`trm runs` lists the existing runs.")
    return Run(path)


def read_history_leniently(run: Run, problems: list[str]) -> History:
    """Read what can be read of a run's rows; what cannot adds a line to `problems`."""
    history = History()
    for name in (METRICS, EVENTS, RESOURCES):
        try:
            history.add(Follower((run.path / name,)).skim())
        except OSError as error:
            problems.append(f"{name} cannot be read: {reason_of(error)}.")
    return history


@dataclass(frozen=True, slots=True)
class _Sources:
    """The contents of a run's files."""

    run: Run
    config: RunConfig | None
    plan: Plan | None
    hardware: JsonObject
    history: History
    best: JsonObject
    problems: list[str]


def gather(run: Run, examples: Examples) -> Report:
    """Gather everything that a report says."""
    sources = _read(run)
    metric, _ = primary_metric(sources.best) or (_likely_metric(sources.history), None)
    plan = sources.plan
    scales = scales_of(sources.history, sources.hardware, metric, None if plan is None else plan.budget_bytes)
    result = _result(sources, metric)
    return Report(
        run=visible(str(run.path)),
        state=describe_state(run, state_of(run, sources.config, sources.history.last)),
        overview=_overview(sources, metric),
        recipe=[] if sources.config is None else recipe_facts(sources.config),
        recipe_text=_recipe_text(run),
        machine=machine_facts(sources.hardware),
        plan=[] if plan is None else plan_choices(plan),
        plan_warnings=[] if plan is None else [str(text) for text in plan.warnings],
        result=result,
        charts=make_charts(sources.history, scales),
        time=time_shares(sources.history),
        machines=machines_of(sources.history),
        resources=summarise_resources(sources.history, sources.hardware, scales),
        events=_event_lines(sources.history),
        num_events=sources.history.event_counts.total(),
        confusion=_confusion(sources, None if result is None else result.best_step),
        examples=examples,
        findings=_findings(sources),
        problems=sources.problems,
    )


def _read(run: Run) -> _Sources:
    problems: list[str] = []
    config = None
    try:
        config = run.config
    except (RunError, ConfigError) as error:
        problems.append(f"recipe.yaml cannot be used: {error}")
    plan = run.plan
    if plan is None:
        problems.append("plan.json is missing or cannot be read.")
    hardware = read_object(run.path / "hardware.json", problems)
    history = read_history_leniently(run, problems)
    if not history.recent and not history.evaluations:
        problems.append(f"{METRICS} has no row that can be read.")
    best = run.checkpoints().best() or _best_evaluation(history)
    return _Sources(run, config, plan, hardware, history, best, problems)


def _best_evaluation(history: History) -> JsonObject:
    """Return the best row of a run without a record of its best checkpoint."""
    metric = _likely_metric(history)
    rows = [row for row in history.evaluations if math.isfinite(number(row.get(metric)))]
    best: JsonObject = max(rows, key=lambda row: goodness(metric, number(row[metric])), default={})
    return {**best, "primary_metric": metric} if best else {}


def _recipe_text(run: Run) -> str:
    try:
        text = read_input(run.path / "recipe.yaml", _MAX_RECIPE_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    return visible(text)


def _likely_metric(history: History) -> str:
    """Return the primary metric of a run without a best checkpoint: the first that its evaluations have."""
    names = history.evaluations[-1] if history.evaluations else {}
    known = (name for name in (*USUAL_METRICS, *names) if name in _metrics_of(names))
    return next(known, USUAL_METRICS[0])


def _metrics_of(row: Row) -> dict[str, float]:
    values = {str(name): number(value) for name, value in row.items() if name not in _NOT_METRICS}
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _overview(sources: _Sources, metric: str) -> list[Fact]:
    history = sources.history
    config = sources.config
    best = number(sources.best.get(metric))
    last = "" if config is None else f" of {config.training.last_step:,}"
    speeds = [value for value in history.train["samples_per_second"] if math.isfinite(value)]
    facts = {
        "step": f"{history.step:,}{last}",
        "training time": duration(training_seconds(history)),
        "started": _when(_first_time(history)),
        "last sign of life": _when(_last_time(history)),
        f"best {metric_label(metric)}": _metric_text(metric, best)
        if math.isfinite(best)
        else "not evaluated",
        "throughput at the end": f"{significant(speeds[-1])} samples/s" if speeds else "not reported",
    }
    return [Fact(name, value) for name, value in facts.items()]


def training_seconds(history: History) -> float:
    """Return the seconds of training over all starts, as the newest row or event says."""
    ends = [number(event.get("seconds")) for event in history.events if event.get("event") == "stopped"]
    rows = [number(rows[-1].get("seconds")) for rows in (history.recent, history.evaluations) if rows]
    return max((value for value in (*ends[-1:], *rows) if math.isfinite(value)), default=math.nan)


def _times(history: History) -> list[float]:
    rows = [*history.recent, *history.events, *history.recent_resources, *history.evaluations]
    found = [number(row.get("time")) for row in rows]
    found += [*history.train["time"][:1], *history.resources["time"][:1]]
    return [time for time in found if math.isfinite(time)]


def _first_time(history: History) -> float:
    return min(_times(history), default=math.nan)


def _last_time(history: History) -> float:
    return max(_times(history), default=math.nan)


def _when(time: float) -> str:
    """Return a time in the zone of this machine, to the second."""
    try:
        return datetime.fromtimestamp(time).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return "not reported"


def _result(sources: _Sources, metric: str) -> Result | None:
    evaluations = sources.history.evaluations
    if not evaluations:
        return None
    last = _metrics_of(evaluations[-1])
    best_step = sources.best.get("step")
    best_row = next((row for row in evaluations if row.get("step") == best_step), sources.best)
    best = _metrics_of(best_row)
    names = [metric, *(name for name in last if name != metric)]
    rows = [
        (metric_label(name), _metric_text(name, best.get(name)), _metric_text(name, last.get(name)))
        for name in names
        if name in last or name in best
    ]
    step = best_step if isinstance(best_step, int) else None
    return Result(metric, step, int(evaluations[-1]["step"]), rows)


def _metric_text(name: str, value: float | None) -> str:
    if value is None:
        return "not reported"
    return shown_value(name, value) if smaller_is_better(name) or 0 <= value <= 1 else significant(value)


def time_shares(history: History) -> list[TimeShare]:
    """Return where the time went, the longest first. Empty if the run did not record it.

    The activities add up to the training time. Steps that a crash lost come on top of it.
    """
    if not history.spent:
        return []
    recorded = float(sum(history.spent.values()))
    seconds = training_seconds(history)
    total = max(recorded, seconds) if math.isfinite(seconds) else recorded
    spent = dict(sorted(history.spent.items(), key=lambda part: -part[1]))
    if total > recorded:
        spent["other"] = total - recorded
    if history.repeated_seconds:
        spent[REPEATED] = history.repeated_seconds
        total += history.repeated_seconds
    return [TimeShare(name, value, value / total if total else 0.0) for name, value in spent.items()]


def _event_lines(history: History) -> list[EventLine]:
    newest = list(history.events)[-MAX_EVENTS_SHOWN:]
    return [_event_line(event) for event in newest]


def _event_line(event: Row) -> EventLine:
    step = number(event.get("step"))
    name = visible(str(event.get("event")))
    place = int(step) if math.isfinite(step) else None
    return EventLine(
        _when(number(event.get("time"))), place, group_of(event), name, one_line(describe_event(event))
    )


def _confusion(sources: _Sources, step: int | None) -> Confusion | None:
    dataset = None if sources.config is None else sources.config.data.path
    return confusion_of(sources.run.path, dataset, sources.history, step)


def _findings(sources: _Sources) -> list[Finding]:
    """Return the diagnosis, and what was found while the run was training but not by the diagnosis."""
    findings = [] if sources.config is None else diagnose(sources.run, sources.history)
    known = {finding.kind for finding in findings}
    recorded: dict[str, Finding] = {}
    for event in sources.history.events:
        if event.get("event") == Advised.name and (kind := str(event.get("diagnosis"))) not in known:
            step = number(event.get("step"))
            recorded[kind] = Finding(
                kind=kind,
                step=int(step) if math.isfinite(step) else 0,
                evidence=str(event.get("evidence", "")),
                advice=str(event.get("advice", "")),
                gain=str(event.get("gain") or UNKNOWN_GAIN),
            )
    return [*findings, *recorded.values()]
