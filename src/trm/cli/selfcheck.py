"""`trm selfcheck`: everything that has to be checked on the real machine."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from macbook_optimization.output_files import FileKind, OutputFile, json_like
from trm.cli.common import OutputOption, force_option, json_option, show, showing


def _is_selfcheck(value: Any) -> bool:
    return isinstance(value, dict) and value.get("kind") == "trm selfcheck"


@click.command()
@click.option(
    "--out",
    type=OutputOption(FileKind("a report of trm selfcheck", json_like(_is_selfcheck))),
    default="trm-selfcheck.json",
    show_default=True,
    help="File to write. It contains nothing personal.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0.1, 60),
    default=15.0,
    show_default=True,
    help="Checks that would begin after this time are skipped.",
)
@force_option
@json_option
def selfcheck(out: OutputFile, minutes: float, as_json: bool) -> None:
    """Check this program on this machine, and write a file to attach to a report.

    Compares what is read about the hardware with the system's own tools; checks durable files, pauses, memory
    prediction, every backend and device against the CPU, a short training with each, and a kill. Exits with 1
    if a check fails. What does not apply here is skipped, with the reason.
    """
    end = time.monotonic() + 60 * minutes
    with showing("Preparing the checks") as display:
        from macbook_optimization.hardware_detection import HardwareDetector
        from trm.machine.checks_hardware import hardware_checks
        from trm.machine.checks_system import system_checks
        from trm.machine.checks_training import training_checks
        from trm.machine.selfcheck import format_results, is_passed, report_of, run_checks, to_bytes

        hardware = HardwareDetector().detect(with_torch=False)
        checks = [*hardware_checks(), *system_checks(), *training_checks()]
        results = run_checks(checks, hardware, display, end - time.monotonic())
    report = report_of(results, hardware)
    out.write(to_bytes(report))
    text = f"{format_results(results)}\nWritten to {out.path}; it contains nothing personal."
    show(report, as_json, text)
    sys.exit(0 if is_passed(results) else 1)
