"""`trm bench`: what a step costs in operations, when a difference counts, and a real, small measurement."""

import json
import random
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import TRM, Recorder, model_config
from torch.utils.flop_counter import FlopCounterMode

from macbook_optimization.errors import DataError, MemoryBudgetError
from macbook_optimization.hardware_detection import GIB, HardwareDetector
from macbook_optimization.training_config_adapter import PROFILES, Profile
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.config import ModelConfig
from trm.tasks.base import TaskShape
from trm.training.benchmark import (
    Repeat,
    Report,
    Results,
    Work,
    chosen_profiles,
    measure,
    operations_per_sample,
)
from trm.training.benchmark_report import (
    chance_of_order,
    compare,
    facts,
    judge,
    page,
    read_baseline,
    read_report,
    table,
    write_report,
)

TINY = Profile("tiny", 1, 16, 2, 1, 2.0, 8, 2, 1, 500, 1)
STEADY = [10.0, 10.1, 10.2, 9.9, 9.8]
MODEL = {"hidden_size": 256, "num_heads": 8, "L_layers": 2, "H_cycles": 3, "L_cycles": 6, "expansion": 2.0}
MACHINE = {"brand": "Some CPU", "architecture": "arm64", "cores": 8, "quota": None, "memory_bytes": 8 * GIB}
VERSIONS = {"torch": "2.13.0", "numpy": "2.4.0", "python": "3.11.7"}


def report(rates, profiles=("8gb",), machine=None, versions=None, product_rate=1e11, threads=8):
    work = Work(**MODEL, seq_len=256, micro_batch_size=2, timed_steps=1, threads=threads, lanes=2)
    repeats = [
        Repeat(
            samples_per_second=[rate],
            resident_peak_bytes=5_500_000_000 + number,
            resident_mean_bytes=5_000_000_000,
            cpu_percent=95.5,
            product_rate=product_rate,
            start_seconds=4.0 + number,
            first_of_command=number == 0,
        )
        for number, rate in enumerate(rates)
    ]
    return Report(
        kind="trm bench",
        schema_version=1,
        date=datetime(2026, 1, 2, tzinfo=UTC),
        machine={**MACHINE, **(machine or {})},
        versions={**VERSIONS, **(versions or {})},
        busy_percent=1.0,
        profiles={name: Results(work=work, repeats=repeats) for name in profiles},
    )


def product(rows, inner, columns):
    return sum(2 for _ in range(rows) for _ in range(columns) for _ in range(inner))


def test_operations_are_those_of_a_plain_count():
    """Inner width 8: 1.5 * 8 * 2 / 3, which is a multiple of 4 already."""
    L, D, inner, layers = 5, 8, 8, 2
    layer = product(L, D, 3 * D) + product(L, D, L) + product(L, L, D) + product(L, D, D)
    layer += product(L, D, 2 * inner) + product(L, inner, D)
    count = 0
    for cycle in range(2):  # H_cycles
        for _ in range(3):  # L_cycles for the latent, one for the answer
            count += layers * layer * (3 if cycle == 1 else 1)  # forward, and twice as much backward
    assert operations_per_sample(model_config(), seq_len=L) == count


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_operations_are_those_that_torch_counts(profile):
    """Of a model as wide as the profile's; torch does not count the two products inside attention."""
    length, width = 24, {name: getattr(profile, name) for name in ("hidden_size", "num_heads", "L_layers")}
    config = ModelConfig(**width, expansion=profile.expansion, H_cycles=2, L_cycles=1)
    model = TinyRecursiveModel(config, TaskShape(length, 16, 16, 1))
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.long), None, model.start(1), cycles=2).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(count for name, count in counted.items() if "attention" not in str(name))
    inside = 2 * product(1, length * length, config.hidden_size) * config.L_layers
    levels = 2 * (1 + 3)
    assert operations_per_sample(config, length) == matrices + inside * levels


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (0.8, "slower"),
        (1.25, "faster"),
        (1.0, "no difference beyond the noise"),
        (1.01, "no difference beyond the noise"),
    ],
)
def test_a_clear_difference_counts_and_a_small_one_does_not(factor, verdict):
    assert judge([factor * rate for rate in STEADY], STEADY).verdict == verdict


def test_a_clear_difference_below_three_percent_does_not_count():
    found = judge([10.20, 10.21, 10.22, 10.23, 10.24], [10.0, 10.01, 10.02, 10.03, 10.04])
    assert found.verdict == "no difference beyond the noise"
    assert found.chance < 0.01


def test_a_large_difference_within_the_noise_does_not_count():
    found = judge([6.0, 8.0, 9.0, 13.0, 14.0], [5.0, 7.0, 10.0, 12.0, 15.0])
    assert found.verdict == "no difference beyond the noise"
    assert found.ratio == 0.9


def test_noise_alone_is_called_a_difference_once_in_twenty_times_at_most():
    rng = random.Random(0)
    samples = [[rng.gauss(10, 2) for _ in range(5)] for _ in range(2000)]
    found = [judge(now, then).verdict for now, then in zip(samples[::2], samples[1::2], strict=True)]
    assert sum(verdict in ("faster", "slower") for verdict in found) <= 50


def test_three_repeats_tell_nothing():
    """Of the 20 orders of three and three, two are as clear as can be: one in ten."""
    assert judge([1.0, 1.1, 1.2], [2.0, 2.1, 2.2]).verdict == "too few repeats to tell"


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_chance_of_an_order_is_the_share_of_all_orders_that_are_as_lopsided(m, n, rng):
    values = rng.sample(range(100), m + n)

    def lopsided(chosen):
        others = [value for value in values if value not in chosen]
        wins = sum(a > b for a in chosen for b in others)
        return abs(wins - m * n / 2)

    ours = lopsided(values[:m])
    all_orders = [lopsided(chosen) for chosen in combinations(values, m)]
    expected = sum(each >= ours for each in all_orders) / len(all_orders)
    assert chance_of_order(values[:m], values[m:]) == pytest.approx(expected)


def test_a_comparison_with_the_same_machine_has_no_warnings():
    found = compare(report([0.8 * rate for rate in STEADY]), report(STEADY), Path("before.json"))
    assert found.verdicts["8gb"].verdict == "slower"
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ({"machine": {"brand": "Another CPU"}}, "brand is 'Some CPU' now and was 'Another CPU'"),
        ({"machine": {"memory_bytes": 16 * GIB}}, "memory in GiB is 8 now and was 16"),
        ({"versions": {"torch": "2.2.2"}}, "version of torch is '2.13.0' now and was '2.2.2'"),
        ({"threads": 4}, "8gb: threads is 8 now and was 4"),
        ({"product_rate": 2e11}, "a bare product is 0.50 times as fast as then"),
    ],
)
def test_a_comparison_warns_of_everything_that_is_not_the_same(then, words):
    found = compare(report(STEADY), report(STEADY, **then), Path("before.json"))
    (warning,) = found.warnings
    assert words in warning


def test_only_profiles_that_both_have_are_compared(tmp_path):
    now, then = report(STEADY, ("8gb", "16gb")), report(STEADY, ("16gb", "32gb"))
    assert list(compare(now, then, Path("before.json")).verdicts) == ["16gb"]
    write_report(then, tmp_path / "before.json")
    assert read_baseline(tmp_path / "before.json", ["8gb", "16gb"]) == then
    with pytest.raises(DataError, match="nothing to compare with: it measured 16gb, 32gb"):
        read_baseline(tmp_path / "before.json", ["8gb"])


def test_the_page_is_at_most_100_characters_wide():
    slow = [0.0123456, 0.0113456, 0.0133456]
    now = report(slow, [profile.name for profile in PROFILES])
    text = page(now, compare(now, now, Path("before.json")))
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("0.0123 (0.0113 to 0.0133)") == 3
    assert text.count("too few repeats to tell: 1.00 times as fast") == 3
    assert "warm start, s       5.5 (5.0 to 6.0)" in text


def test_a_single_repeat_shows_no_spread_and_no_warm_start():
    text = table(report([2.0]))
    assert "samples/s           2.00\n" in text
    assert "first start, s      4.0\n" in text
    assert "warm start, s       not reported\n" in text


def test_the_share_of_the_peak_is_operations_by_seconds_by_peak():
    now = report([2.0])
    operations = operations_per_sample(ModelConfig(**MODEL), 256)
    summary = facts(now, None)["summary"]["8gb"]
    assert summary["share_of_product_peak"]["median"] == pytest.approx(2.0 * operations / 1e11)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\xfe\x00", b"not json", b"[]", b"null", b"[" * 100_000, b'{"kind": "trm bench"}',
        b'{"a\\nb\\u001b[31m": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_report_is_refused_on_one_line(content, tmp_path):
    file = tmp_path / "before.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match="is not a file of trm bench") as raised:
        read_report(file)
    assert str(raised.value).isprintable()
    assert "--out" in raised.value.hint


@pytest.mark.parametrize("rate", [0, -1, "NaN", "Infinity", 1e300, '"fast"'])
def test_a_report_with_a_senseless_rate_is_refused(rate, tmp_path):
    file = tmp_path / "before.json"
    text = report([123.5]).model_dump_json()
    assert "[123.5]" in text
    file.write_text(text.replace("[123.5]", f"[{rate}]"))
    with pytest.raises(DataError, match=r"samples_per_second\.0"):
        read_report(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for file in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(DataError, match="cannot be read"):
            read_report(file)


def test_here_is_the_profile_of_this_machine_and_each_is_measured_once():
    names = ["here", "32gb", "16gb", "32gb"]
    assert [profile.name for profile in chosen_profiles(names, 24 * GIB)] == ["16gb", "32gb"]


def trm(*arguments, cwd):
    return subprocess.run([TRM, "bench", *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    "arguments", [("--compare", "bad.json"), ("--compare", "missing.json"), ("--out", "nowhere/out.json")]
)
def test_the_command_refuses_files_before_it_measures(arguments, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    done = trm(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


@pytest.mark.slow
def test_a_small_measurement_interleaves_profiles_and_starts_a_process_for_each():
    heard = []
    display = Recorder(lambda what, done: heard.append((what, done)))
    other = replace(TINY, name="other", hidden_size=32)
    found = measure([TINY, other], 2, HardwareDetector().detect(with_torch=False), display, timed_steps=2)
    order = list(dict.fromkeys(what for what, _ in heard))
    assert order == [f"repeat {number} of 2, {name}" for number in (1, 2) for name in ("tiny", "other")]
    assert heard[-1][1] == 2 * 2 * 3
    repeats = [repeat for results in found.profiles.values() for repeat in results.repeats]
    assert [repeat.first_of_command for repeat in repeats] == [True, False, False, False]
    for repeat in repeats:
        assert len(repeat.samples_per_second) == 2
        assert repeat.resident_peak_bytes >= repeat.resident_mean_bytes > 50 * 2**20
        assert 0 < repeat.cpu_percent <= 110
        assert repeat.start_seconds > 0.5
    assert facts(found, None)["summary"]["other"]["first_start_seconds"] is None


@pytest.mark.slow
def test_a_profile_that_does_not_fit_is_refused_before_it_is_measured():
    hardware = HardwareDetector().detect(with_torch=False)
    small = replace(hardware.memory, total_memory=8 * GIB, available_memory=GIB)
    with pytest.raises(MemoryBudgetError, match=r"32gb profile needs about .* MiB; 1,024 MiB are free"):
        measure([PROFILES[2]], 1, replace(hardware, memory=small), Recorder())


@pytest.mark.slow
def test_the_command_measures_saves_and_compares(tmp_path):
    write_report(report([1000.0] * 60), tmp_path / "before.json")
    options = ("--profile", "8gb", "--repeats", 1, "--compare", "before.json", "--out", "now.json", "--json")
    done = trm(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    saved = read_report(tmp_path / "now.json").model_dump(mode="json")
    assert {key: told[key] for key in saved} == saved
    assert told["comparison"]["verdicts"]["8gb"]["verdict"] == "slower"  # 1 against 60 suffices
    assert any("brand" in warning for warning in told["comparison"]["warnings"])
    assert 0 < told["summary"]["8gb"]["share_of_product_peak"]["median"] < 1.5
