"""`trm email export`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from macbook_optimization.units import MIB
from trm.cli.common import PATH, json_option, set_environment, show, showing


@click.command()
@click.argument("run", type=PATH)
@click.argument("directory", type=PATH)
@click.option("--min-df", type=click.IntRange(1, 100_000),
              help="Leave out n-grams of fewer training messages: the model then reveals less.")  # fmt: skip
@click.option("--prune", type=click.FloatRange(0, 0.99), default=0.0, show_default=True, metavar="SHARE",
              help="Set this share of the weights of the recursive path to zero.")  # fmt: skip
@click.option("--int8", is_flag=True, help="Store the weights of the recursive path as 8-bit integers.")
@click.option("--onnx", is_flag=True, help="Also write the recursive path as ONNX, and verify it.")
@json_option
def export(
    run: Path, directory: Path, min_df: int | None, prune: float, int8: bool, onnx: bool, as_json: bool
) -> None:
    """Write the model of RUN to the new DIRECTORY, for use without the run.

    It holds no message. `trm email` and `trm.load_mail` accept DIRECTORY in place of a run.
    """
    with showing("Reading the model"):
        from macbook_optimization.performance_reporting import available_cores
        from trm.mail.export import ExportOptions, export_model
        from trm.mail.loading import load_mail

        set_environment(available_cores())
        exported = export_model(load_mail(run).model, directory, ExportOptions(min_df, prune, int8, onnx))
    lines = [f"{directory}: {exported.mib:.1f} MiB"]
    lines += [f"  {name:24}{size / MIB:8.2f} MiB" for name, size in exported.files.items()]
    if exported.onnx_difference is not None:
        lines.append(f"The ONNX graph gives our own probabilities within {exported.onnx_difference:.1e}.")
    show(asdict(exported), as_json, "\n".join(lines))
