"""A checkpoint is complete or absent, and the newest good one wins."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from macbook_optimization import checkpoint_files, checkpoint_management
from macbook_optimization.checkpoint_files import find_damage, signed, step_of
from macbook_optimization.checkpoint_management import CheckpointManager, checked_best, surplus_steps
from macbook_optimization.errors import CheckpointError, NonFiniteError


def save(manager, step):
    return manager.save(step, {"weights": {"w": torch.full((50,), float(step))}}, {"note": "x"})


@pytest.fixture
def manager(tmp_path):
    return CheckpointManager(tmp_path, keep=2)


def test_a_saved_checkpoint_can_be_loaded(manager):
    save(manager, 3)
    found = manager.newest_intact()
    assert (found.step, found.metadata["note"]) == (3, "x")
    torch.testing.assert_close(found.load("weights")["w"], torch.full((50,), 3.0))


def test_tensors_can_be_read_one_at_a_time(manager):
    path = save(manager, 3).path
    stored = manager.newest_intact().open_all()
    assert {name: list(tensors) for name, tensors in stored.items()} == {"weights": ["w"]}
    torch.testing.assert_close(stored["weights"]["w"], torch.full((50,), 3.0))
    assert stored["weights"].get("v") is None
    (path / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no readable weights"):
        stored["weights"]["w"]


def test_rotation_keeps_the_last_and_the_best(manager):
    manager.mark_best({"checkpoint": save(manager, 1).path.name})
    for step in range(2, 7):
        save(manager, step)
    assert sorted(path.name for path in manager.directory.iterdir()) == [f"step-{s:08d}" for s in (1, 5, 6)]


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_wins(manager, name, damage):
    save(manager, 1)
    path = save(manager, 2).path / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 0x80
        path.write_bytes(content)
    elif damage == "truncate":
        os.truncate(path, len(content) - 1)
    else:
        path.unlink()
    assert manager.newest_intact().step == 1
    assert path.parent.is_dir(), "only a trainer may set checkpoints aside"
    found, problems = manager.recover()
    assert found.step == 1
    assert len(problems) == 1
    assert (manager.directory / "damaged-step-00000002").is_dir()


def test_every_bit_flip_is_detected(manager):
    path = save(manager, 1).path / "weights.safetensors"
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), 97):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert find_damage(path.parent) == "weights.safetensors is damaged"


@given(
    steps=st.sets(st.integers(0, 1000), min_size=1, max_size=30),
    keep=st.integers(1, 5),
    kept=st.sets(st.integers(0, 1000), max_size=3),
)
def test_rotation_never_removes_the_newest_or_a_kept_checkpoint(steps, keep, kept):
    removed = surplus_steps(sorted(steps), keep, kept)
    left = steps - set(removed)
    assert set(sorted(steps)[-keep:]) <= left
    assert kept & steps <= left
    assert len(left) <= keep + len(kept)


def test_the_first_checkpoint_of_every_n_hours_is_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, keep_every_hours=2)
    for step, hours in enumerate([0.5, 1.9, 2.1, 3.0, 3.9, 6.5, 7.0]):
        manager.save(step, {"weights": {"w": torch.zeros(3)}}, {"seconds": hours * 3600})
    assert [step_of(path) for path in manager._newest_first()] == [6, 5, 2, 0]


def test_nothing_is_removed_before_the_newest_is_read_back(manager, monkeypatch):
    """The disk returns other bytes than were written."""
    save(manager, 1)
    save(manager, 2)
    real = checkpoint_files.write_synced

    def failing(path, parts):
        written = real(path, parts)
        if path.name == "weights.safetensors":
            os.truncate(path, 100)
        return written

    monkeypatch.setattr(checkpoint_files, "write_synced", failing)
    with pytest.raises(CheckpointError, match="differs from what was written") as caught:
        save(manager, 3)
    assert "failing" in caught.value.hint
    assert [step_of(path) for path in manager._newest_first()] == [2, 1]
    assert (manager.directory / "damaged-step-00000003").is_dir()


def test_the_safetensors_library_reads_what_is_written(manager):
    """Every dtype, empty and scalar tensors, and one that is not contiguous."""
    kinds = [getattr(torch, name.removeprefix("torch.")) for name in checkpoint_files._DTYPES]
    tensors = {str(kind): torch.arange(6).reshape(2, 3).to(kind) for kind in kinds}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.5), "across": torch.rand(3, 5).T}
    saved = manager.save(1, {"weights": tensors}, {})
    found = load_file(saved.path / "weights.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_not_saved(manager, value):
    with pytest.raises(NonFiniteError, match="w of the weights is not finite"):
        manager.save(1, {"weights": {"w": torch.tensor([1.0, value, 2.0])}}, {})
    assert not manager.directory.exists()


def test_a_save_whose_final_sync_fails_is_an_error_and_can_be_repeated(manager, monkeypatch):
    real = checkpoint_management.sync

    def fail(path):
        if path == manager.directory:
            raise OSError(5, "Input/output error")
        real(path)

    monkeypatch.setattr(checkpoint_management, "sync", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(manager, 1)
    monkeypatch.undo()
    assert save(manager, 1).step == manager.newest_intact().step == 1


def test_a_damaged_checkpoint_of_the_same_step_is_set_aside(manager):
    (save(manager, 1).path / "state.json").write_text("{}")
    assert save(manager, 1).step == manager.newest_intact().step == 1
    assert (manager.directory / "damaged-step-00000001").is_dir()


def test_the_checkpoint_just_saved_is_never_removed(tmp_path):
    """A damaged checkpoint of a later step, which could not be set aside, counts towards `keep`."""
    manager = CheckpointManager(tmp_path, keep=1)
    (save(manager, 9).path / "state.json").write_text("{}")
    save(manager, 5)
    assert manager.newest_intact().step == 5


def test_a_disk_error_is_a_checkpoint_error(manager, monkeypatch):
    save(manager, 1)
    manager.best_file.mkdir()
    assert manager.best() is None
    assert save(manager, 2).step == 2

    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_management, "free_bytes", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(manager, 3)


def test_loading_a_checkpoint_that_has_been_removed_is_an_error(manager):
    checkpoint = save(manager, 1)
    shutil.rmtree(checkpoint.path)
    with pytest.raises(CheckpointError, match="no readable weights"):
        checkpoint.load("weights")


def test_abandoned_checkpoints_are_set_aside(manager):
    for step in (1, 2):
        save(manager, step)
    manager.abandon_after(1)
    assert manager.newest_intact().step == 1
    assert [found.path.name for found in manager.examine()] == ["step-00000001", "abandoned-step-00000002"]


def test_an_unfinished_save_is_ignored_and_removed(manager):
    save(manager, 1)
    partial = manager.directory / ".step-00000002.partial"
    partial.mkdir()
    (partial / "weights.safetensors").write_bytes(b"half")
    assert manager.newest_intact().step == 1
    assert manager.recover()[0].step == 1
    assert not partial.exists()
    save(manager, 2)
    assert manager.newest_intact().step == 2


def test_a_saved_step_is_never_overwritten(manager):
    save(manager, 1)
    manager.save(1, {"weights": {"w": torch.zeros(2)}}, {})
    assert manager.newest_intact().load("weights")["w"].tolist() == [1.0] * 50


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(manager):
    for step in (1, 2):
        (save(manager, step).path / "state.json").write_text("{}")
    for _ in range(2):  # nor on the second start
        with pytest.raises(CheckpointError, match="Every checkpoint") as caught:
            manager.recover()
    assert "--fresh" in caught.value.hint


def test_a_step_that_is_damaged_twice_is_set_aside_twice(manager):
    save(manager, 1)
    for _ in range(2):
        (save(manager, 2).path / "state.json").write_text("{}")
        assert manager.recover()[0].step == 1
    assert len(list(manager.directory.glob("damaged-step-00000002*"))) == 2


def test_a_checkpoint_of_another_format_is_refused_and_left_alone(manager):
    path = save(manager, 1).path
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    (path / "manifest.json").write_text(signed({**manifest, "schema": 99}))
    with pytest.raises(CheckpointError, match="written in format 99"):
        manager.recover()
    assert path.is_dir()


@pytest.mark.parametrize(
    "content", ["[]", "3", '{"schema": 2, "files": 7}', '{"schema": 2}', "\\x00", "[" * 100_000]
)
def test_an_invalid_manifest_is_damage(manager, content):
    path = save(manager, 1).path
    (path / "manifest.json").write_text(content)
    assert find_damage(path).startswith("incomplete or unreadable")


INVALID_BEST = [
    "",
    "[]",
    '{"x": 1}',
    '{"checkpoint": "../../elsewhere"}',
    '{"checkpoint": "step-00000001", "accuracy": NaN}',
    '{"checkpoint": "step-00000001", "per_class": [0.5, {"loss": Infinity}]}',
]


@pytest.mark.parametrize("content", INVALID_BEST)
def test_an_invalid_best_file_is_replaced_by_the_newest_checkpoint_with_a_warning(manager, content):
    save(manager, 1)
    manager.best_file.write_text(content)
    assert manager.best() is None
    with pytest.warns(UserWarning, match="best cannot be read, .*; step-00000001, the newest .* instead"):
        assert manager.best_or_newest().step == 1


def test_a_best_file_that_is_not_a_file_is_reported(manager):
    save(manager, 1)
    manager.best_file.symlink_to(manager.best_file)
    with pytest.warns(UserWarning, match="best cannot be read"):
        assert manager.best_or_newest().step == 1


def test_a_run_that_has_no_best_checkpoint_yet_needs_no_warning(manager, recwarn):
    save(manager, 1)
    assert manager.best_problem() is None
    assert manager.best_or_newest().step == 1
    manager.mark_best({"checkpoint": "step-00000001"})
    assert manager.best_problem() is None
    assert manager.best_or_newest().step == 1
    assert not recwarn.list


def test_a_best_file_that_was_removed_is_reported(manager):
    """Checkpoints remember what was the best when they were saved."""
    said = []
    manager.save(1, {"weights": {"w": torch.zeros(3)}}, {"best": {"checkpoint": "step-00000001"}})
    assert manager.best_or_newest(said.append).step == 1
    assert said == [], "the newest is the best: the process was killed before it could mark it"
    manager.save(2, {"weights": {"w": torch.zeros(3)}}, {"best": {"checkpoint": "step-00000001"}})
    assert manager.best_or_newest(said.append).step == 2
    assert said == [
        f"{manager.best_file} is missing; step-00000002, the newest intact checkpoint, is used instead"
    ]


def test_the_best_file_may_hold_any_finite_metrics():
    for best in (
        {"checkpoint": "step-00000001"},
        {"checkpoint": "step-00000001", "exact_accuracy": 0.5, "judged_by": {"depth": 16}},  # older runs
        {"checkpoint": "step-00000001", "exact_accuracy": None, "macro_f1": 1, "per_class": [0.25, 1.0]},
    ):
        assert checked_best(best) == best


def test_deeply_nested_content_is_not_a_best_checkpoint():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert checked_best({"checkpoint": "step-00000001", "x": nested}) is None


def test_ranks_can_save_files_of_their_own(manager):
    groups = {name: {"w": torch.zeros(3)} for name in ("weights", "latents-0", "latents-12")}
    saved = manager.save(1, groups, {})
    assert find_damage(saved.path) is None
    assert saved.load_all().keys() == groups.keys()


@pytest.mark.parametrize(
    "name", ["latents-.safetensors", "latents-1/../x.json", "../latents-1.json", "-1.json", "a-b.safetensors"]
)
def test_file_names_in_a_manifest_never_lead_out_of_the_checkpoint(name):
    assert not checkpoint_files._FILE_NAME.fullmatch(name)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="Cannot write"):
        save(CheckpointManager(tmp_path), 1)


def test_a_run_without_checkpoints_is_an_error_with_a_hint(manager):
    assert manager.newest_intact() is None
    with pytest.raises(CheckpointError, match="no usable checkpoint") as caught:
        manager.best_or_newest()
    assert "trm train" in caught.value.hint


def test_a_lost_best_checkpoint_falls_back_to_the_newest(manager):
    best = save(manager, 1)
    manager.mark_best({"checkpoint": best.path.name})
    save(manager, 2)
    (best.path / "state.json").unlink()
    said = []
    assert manager.best_or_newest(said.append).step == 2
    assert "step-00000001, the best checkpoint of" in said[0]
    assert "is damaged (" in said[0]
    shutil.rmtree(best.path)
    assert manager.best_or_newest(said.append).step == 2
    assert "is missing; step-00000002, the newest intact checkpoint, is used instead" in said[1]


def test_numpy_arrays_are_saved_and_loaded_like_tensors(tmp_path):
    """A backend without torch saves its state as arrays."""
    arrays = {"weights": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([7])}}
    tensors = {group: {k: torch.from_numpy(v) for k, v in named.items()} for group, named in arrays.items()}
    for name, state in (("arrays", arrays), ("tensors", tensors)):
        CheckpointManager(tmp_path / name).save(1, state, {})
    one, other = (
        (tmp_path / name / "checkpoints" / "step-00000001" / "weights.safetensors").read_bytes()
        for name in ("arrays", "tensors")
    )
    assert one == other
    loaded = CheckpointManager(tmp_path / "arrays").newest_intact().load("weights", framework="numpy")
    np.testing.assert_array_equal(loaded["w"], arrays["weights"]["w"])


def test_numpy_arrays_that_are_not_finite_are_not_saved(tmp_path):
    for value in (np.nan, np.inf):
        with pytest.raises(NonFiniteError):
            CheckpointManager(tmp_path).save(1, {"weights": {"w": np.array([1.0, value])}}, {})
