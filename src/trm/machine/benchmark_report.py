"""The results of `trm bench` as a table, as JSON, and as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from pydantic import ValidationError

from macbook_optimization.errors import DataError
from macbook_optimization.file_errors import hint_for, reason_of
from macbook_optimization.input_files import read_json
from macbook_optimization.json_types import JsonObject
from macbook_optimization.output_files import OutputFile
from macbook_optimization.units import GIB, MIB, counted
from trm.machine.benchmark_comparison import RULE, Comparison, rates_per_repeat
from trm.machine.benchmark_records import Report, Results
from trm.machine.text import NOT_REPORTED, load_warning, significant

START_NOTE = (
    "A start is the time from the start of a process to the end of its first step. The first start is\n"
    "cold or warm, depending on the disk cache, which only root can empty."
)
_LABEL_WIDTH = 20
_COLUMN_WIDTH = 26
_MAX_FILE_BYTES = 10 * MIB


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    least: float
    greatest: float


def spreads(results: Results) -> dict[str, Spread | None]:
    """Summarise each quantity over the repeats; None for one that no repeat measured."""
    repeats = results.repeats
    rates = rates_per_repeat(results)
    flops = results.work.flops_per_sample
    values: dict[str, list[float]] = {
        "samples_per_second": rates,
        "share_of_product_peak": [
            rate * flops / repeat.product_rate for rate, repeat in zip(rates, repeats, strict=True)
        ],
        "product_rate": [repeat.product_rate for repeat in repeats],
        "resident_peak_bytes": [repeat.resident_peak_bytes for repeat in repeats],
        "resident_mean_bytes": [repeat.resident_mean_bytes for repeat in repeats],
        "cpu_percent": [repeat.cpu_percent for repeat in repeats],
        "first_start_seconds": [each.start_seconds for each in repeats if each.first_of_command],
        "warm_start_seconds": [each.start_seconds for each in repeats if not each.first_of_command],
    }
    return {name: Spread(median(v), min(v), max(v)) if v else None for name, v in values.items()}


def report_to_json(report: Report, comparison: Comparison | None) -> JsonObject:
    """Return the report, a summary of each profile and, if there is one, the comparison."""
    summary = {
        name: {quantity: asdict(spread) if spread else None for quantity, spread in spreads(results).items()}
        for name, results in report.profiles.items()
    }
    compared = {"comparison": asdict(comparison)} if comparison else {}
    return {**report.model_dump(mode="json"), "summary": summary, **compared}


def format_report(report: Report, comparison: Comparison | None) -> str:
    """Return the table and, if there is one, the comparison below it."""
    if comparison is None:
        return format_table(report)
    lines = [format_table(report), "", f"Compared with {comparison.file} of {comparison.date}:"]
    for name, found in comparison.verdicts.items():
        lines.append(f"  {name.ljust(6)}{found.verdict}: {found.ratio:.2f} times as fast")
    lines += [f"  warning: {warning}" for warning in comparison.warnings]
    return "\n".join([*lines, RULE])


def format_table(report: Report) -> str:
    """Return one row per quantity and one column per profile, at most 100 characters wide."""
    labels = [
        "",
        "model",
        "examples",
        "samples/s",
        "of matmul peak, %",
        "matmul, GFLOP/s",
        "peak memory, MiB",
        "mean memory, MiB",
        "CPU use, %",
        "first start, s",
        "warm start, s",
    ]
    columns = [[name, *_column(results)] for name, results in report.profiles.items()]
    lines = [_title(report), ""]
    for label, *cells in zip(labels, *columns, strict=True):
        line = label.ljust(_LABEL_WIDTH) + "".join(cell.ljust(_COLUMN_WIDTH) for cell in cells)
        lines.append(line.rstrip())
    lines += ["", START_NOTE]
    if warning := load_warning(report.busy_percent):
        lines.append(warning)
    return "\n".join(lines)


def _title(report: Report) -> str:
    machine = report.machine
    brand = machine.get("brand") or NOT_REPORTED
    memory = float(machine.get("memory_bytes") or 0) / GIB
    repeats = max(len(results.repeats) for results in report.profiles.values())
    count = "one repeat" if repeats == 1 else f"{repeats} repeats: median (least to greatest)"
    torch = report.versions.get("torch")
    return f"{brand}, {machine.get('cores')} cores, {memory:.3g} GiB, torch {torch}; {count}"


def _column(results: Results) -> list[str]:
    work = results.work
    of = spreads(results)
    return [
        f"{work.hidden_size} wide, {work.seq_len} long",
        f"{work.micro_batch_size} on {counted(work.threads, 'thread')}",
        _cell(of["samples_per_second"], digits=3),
        _cell(of["share_of_product_peak"], 100),
        _cell(of["product_rate"], 1e-9),
        _cell(of["resident_peak_bytes"], 1 / MIB),
        _cell(of["resident_mean_bytes"], 1 / MIB),
        _cell(of["cpu_percent"]),
        _cell(of["first_start_seconds"], digits=2),
        _cell(of["warm_start_seconds"], digits=2),
    ]


def _cell(spread: Spread | None, factor: float = 1.0, digits: int = 1) -> str:
    """Format a spread with this many significant digits, and never less than the whole number."""
    if spread is None:
        return NOT_REPORTED
    middle, least, greatest = (
        significant(factor * value, digits) for value in (spread.median, spread.least, spread.greatest)
    )
    return middle if spread.least == spread.greatest else f"{middle} ({least} to {greatest})"


def write_report(report: Report, file: OutputFile) -> None:
    file.write((report.model_dump_json(indent=2) + "\n").encode())


def read_report(file: Path) -> Report:
    """Read a report of this or an earlier version."""
    hint = "Give a file that trm bench --out has written."
    try:
        return Report.model_validate(read_json(file, _MAX_FILE_BYTES))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {reason_of(error)}", hint_for(error, hint)) from error
    except ValidationError as error:
        raise DataError(f"{file} is not a report of trm bench: {_first_problem(error)}", hint=hint) from error
    except ValueError as error:
        raise DataError(f"{file} is not a report of trm bench: {error}", hint=hint) from error


def read_baseline(file: Path, names: Sequence[str]) -> Report:
    """Read a report to compare these profiles with; raise `DataError` if it has none of them."""
    report = read_report(file)
    if not set(names) & set(report.profiles):
        raise DataError(
            f"{file} has nothing to compare with: it measured {', '.join(report.profiles)}",
            hint=f"Add --profile {next(iter(report.profiles))}.",
        )
    return report


def _first_problem(error: ValidationError) -> str:
    """Return the first problem on one printable line, whatever keys the file has."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ascii(".".join(map(str, first["loc"])))[1:-1]
    return f"{place[:60]}: {first['msg']}" if place else first["msg"]
