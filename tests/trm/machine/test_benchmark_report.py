"""The table of `trm bench`, and its files: read back, from earlier versions, and refused if wrong."""

import json
from pathlib import Path

import pytest
from sample_reports import MODEL, STEADY, make_report

from macbook_optimization.errors import DataError
from macbook_optimization.output_files import OutputFile
from macbook_optimization.training_config_adapter import PROFILES
from trm.backends.sizes import flops_per_sample
from trm.config import ModelConfig
from trm.machine.benchmark_comparison import compare
from trm.machine.benchmark_file import BENCHMARK
from trm.machine.benchmark_report import (
    format_report,
    format_table,
    read_baseline,
    read_report,
    report_to_json,
    write_report,
)
from trm.machine.text import significant
from trm.tasks.base import DataSpec


def test_the_report_is_at_most_100_characters_wide():
    slow = [0.0123456, 0.0113456, 0.0133456]
    now = make_report(slow, [profile.name for profile in PROFILES])
    busy = now.model_copy(update={"busy_percent": 99.0})
    text = format_report(busy, compare(now, now, Path("before.json")))
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("0.0123 (0.0113 to 0.0133)") == 3
    assert text.count("too few repeats to decide: 1.00 times as fast") == 3
    assert "warm start, s       5.5 (5.0 to 6.0)" in text
    assert "Other programs used 99 % of the CPU" in text


def test_a_single_repeat_shows_no_spread_and_no_warm_start():
    text = format_table(make_report([2.0]))
    assert "samples/s           2.00\n" in text
    assert "first start, s      4.0\n" in text
    assert "warm start, s       not reported\n" in text


def test_the_share_of_the_peak_is_throughput_times_flops_by_peak():
    flops = flops_per_sample(ModelConfig(**MODEL), DataSpec(256, 16, 16))
    summary = report_to_json(make_report([2.0]), None)["summary"]["8gb"]
    assert summary["share_of_product_peak"]["median"] == pytest.approx(2.0 * flops / 1e11)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.04567, "0.0457"), (0.5, "0.500"), (9.87654, "9.88"), (123.4, "123"), (12345.6, "12346")],
)
def test_small_numbers_have_three_significant_digits_and_large_ones_no_exponent(value, text):
    assert significant(value) == text


def test_a_report_reads_back_as_it_was_written(tmp_path):
    report = make_report(STEADY, ("16gb", "32gb"))
    write_report(report, OutputFile(tmp_path / "before.json", BENCHMARK))
    assert read_report(tmp_path / "before.json") == report
    assert read_baseline(tmp_path / "before.json", ["8gb", "16gb"]) == report
    with pytest.raises(DataError, match="nothing to compare with: it measured 16gb, 32gb"):
        read_baseline(tmp_path / "before.json", ["8gb"])


def test_a_report_of_version_1_which_calls_workers_lanes_can_be_compared(tmp_path):
    now = make_report(STEADY)
    earlier = now.model_dump(mode="json")
    earlier["schema_version"] = 1
    work = earlier["profiles"]["8gb"]["work"]
    work["lanes"] = work.pop("workers")
    file = tmp_path / "before.json"
    file.write_text(json.dumps(earlier))
    before = read_baseline(file, ["8gb"])
    assert before.profiles["8gb"].work.workers == 2
    assert compare(now, before, file).warnings == ()
    assert "lanes" not in json.dumps(report_to_json(before, None))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\xfe\x00", b"not json", b"[]", b"null", b"[" * 100_000, b'{"kind": "trm bench"}',
        b'{"a\\nb\\u001b[31m": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_report_is_refused_on_one_line(content, tmp_path):
    file = tmp_path / "before.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match="is not a report of trm bench") as raised:
        read_report(file)
    assert str(raised.value).isprintable()
    assert "--out" in raised.value.hint


@pytest.mark.parametrize("rate", [0, -1, "NaN", "Infinity", 1e300, '"fast"'])
def test_a_report_with_an_impossible_rate_is_refused(rate, tmp_path):
    file = tmp_path / "before.json"
    text = make_report([123.5]).model_dump_json()
    assert "[123.5]" in text
    file.write_text(text.replace("[123.5]", f"[{rate}]"))
    with pytest.raises(DataError, match=r"samples_per_second\.0"):
        read_report(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for file in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(DataError, match="cannot be read"):
            read_report(file)
