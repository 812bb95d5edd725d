"""What `trm bench` measured: as a table, as a file, and against an earlier one.

Two measurements of one machine always differ a little. Which differences count is decided here, in `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from macbook_optimization.durable_files import replace_file
from macbook_optimization.errors import DataError
from macbook_optimization.hardware_detection import GIB
from macbook_optimization.memory_management import MIB
from trm.training.benchmark import Report, Results, busy_words
from trm.training.measuring import BUSY_PERCENT

RULE = (
    "Faster or slower: the medians are at least 3 % apart, and so clear an order of the repeats comes\n"
    "about by chance at most once in 20 times (rank test of Mann and Whitney)."
)
STARTS = (
    "A start is the time from the start of a process to the end of its first step. The first one is\n"
    "cold or warm, as the disk cache happened to be: emptying that takes root."
)
_LEAST_CHANGE, _CHANCE = 0.03, 0.05
_MACHINE_CHANGE = 0.1  # of the bare product's speed, which no change of ours can move
_LABEL, _COLUMN = 20, 26
_MAX_FILE_BYTES = 10 * MIB
NOT_REPORTED = "not reported"


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    least: float
    greatest: float


def spreads(results: Results) -> dict[str, Spread | None]:
    """Over the repeats; None for what no repeat could measure."""
    repeats, operations = results.repeats, results.work.operations_per_sample
    rates = rates_of(results)
    values: dict[str, list[float]] = {
        "samples_per_second": rates,
        "share_of_product_peak": [
            rate * operations / r.product_rate for rate, r in zip(rates, repeats, strict=True)
        ],
        "product_rate": [r.product_rate for r in repeats],
        "resident_peak_bytes": [r.resident_peak_bytes for r in repeats],
        "resident_mean_bytes": [r.resident_mean_bytes for r in repeats],
        "cpu_percent": [r.cpu_percent for r in repeats],
        "first_start_seconds": [r.start_seconds for r in repeats if r.first_of_command],
        "warm_start_seconds": [r.start_seconds for r in repeats if not r.first_of_command],
    }
    return {name: Spread(median(v), min(v), max(v)) if v else None for name, v in values.items()}


def rates_of(results: Results) -> list[float]:
    """One for each repeat: steps of one process are not independent."""
    return [median(repeat.samples_per_second) for repeat in results.repeats]


def table(report: Report) -> str:
    """A row for each quantity, a column for each profile; at most 100 characters wide."""
    columns = [[name, *_column(results)] for name, results in report.profiles.items()]
    labels = ["", "model", "examples", "samples/s", "of product peak, %", "product, GFLOP/s"]
    labels += ["peak memory, MiB", "mean memory, MiB", "CPU use, %", "first start, s", "warm start, s"]
    rows = zip(labels, *columns, strict=True)
    lines = [label.ljust(_LABEL) + "".join(c.ljust(_COLUMN) for c in cells) for label, *cells in rows]
    busy = [busy_words(report.busy_percent)] if report.busy_percent > BUSY_PERCENT else []
    return "\n".join([_headline(report), "", *(line.rstrip() for line in lines), "", STARTS, *busy])


def _headline(report: Report) -> str:
    machine, repeats = report.machine, max(len(results.repeats) for results in report.profiles.values())
    memory = float(machine.get("memory_bytes") or 0) / GIB
    cores = f"{machine.get('cores')} cores, {memory:.3g} GiB"
    count = "one repeat" if repeats == 1 else f"{repeats} repeats: medians, and least to greatest"
    return f"{machine.get('brand') or NOT_REPORTED}, {cores}, torch {report.versions.get('torch')}; {count}"


def _column(results: Results) -> list[str]:
    work, of = results.work, spreads(results)
    return [
        f"{work.hidden_size} wide, {work.seq_len} long",
        f"{work.micro_batch_size} on {work.threads} threads",
        _cell(of["samples_per_second"], digits=3),
        _cell(of["share_of_product_peak"], 100),
        _cell(of["product_rate"], 1e-9),
        _cell(of["resident_peak_bytes"], 1 / MIB),
        _cell(of["resident_mean_bytes"], 1 / MIB),
        _cell(of["cpu_percent"]),
        _cell(of["first_start_seconds"], digits=2),
        _cell(of["warm_start_seconds"], digits=2),
    ]


def _cell(spread: Spread | None, factor: float = 1.0, digits: int = 0) -> str:
    """`digits` are significant ones, 0 a whole number."""
    if spread is None:
        return NOT_REPORTED
    shown = [_number(factor * v, digits) for v in (spread.median, spread.least, spread.greatest)]
    return shown[0] if spread.least == spread.greatest else f"{shown[0]} ({shown[1]} to {shown[2]})"


def _number(value: float, digits: int) -> str:
    decimals = max(0, digits - 1 - math.floor(math.log10(value))) if digits and value > 0 else 0
    return f"{value:.{decimals}f}"


def check_place(file: Path) -> None:
    """Before a minute has been spent on what should go there."""
    if file.is_dir() or not file.parent.is_dir():
        reason = "it is a directory" if file.is_dir() else f"there is no directory {file.parent}"
        raise DataError(f"{file} cannot be written: {reason}", hint="Give --out another file.")


def write_report(report: Report, file: Path) -> None:
    try:
        replace_file(file, (report.model_dump_json(indent=2) + "\n").encode())
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror}") from error


def read_baseline(file: Path, names: Sequence[str]) -> Report:
    """To compare a measurement of these profiles with."""
    report = read_report(file)
    if not set(names) & set(report.profiles):
        raise DataError(
            f"{file} has nothing to compare with: it measured {', '.join(report.profiles)}",
            hint=f"Add --profile {next(iter(report.profiles))}.",
        )
    return report


def read_report(file: Path) -> Report:
    hint = "Give a file that trm bench --out has written."
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_FILE_BYTES)
        return Report.model_validate_json(content)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", hint=hint) from error
    except ValidationError as error:
        raise DataError(f"{file} is not a file of trm bench: {_first_problem(error)}", hint=hint) from error


def _first_problem(error: ValidationError) -> str:
    """On one line, whatever the file's keys are."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ascii(".".join(map(str, first["loc"])))[1:-1]
    return f"{where[:60]}: {first['msg']}" if where else first["msg"]


@dataclass(frozen=True, slots=True)
class Verdict:
    verdict: str  # "faster", "slower", "no difference beyond the noise" or "too few repeats to tell"
    ratio: float  # of the medians of samples per second, now to then
    chance: float  # of an order as clear as this one, if there were no difference


@dataclass(frozen=True, slots=True)
class Comparison:
    file: str
    date: str
    verdicts: Mapping[str, Verdict]
    warnings: tuple[str, ...]


def compare(now: Report, then: Report, file: Path) -> Comparison:
    shared = [name for name in now.profiles if name in then.profiles]
    verdicts = {name: judge(rates_of(now.profiles[name]), rates_of(then.profiles[name])) for name in shared}
    warnings = _other_conditions(now, then)
    for name in shared:
        warnings += _other_work(name, now.profiles[name], then.profiles[name])
    return Comparison(str(file), f"{then.date:%Y-%m-%d %H:%M}", verdicts, tuple(warnings))


def judge(now: Sequence[float], then: Sequence[float]) -> Verdict:
    """See RULE. Overlapping quartiles would be simpler, but those of five repeats each come apart by
    chance in one comparison of five (20,000 simulated ones)."""
    ratio, chance = median(now) / median(then), chance_of_order(now, then)
    clearest = 2 / math.comb(len(now) + len(then), len(now))
    if clearest > _CHANCE:
        verdict = "too few repeats to tell"
    elif chance > _CHANCE or max(ratio, 1 / ratio) < 1 + _LEAST_CHANGE:
        verdict = "no difference beyond the noise"
    else:
        verdict = "faster" if ratio > 1 else "slower"
    return Verdict(verdict, ratio, chance)


def chance_of_order(some: Sequence[float], others: Sequence[float]) -> float:
    """Two-sided and exact: how many of all orders of these values are as lopsided as theirs, or more."""
    wins = sum((a > b) + (a == b) / 2 for a in some for b in others)
    fewer = math.floor(min(wins, len(some) * len(others) - wins))
    ways = _orders_by_wins(len(some), len(others))
    return min(1.0, 2 * sum(ways[: fewer + 1]) / sum(ways))


def _orders_by_wins(m: int, n: int) -> list[int]:
    """Of m and n values, the number of orders in which the first win so many of the m x n pairs: the
    coefficients of the Gaussian binomial, the product of (1 - q^(n+i)) / (1 - q^i) for i from 1 to m."""
    ways = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for wins in range(m * n, n + i - 1, -1):
            ways[wins] -= ways[wins - n - i]
        for wins in range(i, m * n + 1):
            ways[wins] += ways[wins - i]
    return ways


def _other_conditions(now: Report, then: Report) -> list[str]:
    ours, theirs = _conditions(now), _conditions(then)
    found = [
        f"{key} is {ours[key]!a} now and was {theirs[key]!a}" for key in ours if ours[key] != theirs[key]
    ]
    if then.busy_percent > BUSY_PERCENT:
        found.append(f"other programs used {then.busy_percent:.0f} % of the CPU then")
    return found


def _conditions(report: Report) -> dict[str, Any]:
    memory = float(report.machine.get("memory_bytes") or 0) / GIB  # a kernel update moves the last digits
    facts = {key: report.machine.get(key) for key in ("brand", "architecture", "cores", "quota", "system")}
    machine = {f"the machine's {key}": value for key, value in facts.items()}
    versions = {f"the version of {key}": report.versions.get(key) for key in ("torch", "numpy", "python")}
    return {**machine, "the machine's memory in GiB": round(memory), **versions}


def _other_work(name: str, now: Results, then: Results) -> list[str]:
    ours, theirs = now.work.model_dump(), then.work.model_dump()
    found = [
        f"{name}: {key} is {ours[key]} now and was {theirs[key]}" for key in ours if ours[key] != theirs[key]
    ]
    product = median(r.product_rate for r in now.repeats) / median(r.product_rate for r in then.repeats)
    if max(product, 1 / product) > 1 + _MACHINE_CHANGE:
        found.append(
            f"{name}: a bare product is {product:.2f} times as fast as then, so the machine itself is "
            "(other programs, heat, power)"
        )
    return found


def facts(report: Report, comparison: Comparison | None) -> dict[str, Any]:
    summary = {
        name: {quantity: asdict(spread) if spread else None for quantity, spread in spreads(results).items()}
        for name, results in report.profiles.items()
    }
    compared = {"comparison": asdict(comparison)} if comparison else {}
    return {**report.model_dump(mode="json"), "summary": summary, **compared}


def page(report: Report, comparison: Comparison | None) -> str:
    if comparison is None:
        return table(report)
    lines = [f"Against {comparison.file} of {comparison.date}:"]
    for name, found in comparison.verdicts.items():
        lines.append(f"  {name.ljust(6)}{found.verdict}: {found.ratio:.2f} times as fast")
    lines += [f"  warning: {warning}" for warning in comparison.warnings]
    return "\n".join([table(report), "", *lines, RULE])
