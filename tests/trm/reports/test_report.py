"""A report is made of whatever a run has, shows nothing that is not escaped, and loads nothing."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import BEGAN, append_all, eval_row, event_row, recorded_run, resource_row, train_row
from tiny import plan_of

from macbook_optimization.errors import RunError
from trm.cli import cli
from trm.plan import Execution
from trm.reports.examples import Example, Examples, no_examples
from trm.reports.facts import gather, open_reported_run, time_shares
from trm.reports.finding import UNKNOWN_GAIN, Finding
from trm.reports.history import History
from trm.reports.markdown import as_markdown
from trm.reports.report import as_html, write_report
from trm.runs.directory import EVENTS, METRICS, RESOURCES, Run, only_trainer
from trm.runs.events import Advised, PlanChosen, Restarted, Resumed, Stopped, WorldFormed
from trm.runs.state import is_locked

NONE = no_examples("none were requested")
FILES = ("recipe.yaml", "plan.json", "hardware.json", METRICS, EVENTS, RESOURCES)
EVIL = "<script>alert(1)</script>\"'&$x_1$|`#\x1b[31m"


class Page(HTMLParser):
    """Collects what a page would load or run."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.links = []
        self.ids = []
        self.text = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "action", "srcset", "data"):
                self.links.append(value)
            elif name == "id":
                self.ids.append(value)
            assert not name.startswith("on")

    def handle_data(self, text):
        self.text.append(text)


@pytest.fixture
def run(tmp_path):
    return recorded_run(tmp_path / "run")


def page_of(run):
    return as_html(gather(run, NONE))


def test_the_machines_of_a_run_and_the_time_that_others_waited_for_them_are_shown(run):
    append_all(run, EVENTS, [event_row(WorldFormed(0, ["studio", EVIL, "air"], [4, 1, 3], 0.9), 41)])
    append_all(run, EVENTS, [event_row(WorldFormed(50, ["studio", "air"], [5, 3], 0.9), 42)])
    waited = [train_row(step, waited_for={"studio": 0.5, "air": 7.25}) for step in (51, 52)]
    append_all(run, METRICS, waited)
    report = gather(run, NONE)
    found = {machine.name: (machine.slots, machine.waited_seconds) for machine in report.machines}
    assert found["studio"] == (5, 1.0)
    assert found["air"] == (3, 14.5)
    assert (None, 0.0) in found.values()  # has left
    assert EVIL not in as_html(report)
    assert "14.5 s" in as_html(report)
    assert "| air | 3 | 14.5 s |" in as_markdown(report)


def test_a_run_of_one_machine_has_no_table_of_machines(run):
    append_all(run, EVENTS, [event_row(WorldFormed(0, ["studio"], [4], None), 41)])
    report = gather(run, NONE)
    assert report.machines == []
    assert "Machines" not in as_markdown(report)


def test_a_finished_run_is_described(run):
    report = gather(run, NONE)
    assert report.problems == []
    assert {chart.key for chart in report.charts} >= {"loss", "metric", "speed", "memory", "cpu", "battery"}
    assert {fact.name: fact.value for fact in report.machine}["memory"] == "16.00 GiB"
    measured = {target.name: target.measured for target in report.resources.targets}
    assert measured["CPU"] == "50 % (mean)"  # 400 % of one core, of eight
    assert measured["peak memory"] == "512 MiB"
    assert measured["steps to 95 %"] == "40"
    assert report.resources.machine == 1  # 16 GB
    text = "".join(Page(as_html(report)).text)
    assert "all steps are taken" in text
    assert "set by hand" in text


@pytest.mark.slow
def test_the_page_loads_nothing_and_runs_nothing(run):
    page = Page(page_of(run))
    assert "script" not in page.tags
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    references = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", page_of(run)))
    assert references <= set(page.ids)


@pytest.mark.slow
def test_the_page_is_small_and_the_same_every_time(run):
    first = page_of(run)
    assert first == page_of(run)
    assert len(first.encode()) < 300_000


def test_colours_come_from_the_page(run):
    """Otherwise the dark look would have dark curves."""
    svgs = re.findall(r"<svg.*?</svg>", page_of(run), flags=re.DOTALL)
    assert svgs
    for svg in svgs:
        assert not re.search(r"#[0-9a-f]{6}", svg)
        assert "DejaVu" not in svg


def test_the_time_is_summed_by_activity_and_the_rest_is_other(run):
    shares = {part.activity: part for part in gather(run, NONE).time}
    assert shares["backward"].seconds == pytest.approx(20.0)
    assert shares["other"].seconds == pytest.approx(42 - 40 * 0.86)
    assert sum(part.share for part in shares.values()) == pytest.approx(1)
    assert next(iter(shares)) == "backward"


def test_without_a_best_checkpoint_the_smallest_loss_is_the_best(tmp_path):
    run = Run(tmp_path)
    losses = {10: 2.0, 20: 1.25, 30: 1.5}
    append_all(run, METRICS, [{"kind": "eval", "step": step, "loss": loss} for step, loss in losses.items()])
    report = gather(run, NONE)
    assert report.result.best_step == 20
    assert report.result.rows == [("loss", "1.2500", "1.5000")]
    assert {fact.name: fact.value for fact in report.overview}["best loss"] == "1.2500"


def test_a_run_that_did_not_record_its_time_says_so(run):
    assert time_shares(History()) == []
    (run.path / METRICS).unlink()
    append_all(run, METRICS, [train_row(1, spent={})])
    assert "The run did not record it." in page_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("missing", FILES)
def test_any_file_may_be_missing(run, missing):
    (run.path / missing).unlink()
    report = gather(run, NONE)
    assert as_html(report)
    assert as_markdown(report)
    if missing not in (EVENTS, RESOURCES):
        assert any(missing in problem for problem in report.problems)


@pytest.mark.parametrize("damaged", FILES)
@pytest.mark.parametrize(
    "content", [b"", b"\xff\x00{", b"[1, 2]\n", b'{"kind": "train"}\n', b"{}\n", b"[" * 100_000]
)
def test_any_file_may_be_damaged(run, damaged, content):
    (run.path / damaged).write_bytes(content)
    assert gather(run, NONE).to_json()


def test_a_file_may_be_a_directory(run):
    (run.path / METRICS).unlink()
    (run.path / METRICS).mkdir()
    assert any(METRICS in problem for problem in gather(run, NONE).problems)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        "step", "time", "seconds", "loss", "samples_per_second", "spent", "rss_bytes", "cpu_percent",
        "tables", "exact_accuracy", "event", "reason", "changes", "percent", "thermal_level",
        "battery_percent", "learning_rate", "scale", "gain", "last_step", "peak_bytes", "temperature",
    ]
)  # fmt: skip
NAMES = [
    "plan",
    "stopped",
    "resumed",
    "advice",
    "compiled",
    "memory grows",
    "cooling break",
    "phase",
    "none such",
]


@settings(max_examples=30)
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["train", "eval", "resources", "event"]),
            st.dictionaries(KEYS, JSON, max_size=6),
            st.sampled_from(NAMES),
        ),
        max_size=12,
    )
)
def test_no_row_can_break_a_report(tmp_path_factory, rows):
    """Whatever is valid JSON may be in a file that another version or another program wrote."""
    run = Run(tmp_path_factory.mktemp("rows"))
    for kind, values, name in rows:
        file = {"event": EVENTS, "resources": RESOURCES}.get(kind, METRICS)
        row = {**values, "event": name} if kind == "event" else {"kind": kind, **values}
        append_all(run, file, [row])
    report = gather(run, NONE)
    assert as_markdown(report)
    json.dumps(report.to_json())


def test_rows_of_any_values_can_be_drawn(tmp_path):
    run = Run(tmp_path)
    extreme = [
        train_row(step, loss=value) for step, value in enumerate([1e-300, 1e300, float("inf"), -1, 0], 1)
    ]
    append_all(run, METRICS, [*extreme, eval_row(5, -3.0), eval_row(6, 1e30)])
    append_all(run, RESOURCES, [resource_row(1, temperature=1e308, battery_percent=-1e308)])
    assert "<svg" in page_of(run)


def test_what_comes_from_files_is_escaped(tmp_path):
    run = recorded_run(tmp_path / "r<b>un")
    hardware = {"cpu": {"brand": EVIL, "threads": 8}, "memory": {}, "platform": {"system": EVIL}}
    (run.path / "hardware.json").write_text(json.dumps(hardware))
    table = {"confusion": [[3, 1], [0, 2]]}
    append_all(run, METRICS, [eval_row(50, 0.9, **{EVIL: 0.5, "tables": table})])
    (run.path / "mail").mkdir()
    (run.path / "mail" / "mail.json").write_text(json.dumps({"categories": [EVIL, "ham"]}))
    append_all(
        run, EVENTS, [event_row(Restarted(EVIL, 3), 60), {"event": EVIL, "time": BEGAN + 61, "step": 3}]
    )
    found = [Finding(EVIL, 1, EVIL, EVIL, EVIL)]
    examples = Examples([Example(0, False, EVIL, "AAAA")], 0, 1, EVIL)
    report = replace(gather(run, examples), findings=found)
    page = as_html(report)
    assert "<script" not in page
    assert "<b>un" not in page
    assert "\x1b" not in page.replace("\\x1b", "")
    assert "script" not in Page(page).tags
    markdown = as_markdown(report)
    assert "<script" not in markdown.replace("\\<script", "")


def test_a_metric_with_a_name_of_symbols_is_drawn_as_text(tmp_path):
    run = Run(tmp_path)
    append_all(run, METRICS, [{"kind": "eval", "step": step, "$a_b^{$<c>": 0.5} for step in (1, 2)])
    chart = gather(run, NONE).charts[0]
    assert chart.key == "metric"
    assert "$a b^{$&lt;c&gt;" in page_of(run)


def test_marks_show_their_events(run):
    assert "<title>resumed after step 10</title>" in page_of(run)


def test_a_night_between_two_starts_is_not_drawn(tmp_path):
    run = Run(tmp_path)
    night = 36_000
    seconds = [*range(100), *range(night, night + 100)]
    append_all(run, RESOURCES, [resource_row(second, battery_percent=50.0) for second in seconds])
    append_all(run, METRICS, [train_row(1)])
    battery = next(chart for chart in gather(run, NONE).charts if chart.key == "battery")
    assert max(battery.series[0].x) * 60 < 250


def test_a_short_break_between_two_starts_is_not_drawn_either(tmp_path):
    """The first samples of a start are older than its event: PyTorch is loaded first."""
    run = Run(tmp_path)
    append_all(run, RESOURCES, [resource_row(second) for second in (*range(60), *range(88, 140))])
    append_all(run, METRICS, [train_row(step) for step in (*range(1, 58), *range(95, 140))])
    append_all(run, EVENTS, [event_row(Resumed(57, []), 93)])
    memory = next(chart for chart in gather(run, NONE).charts if chart.key == "memory")
    assert max(memory.series[-1].x) == pytest.approx(139 - 29, abs=1)


def test_a_pause_within_a_start_is_drawn(tmp_path):
    run = Run(tmp_path)
    append_all(run, RESOURCES, [resource_row(second) for second in (*range(60), *range(88, 140))])
    append_all(run, METRICS, [train_row(1)])
    memory = next(chart for chart in gather(run, NONE).charts if chart.key == "memory")
    assert max(memory.series[-1].x) == pytest.approx(139, abs=1)


def test_contention_is_in_the_report_if_it_was_an_event_and_as_that_says(tmp_path):
    run = recorded_run(tmp_path / "run", stopped=False)
    busy = {"cpu_percent": [100.0] * 8, "process_cpu_percent": 100.0}
    append_all(run, RESOURCES, [resource_row(second, **busy) for second in range(40, 90)])
    run.record(PlanChosen(replace(plan_of(run.config), execution=Execution(threads=8)).to_json()))
    assert "contention" not in [finding.kind for finding in gather(run, NONE).findings]
    advised = Advised(9, "contention", "Most of all stress.", "Close it.", "Up to 2.0 times as fast.")
    append_all(run, EVENTS, [event_row(advised, 90)])
    report = gather(run, NONE)
    (found,) = [finding for finding in report.findings if finding.kind == "contention"]
    assert (found.evidence, found.gain) == ("Most of all stress.", "Up to 2.0 times as fast.")
    append_all(run, EVENTS, [event_row(Advised(9, "swap", "Swap grew.", "Close it."), 90)])
    (found,) = [finding for finding in gather(run, NONE).findings if finding.kind == "swap"]
    assert found.gain == UNKNOWN_GAIN
    assert "Up to 2.0 times as fast." in as_html(report)
    assert "Up to 2.0 times as fast." in as_markdown(report)


def test_repeated_steps_are_counted_once_and_shown_apart(run):
    before = {part.activity: part.seconds for part in gather(run, NONE).time}
    append_all(run, METRICS, [train_row(step, time=BEGAN + 60 + step) for step in range(31, 41)])
    after = {part.activity: part.seconds for part in gather(run, NONE).time}
    assert after.pop("repeated after a crash") == pytest.approx(10 * 0.86)
    assert after == pytest.approx(before)


def test_the_cpu_of_all_programs_is_as_visible_as_that_of_the_trainer(run):
    cpu = next(chart for chart in gather(run, NONE).charts if chart.key == "cpu")
    assert [(series.name, series.style) for series in cpu.series] == [
        ("trainer", "line"),
        ("all programs", "line"),
    ]


def heat_of(run):
    return next(chart for chart in gather(run, NONE).charts if chart.key == "heat")


def test_the_thermal_level_is_drawn_in_steps_where_no_temperature_is_reported(tmp_path):
    run = Run(tmp_path)
    levels = ["nominal"] * 10 + ["heavy"] * 5 + ["of a later system"] + ["moderate"] * 5
    rows = [resource_row(second, thermal_level=level) for second, level in enumerate(levels)]
    append_all(run, RESOURCES, rows)
    append_all(run, METRICS, [train_row(1)])
    heat = heat_of(run)
    assert heat.series[0].y == [0.0] * 10 + [2.0] * 5 + [1.0] * 5
    assert heat.series[0].style == "steps"
    page = page_of(run)
    assert "Thermal level (0 nominal to 4 sleeping)" in page
    assert ">heavy</text>" in page
    assert ">trapping</text>" not in page


def test_a_temperature_is_drawn_where_it_is_reported(tmp_path):
    run = Run(tmp_path)
    append_all(run, RESOURCES, [resource_row(second, temperature=60.0 + second) for second in range(5)])
    append_all(run, METRICS, [train_row(1)])
    assert heat_of(run).series[0].y == [60.0, 61.0, 62.0, 63.0, 64.0]
    assert heat_of(run).levels == ()


def test_commands_in_markdown_stay_code(tmp_path):
    markdown = as_markdown(gather(recorded_run(tmp_path / "a_b", stopped=False), NONE))
    assert f"`trm train {tmp_path / 'a_b'}` resumes it" in markdown


def test_the_states_of_a_run(tmp_path):
    finished = recorded_run(tmp_path / "finished")
    assert gather(finished, NONE).state.name in ("finished", "stopped")
    crashed = recorded_run(tmp_path / "crashed", stopped=False)
    assert gather(crashed, NONE).state.name == "crashed"
    with only_trainer(crashed.path):
        assert is_locked(crashed.path)
        assert gather(crashed, NONE).state.name == "running"
        crashed.record(Stopped("interrupted", 39, 40.0, 0))
        (crashed.path / METRICS).write_text(json.dumps(train_row(39)) + "\n")
        assert gather(crashed, NONE).state.name == "stopped"
    assert not is_locked(crashed.path)
    fresh = recorded_run(tmp_path / "fresh", stopped=False)
    (fresh.path / METRICS).unlink()
    assert gather(fresh, NONE).state.name == "new"


def test_a_run_that_resumed_after_a_stop_and_died_is_crashed(run):
    append_all(run, EVENTS, [{"time": BEGAN + 50, "event": "resumed", "step": 40, "changes": []}])
    append_all(run, METRICS, [train_row(41)])
    assert gather(run, NONE).state.name == "crashed"


def test_advice_of_the_running_training_is_in_the_report(run):
    advised = Advised(7, "contention", "Others used 80 % of the CPU.", "Close them.")
    append_all(run, EVENTS, [event_row(advised, 7)])
    given = Finding("swap", 9, "2 GiB were swapped.", "Lower the budget.", "About 2 times as fast.")
    report = gather(run, NONE)
    assert "contention" in [finding.kind for finding in report.findings]
    text = as_html(replace(report, findings=[*report.findings, given]))
    assert "Close them." in text
    assert "About 2 times as fast." in text


def test_the_confusion_matrix_has_the_names_of_the_categories(run):
    table = {"confusion": [[5.0, 2.0], [0.0, 7.0]], "categories": []}
    append_all(run, METRICS, [eval_row(50, 0.9, tables=table)])
    (run.path / "dataset" / "train").mkdir(parents=True)
    names = {"class_names": ["ham", "spam"]}
    (run.path / "dataset" / "train" / "dataset.json").write_text(json.dumps(names))
    confusion = gather(run, NONE).confusion
    assert confusion.categories == ["ham", "spam"]
    assert confusion.counts == [[5, 2], [0, 7]]
    (worst,) = confusion.worst
    assert (worst.category, worst.taken_for, worst.count) == ("ham", "spam", 2)


def test_a_table_that_is_not_square_is_left_out(run):
    append_all(run, METRICS, [eval_row(50, 0.9, tables={"confusion": [[5.0, 2.0], [0.0]]})])
    assert gather(run, NONE).confusion is None


def test_write_report_replaces_the_page_of_the_run(run):
    (run.path / "report.html").write_text("earlier")
    path = write_report(run)
    assert path == run.path / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [each.name for each in run.path.iterdir() if "partial" in each.name] == []


def test_a_page_that_cannot_be_written_is_a_run_error(run):
    (run.path / "report.html").mkdir()
    with pytest.raises(RunError, match=r"report\.html"):
        write_report(run)


def test_a_directory_that_is_not_a_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RunError, match="is not a"):
            open_reported_run(path)


def command(*words):
    return CliRunner().invoke(cli, ["report", *map(str, words)], catch_exceptions=False)


@pytest.mark.slow
def test_the_command_writes_the_page(run):
    done = command(run.path, "--no-examples")
    assert done.exit_code == 0
    assert str(run.path / "report.html") in done.output
    assert "switched off" in (run.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_writes_to_a_file_and_replaces_only_reports(run, tmp_path):
    out = tmp_path / "page.html"
    for _ in range(2):
        assert command(run.path, "--no-examples", "--out", out).exit_code == 0
    assert not (run.path / "report.html").exists()
    assert command(run.path, "--no-examples", "--format", "markdown", "--out", out).exit_code == 0
    assert out.read_text(encoding="utf-8").startswith("# Report: ")


@pytest.mark.parametrize(
    "own",
    [
        "my notes",
        '<!doctype html>\n<html lang="en">\n<head><title>My page: report</title></head></html>',
        '<!doctype html><meta name="generator" content="Hugo"><p>trm report',
        "# Report: my holidays\n\n**Sun**: every day.",
    ],
)
def test_a_page_that_somebody_wrote_is_not_replaced(run, tmp_path, own):
    out = tmp_path / "page.html"
    out.write_text(own)
    done = CliRunner().invoke(cli, ["report", str(run.path), "--out", str(out)])
    assert done.exit_code == 1
    assert out.read_text() == own


def test_a_report_of_an_earlier_version_is_replaced(run, tmp_path):
    out = tmp_path / "page.html"
    page = page_of(run)
    out.write_text(page.replace('<meta name="generator" content="trm report">\n', ""), encoding="utf-8")
    assert out.stat().st_size < len(page.encode())
    assert command(run.path, "--no-examples", "--out", out).exit_code == 0
    assert 'content="trm report"' in out.read_text(encoding="utf-8")


def test_markdown_is_printed(run):
    done = command(run.path, "--no-examples", "--format", "markdown")
    assert done.output.startswith("# Report: ")
    assert "| backward | 20.0 s |" in done.output
    assert not (run.path / "report.html").exists()


def test_json_has_the_facts_and_writes_nothing(run):
    facts = json.loads(command(run.path, "--no-examples", "--json").output)
    assert facts["state"]["name"] in ("finished", "stopped")
    assert facts["time"][0]["activity"] == "backward"
    assert facts["written"] == {}
    assert not (run.path / "report.html").exists()


def test_the_command_writes_event_files(run, tmp_path):
    facts = json.loads(command(run.path, "--no-examples", "--json", "--tensorboard").output)
    assert facts["written"] == {"tensorboard": str(run.path / "tensorboard")}
    assert command(run.path, "--no-examples", "--tensorboard", tmp_path / "board").exit_code == 0
    assert len(list((tmp_path / "board").iterdir())) == 1


def test_the_option_for_event_files_may_be_followed_by_the_run(run, tmp_path):
    facts = json.loads(command("--no-examples", "--json", "--tensorboard", run.path).output)
    assert facts["written"] == {"tensorboard": str(run.path / "tensorboard")}
    facts = json.loads(command("--no-examples", "--json", "--tensorboard", tmp_path / "b", run.path).output)
    assert facts["written"] == {"tensorboard": str(tmp_path / "b")}
    missing = command("--tensorboard")
    assert (missing.exit_code, "Missing argument 'RUN'" in missing.output) == (2, True)
