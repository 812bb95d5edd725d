"""The check before a run on a device that is made up and, if that is wanted, wrong.

`test_second_device.py` runs these tests in a process of their own.
"""

from dataclasses import asdict

import pytest
import second_device
from tiny import model_config, run_config, sudoku_dataset

from trm.plan import Execution
from trm.planning import device_check

second_device.register()


def ignore(row):
    return None


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return sudoku_dataset(tmp_path_factory.mktemp("data") / "set")


def compare(config, device=second_device.NAME):
    config = config.model_dump(mode="json")
    return device_check.compare(config, asdict(Execution(device=device)), ignore)


def attention(dataset, **changes):
    model = model_config(mixer="attention").model_dump()
    return run_config(dataset, model=model, **changes)


@pytest.mark.parametrize("supervision", ["deep", "terminal"])
def test_a_device_that_computes_the_same_agrees(dataset, supervision):
    assert compare(attention(dataset, training__supervision=supervision, training__noise=0.1)) is None


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_every_optimizer_can_be_checked(dataset, optimizer):
    assert compare(run_config(dataset, training__optimizer=optimizer)) is None


def test_an_operator_that_writes_nothing_is_found_by_the_tensor(dataset, monkeypatch):
    monkeypatch.setenv(second_device.BROKEN, "addcmul_")
    found = compare(run_config(dataset))
    assert found["tensor"] == "optimizer/embed_tokens.embedding_weight.exp_avg_sq"
    assert (
        found["problem"]
        == "the cosine of the squared gradient is 0.000000, at least 0.9999 is required, in step 1"
    )


def test_a_softmax_that_is_slightly_wrong_is_found(dataset, monkeypatch):
    monkeypatch.setenv(second_device.BROKEN, "_safe_softmax")
    found = compare(attention(dataset))
    assert found["tensor"].endswith(".exp_avg")
    assert found["problem"].endswith("in step 1")


def test_latents_that_are_partly_written_are_found(dataset, monkeypatch):
    """They are written into the slots of each micro-batch, a part of a tensor."""
    monkeypatch.setenv(second_device.BROKEN, "copy_")
    found = compare(run_config(dataset))
    assert found["tensor"] == "latents/latents"
    assert found["problem"].endswith("at most 0.001 is allowed, in step 1")


def test_a_missing_operator_is_named(dataset, monkeypatch):
    monkeypatch.setenv(second_device.BROKEN, "atan2")
    with pytest.raises(NotImplementedError, match="aten::atan2"):
        compare(run_config(dataset, training__optimizer="adam_atan2"))
