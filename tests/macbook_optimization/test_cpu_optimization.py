"""Settings of the process, and the choice of a precision by measurement."""

import os
import signal

import pytest

from macbook_optimization import cpu_optimization
from macbook_optimization.children import ChildDied
from macbook_optimization.cpu_optimization import (
    LEFT_ALONE,
    MPS_FALLBACK,
    choose_precision,
    environment,
    fastest_precision,
    measure_speeds,
    settings_before_torch,
    survey,
)


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"float32": 100.0, "bfloat16": 119.0}, "float32"),
        ({"float32": 100.0, "bfloat16": 121.0}, "bfloat16"),
        ({"float32": 100.0}, "float32"),
        ({}, "float32"),
    ],
)
def test_bfloat16_must_be_clearly_faster(rates, chosen):
    assert choose_precision(rates) == chosen


@pytest.mark.slow
def test_a_precision_that_kills_its_child_is_left_out(monkeypatch):
    """As on a CPU that advertises an instruction that it lacks."""
    real = cpu_optimization.run_in_child

    def one_dies(target, arguments, **settings):
        if arguments["precision"] == "bfloat16":
            raise ChildDied(-signal.SIGILL, False, "")
        return real(target, arguments, **settings)

    monkeypatch.setattr(cpu_optimization, "run_in_child", one_dies)
    speeds, platform = measure_speeds([1])
    assert set(speeds.products) == {"float32"}
    assert speeds.products["float32"][1] > 1e8
    assert speeds.bandwidth > 1e8
    assert platform["torch_version"]
    assert fastest_precision() == "float32"


def test_variables_that_the_user_has_set_are_not_changed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    chosen = environment(3)
    assert "OMP_NUM_THREADS" not in chosen
    assert chosen["MKL_NUM_THREADS"] == "3"
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_what_a_gpu_lacks_is_never_computed_on_the_cpu_without_saying_so(monkeypatch):
    monkeypatch.delenv(MPS_FALLBACK, raising=False)
    assert MPS_FALLBACK not in environment(1)
    monkeypatch.setenv(MPS_FALLBACK, "1")
    assert environment(1)[MPS_FALLBACK] == "0"


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_every_setting_gives_its_reason_and_belongs_to_its_system(platform):
    names = {setting.name for setting in settings_before_torch(2, platform, compact=True)}
    assert ("VECLIB_MAXIMUM_THREADS" in names) == (platform == "darwin")
    assert ("GOMP_SPINCOUNT" in names) == ("MALLOC_MMAP_THRESHOLD_" in names) == (platform == "linux")
    for setting in (*settings_before_torch(2, platform), *LEFT_ALONE):
        assert setting.why


def test_a_survey_returns_the_speed_by_threads():
    found = survey("float32", [1], send=lambda row: None)
    assert set(found["products"]) == {1}
