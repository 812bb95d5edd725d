"""Rows are cut while memory is short, if the recipe allows it: last of all reactions, and recorded."""

import numpy as np
import pytest
import torch
from tiny import HELD, Recorder, model_config, plan_of, run, run_config, sudoku_dataset

from macbook_optimization.errors import AllocationFailed, ConfigError
from macbook_optimization.memory_management import MIB, MemoryModel, MemoryStats
from trm.batch import IGNORE_LABEL
from trm.feed import Feed
from trm.runs.directory import EVENTS, Run
from trm.slots import Slots
from trm.tasks.base import DataSpec
from trm.tasks.dataset import open_split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.registry import load_task
from trm.training.log import RunLog
from trm.training.resources import MemoryControl
from trm.training.row_length import RowLength

SPEC = DataSpec(max_len=128, vocab_size=20, num_outputs=2, class_names=("a", "b"))
NUM_ROWS = 24


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Rows of 1 to 128 tokens whose label is that of the first position."""
    directory = tmp_path_factory.mktemp("rows") / "set"
    rng = np.random.default_rng(0)
    lengths = np.linspace(1, SPEC.max_len, NUM_ROWS).astype(int)
    tokens = rng.integers(4, SPEC.vocab_size, (NUM_ROWS, SPEC.max_len))
    tokens[np.arange(SPEC.max_len) >= lengths[:, None]] = 0
    labels = np.full_like(tokens, IGNORE_LABEL)
    labels[:, 0] = rng.integers(0, 2, NUM_ROWS)
    with DatasetWriter(directory, {}) as writer:
        for name in ("train", "test"):
            writer.split(name, SPEC, IGNORE_LABEL).add_examples(tokens, labels, lengths=lengths)
    return directory


def config_of(dataset, least=32, **changes):
    return run_config(
        dataset,
        task="email",
        model=model_config().model_dump(),
        training__adaptive_min_length=least,
        training__supervision="terminal",
        **changes,
    )


def events(path, *names):
    return [row for row in Run(path).rows(EVENTS) if row["event"] in names]


# The limit


class Machine:
    """A memory control whose clock and readings are given."""

    def __init__(self, path, dataset, micro_batch_size=1, memory=None):
        config = config_of(dataset, plan__micro_batch_size=micro_batch_size)
        plan = plan_of(config)
        if memory is not None:
            object.__setattr__(plan, "memory", memory)
        log = RunLog(Run(path), Recorder())
        length = RowLength.of(config, open_split(dataset, "train"), log)
        self.control = MemoryControl(config, plan, log, HELD, length)
        self.seconds = 1000.0
        self.control.manager.clock = lambda: self.seconds
        self.control.manager.collect = lambda: 0

    def read(self, percent, after=1.0):
        """Let time pass and a reading arrive; return the micro-batch size and the limit."""
        self.seconds += after
        total = 1000 * MIB
        available = int(total * (1 - percent / 100))
        self.control.monitor.latest = MemoryStats(total, available, 0, None, None, None)
        return self.control.micro_batch_size(step=7), self.control.max_length


def test_rows_are_cut_only_when_the_micro_batch_is_a_single_example(tmp_path, dataset):
    machine = Machine(tmp_path, dataset, micro_batch_size=4)
    found = [machine.read(97, after=11) for _ in range(8)]
    assert found == [(2, 128), (1, 128), (1, 96), (1, 72), (1, 54), (1, 40), (1, 32), (1, 32)]
    kinds = [row["event"] for row in events(tmp_path, "batch shrunk", "row length")]
    assert kinds == ["batch shrunk"] * 2 + ["row length"] * 5
    first = events(tmp_path, "row length")[0]
    assert (first["step"], first["before"], first["after"]) == (7, 128, 96)
    assert first["reason"] == "97 % of memory is in use"


def test_a_reduction_gets_time_to_work(tmp_path, dataset):
    machine = Machine(tmp_path, dataset)
    assert [machine.read(97)[1] for _ in range(12)] == [96] * 10 + [72] * 2


def test_rows_grow_again_in_steps_when_the_pressure_is_over(tmp_path, dataset):
    machine = Machine(tmp_path, dataset)
    machine.read(97)
    machine.read(97, after=11)
    assert machine.control.max_length == 72
    assert machine.read(85, after=5)[1] == 72
    limits = [machine.read(50, after=16)[1] for _ in range(9)]
    assert limits[-1] == 128
    assert limits == sorted(limits)
    assert all(after <= 1.1 * before + 1 for before, after in zip([72, *limits], limits, strict=False))


def test_the_memory_of_a_cut_example_is_taken_as_proportional_to_its_length(tmp_path, dataset):
    """Half an example still fits where a whole one does not."""
    machine = Machine(tmp_path, dataset, memory=MemoryModel(100 * MIB, 400 * MIB))
    limits = [machine.read(70, after=11)[1] for _ in range(5)]  # 90 % of 300 MiB is left
    assert limits == [96, 72, 54, 54, 54]


def test_a_failed_allocation_of_a_single_row_cuts_it_until_nothing_is_shorter(tmp_path, dataset):
    control = Machine(tmp_path, dataset, micro_batch_size=2).control
    lengths = []
    for _ in range(6):
        control.make_room(step=3, may_cut_rows=True)
        lengths.append((control.manager.batch_size, control.max_length))
    assert lengths == [(1, 128), (1, 96), (1, 72), (1, 54), (1, 40), (1, 32)]
    with pytest.raises(AllocationFailed):
        control.make_room(step=3, may_cut_rows=True)


def test_an_evaluation_never_cuts_rows(tmp_path, dataset):
    control = Machine(tmp_path, dataset).control
    with pytest.raises(AllocationFailed):
        control.make_room(step=3)
    assert control.max_length == 128


def test_it_is_for_rows_of_different_lengths(tmp_path, dataset):
    grids = sudoku_dataset(tmp_path / "grids")
    config = run_config(grids, training__adaptive_min_length=8)
    log = RunLog(Run(tmp_path), Recorder())
    with pytest.raises(ConfigError, match="rows of different lengths"):
        RowLength.of(config, open_split(grids, "train"), log)
    with pytest.raises(ConfigError, match="is 129, but rows have at most 128 tokens"):
        RowLength.of(config_of(dataset, least=129), open_split(dataset, "train"), log)
    assert RowLength.of(run_config(grids), open_split(grids, "train"), log) is None


# The batch


def test_a_cut_batch_has_the_first_tokens_of_every_row(dataset):
    feed = Feed(config_of(dataset), load_task("email"), open_split(dataset, "train"))
    slots = Slots.new(6).refilled()
    whole, cut = feed.batch(slots, 1), feed.batch(slots, 1, max_length=40)
    assert whole.lengths.max() > 40
    np.testing.assert_array_equal(cut.lengths, np.minimum(whole.lengths, 40))
    np.testing.assert_array_equal(cut.inputs[:, :40], whole.inputs[:, :40])
    np.testing.assert_array_equal(cut.labels, whole.labels)
    assert not cut.inputs[:, 40:].any()
    assert cut.trimmed().inputs.shape[1] == 64
    uncut = feed.batch(slots, 1, max_length=128)
    np.testing.assert_array_equal(uncut.inputs, whole.inputs)


# Whole runs


def starve(monkeypatch, widest):
    """Let the allocator refuse training rows that are wider than this."""
    from trm.backends.pytorch.model import TinyRecursiveModel

    forward = TinyRecursiveModel.forward

    def starved(self, inputs, *more):
        if inputs.shape[1] > widest and torch.is_grad_enabled():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        return forward(self, inputs, *more)

    monkeypatch.setattr(TinyRecursiveModel, "forward", starved)


@pytest.mark.slow
def test_a_run_whose_longest_rows_do_not_fit_continues_with_shorter_ones(tmp_path, dataset, monkeypatch):
    starve(monkeypatch, widest=64)
    outcome = run(config_of(dataset), tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("max_steps", 20)
    changes = events(tmp_path / "run", "row length")
    assert [(row["before"], row["after"]) for row in changes] == [(128, 96), (96, 72), (72, 54)]
    assert {row["reason"] for row in changes} == {"an allocation failed"}
    rows = [row for row in Run(tmp_path / "run").rows() if row["kind"] == "train"]
    assert rows[-1]["max_length"] == 54
    assert Run(tmp_path / "run").checkpoints().newest_intact().metadata["max_length"] == 54


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_length_of_its_checkpoint(tmp_path, dataset, monkeypatch):
    with monkeypatch.context() as patch:
        starve(patch, widest=64)
        run(config_of(dataset), tmp_path / "run", max_step=10)
    run(config_of(dataset), tmp_path / "run")
    assert Run(tmp_path / "run").checkpoints().newest_intact().metadata["max_length"] == 54


@pytest.mark.slow
def test_without_the_key_rows_are_never_cut(tmp_path, dataset, monkeypatch):
    starve(monkeypatch, widest=64)
    with pytest.raises(AllocationFailed):
        run(config_of(dataset, least=None), tmp_path / "run")
    assert not events(tmp_path / "run", "row length")


@pytest.mark.slow
def test_a_limit_that_is_never_reached_changes_no_bit(tmp_path, dataset):
    run(config_of(dataset, least=None), tmp_path / "plain")
    run(config_of(dataset), tmp_path / "adaptive")
    plain, adaptive = (
        Run(tmp_path / name).checkpoints().newest_intact().load_all()["weights"]
        for name in ("plain", "adaptive")
    )
    assert all(torch.equal(adaptive[name], tensor) for name, tensor in plain.items())
