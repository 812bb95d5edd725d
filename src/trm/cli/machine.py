"""`trm doctor` and `trm bench`: what this machine can do."""

from __future__ import annotations

from pathlib import Path

import click

from macbook_optimization.output_files import OutputFile
from trm.cli.common import PATH, OutputOption, force_option, json_option, show, showing
from trm.machine.benchmark_file import BENCHMARK


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show this machine, its measured speed, the plan it would get, and recommendations."""
    with showing("Examining this machine") as display:
        from trm.machine.doctor import examine
        from trm.machine.doctor_report import format_examination

        found = examine(display)
    show(found.to_json(), as_json, format_examination(found))


@click.command()
@click.option(
    "--profile",
    "names",
    type=click.Choice(["8gb", "16gb", "32gb", "here"]),
    multiple=True,
    default=["here"],
    show_default=True,
    help="Model and micro-batch for a machine of this size; may be given several times.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    default=5,
    show_default=True,
    help="Repeats per profile, each in a new process.",
)
@click.option("--out", type=OutputOption(BENCHMARK), help="Save all measurements as JSON.")
@force_option
@click.option("--compare", type=PATH, metavar="FILE", help="Compare with measurements saved earlier in FILE.")
@json_option
def bench(
    names: tuple[str, ...],
    repeats: int,
    out: OutputFile | None,
    compare: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast this machine trains a model of its size, and the memory it takes.

    Takes real steps on random tokens. Close other programs first.
    """
    from macbook_optimization.hardware_detection import HardwareDetector
    from trm.machine import benchmark_report as reports
    from trm.machine.benchmark import measure, select_profiles
    from trm.machine.benchmark_comparison import compare as compare_reports

    hardware = HardwareDetector().detect(with_torch=False)
    profiles = select_profiles(names, hardware.memory.total_memory)
    baseline = None if compare is None else reports.read_baseline(compare, [p.name for p in profiles])
    with showing("Preparing the benchmark") as display:
        report = measure(profiles, repeats, hardware, display)
    compared = compare_reports(report, baseline, compare) if baseline and compare else None
    show(reports.report_to_json(report, compared), as_json, reports.format_report(report, compared))
    if out is not None:  # last: the result has been shown, even if the file cannot be written
        reports.write_report(report, out)
