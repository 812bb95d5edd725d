"""Weights from and for the reference implementation, and files that only look like them."""

import collections
import os
import pickle
import time
import zipfile

import pytest
import torch
from tiny import SPEC, VARIANTS, make_learner, model_config, run_config

from macbook_optimization.errors import CheckpointError, LaptopError
from macbook_optimization.output_files import STATE_DICT, OutputFile
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.backends.pytorch.reference_weights import from_reference, read_state_dict, to_reference
from trm.exchange import export_reference, import_weights
from trm.runs.directory import Run, begin
from trm.tasks.base import DataSpec


@pytest.mark.parametrize("variant", VARIANTS)
def test_import_is_the_inverse_of_export(variant):
    config = model_config(**VARIANTS[variant])
    weights = TinyRecursiveModel(config, SPEC).state_dict()
    again = from_reference(to_reference(weights, config), config)
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(again[name], tensor)


@pytest.mark.parametrize("mixer", ["neighbourhood", "candidates"])
def test_a_mixer_that_the_reference_implementation_lacks_is_not_exported(tmp_path, mixer):
    changes = VARIANTS[mixer]
    begin(Run(tmp_path / "run"), recipe(tmp_path).model_copy(update={"model": model_config(**changes)}))
    with pytest.raises(CheckpointError, match=mixer):
        export_reference(tmp_path / "run", OutputFile(tmp_path / "model.pt", STATE_DICT))
    assert not (tmp_path / "model.pt").exists()


def test_exported_names_are_those_of_the_reference_implementation():
    config = model_config(puzzle_emb_ndim=8)
    names = to_reference(TinyRecursiveModel(config, SPEC).state_dict(), config).keys()
    assert {
        "_orig_mod.model.inner.embed_tokens.embedding_weight",
        "_orig_mod.model.inner.puzzle_emb.weights",
        "_orig_mod.model.inner.L_level.layers.1.self_attn.qkv_proj.weight",
        "_orig_mod.model.inner.L_level.layers.0.mlp.down_proj.weight",
        "_orig_mod.model.inner.lm_head.weight",
        "_orig_mod.model.inner.q_head.bias",
        "_orig_mod.model.inner.H_init",
        "_orig_mod.model.inner.L_init",
    } <= names


FOUR_BY_FOUR = DataSpec(max_len=16, vocab_size=6, num_outputs=6)


def recipe(tmp_path):
    data = {"path": str(tmp_path / "nowhere"), "build": {"size": 4}}
    return run_config(tmp_path, data=data, model__puzzle_emb_ndim=8)


def reference_file(tmp_path, prefix="_orig_mod."):
    config = recipe(tmp_path).model
    model = TinyRecursiveModel(config, FOUR_BY_FOUR, seed=9)
    state = to_reference(model.state_dict(), config, compiled=bool(prefix))
    saved = collections.OrderedDict(state)
    saved._metadata = model.state_dict()._metadata  # every state dict of a module has it
    torch.save(saved, tmp_path / "step_100")
    return tmp_path / "step_100", state


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_an_imported_file_is_exported_unchanged(tmp_path, prefix):
    path, state = reference_file(tmp_path, prefix)
    import_weights(path, recipe(tmp_path), tmp_path / "run")
    export_reference(tmp_path / "run", OutputFile(tmp_path / "out.pt", STATE_DICT), compiled=bool(prefix))
    exported = read_state_dict(tmp_path / "out.pt")
    assert exported.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(exported[name], tensor)
    assert Run(tmp_path / "run").checkpoints().newest_intact().step == 0


@pytest.mark.slow
def test_a_file_of_another_model_is_refused_before_the_run_exists(tmp_path):
    path, _ = reference_file(tmp_path)
    config = recipe(tmp_path).model_copy(update={"model": model_config(puzzle_emb_ndim=8, L_layers=1)})
    with pytest.raises(CheckpointError, match="do not fit the model of the recipe"):
        import_weights(path, config, tmp_path / "run")
    other = recipe(tmp_path).model_copy(update={"model": model_config(variant="transformer")})
    with pytest.raises(LaptopError):
        import_weights(path, other, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def head(weights):
    return {name: tensor for name, tensor in weights.items() if name.startswith(("lm_head", "q_head"))}


def test_a_new_run_starts_from_the_weights_of_another(tmp_path):
    path, _ = reference_file(tmp_path)
    import_weights(path, recipe(tmp_path), tmp_path / "old")
    other = recipe(tmp_path).model_copy(update={"seed": 7})
    assert import_weights(tmp_path / "old", other, tmp_path / "new") == []
    old, new = (Run(tmp_path / name).checkpoints().newest_intact() for name in ("old", "new"))
    assert all(torch.equal(tensor, old.load("ema")[name]) for name, tensor in new.load("weights").items())


def test_a_new_head_is_initialised_and_other_weights_are_kept(tmp_path):
    """Attention does not depend on the length, so weights from 4x4 grids can be trained on 6x6 ones."""
    config = recipe(tmp_path).model_copy(update={"model": model_config()})
    small = config.model_copy(update={"training": config.training.model_copy(update={"ema": False})})
    run = tmp_path / "old"
    first = make_learner(small.model, small.training, FOUR_BY_FOUR, seed=3)
    torch.save(to_reference(first.model.state_dict(), small.model), tmp_path / "old.pt")
    import_weights(tmp_path / "old.pt", small, run)
    larger = small.model_copy(update={"data": small.data.model_copy(update={"build": {"size": 6}})})
    with pytest.raises(CheckpointError, match=r"do not fit the model.*lm_head"):
        import_weights(run, larger, tmp_path / "new")
    new = import_weights(run, larger, tmp_path / "new", new_head=True)
    assert new == ["embed_tokens.embedding_weight", "lm_head.weight", "q_head.bias", "q_head.weight"]
    old, fresh = (Run(path).checkpoints().newest_intact().load("weights") for path in (run, tmp_path / "new"))
    assert fresh["lm_head.weight"].shape[0] == 8
    assert all(torch.equal(old[name], tensor) for name, tensor in fresh.items() if name not in new)
    same = small.model_copy(update={"seed": 9})
    assert import_weights(run, same, tmp_path / "same", new_head=True) == sorted(head(old))
    mixer = model_config(mixer="mlp", pos_encodings="none")
    with pytest.raises(CheckpointError, match="The weights below the head do not fit"):
        import_weights(run, small.model_copy(update={"model": mixer}), tmp_path / "other", new_head=True)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def zipped(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)


def test_a_file_that_would_execute_a_command_is_refused_and_nothing_is_executed(tmp_path):
    mark = tmp_path / "ran"
    plain, torch_file = tmp_path / "plain.pt", tmp_path / "torch.pt"
    zipped(plain, pickle.dumps({"w": Malicious(mark)}))
    torch.save({"w": torch.zeros(2), "x": Malicious(mark)}, torch_file)
    for path in (plain, torch_file):
        with pytest.raises(CheckpointError, match=r"requires \w+\.system"):
            import_weights(path, recipe(tmp_path), tmp_path / "run")
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


def test_no_module_beside_the_file_is_imported(tmp_path, monkeypatch):
    """A module in the current directory could replace one that the reader imports."""
    path, _ = reference_file(tmp_path)
    (tmp_path / "resource.py").write_text("open('ran', 'w')\nraise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    import_weights(path, recipe(tmp_path), tmp_path / "run")
    assert not (tmp_path / "ran").exists()


def test_a_small_file_cannot_expand_to_a_huge_tensor(tmp_path):
    torch.save({"w": torch.zeros(1).expand(2**40)}, tmp_path / "bomb.pt")
    with pytest.raises(CheckpointError, match="larger than the file"):
        read_state_dict(tmp_path / "bomb.pt")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps([1, 2]),
        pickle.dumps({}),
        pickle.dumps({"a": 1}),
        pickle.dumps({1: "a"}),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(tR.",
        b"\x80\x02" + b"(" * 10_000,
    ],
)
def test_contents_other_than_a_state_dict_are_refused(tmp_path, content):
    path = tmp_path / "file.pt"
    zipped(path, content)
    with pytest.raises(CheckpointError):
        read_state_dict(path)


def test_many_names_of_one_storage_cannot_take_more_memory_than_the_file(tmp_path):
    shared = torch.zeros(100_000)
    torch.save({f"w{n}": shared for n in range(50)}, tmp_path / "shared.pt")
    with pytest.raises(CheckpointError, match="larger than the file"):
        read_state_dict(tmp_path / "shared.pt")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"w": torch.zeros(4)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as source, zipfile.ZipFile(tmp_path / "bad.pt", "w") as target:
        for name in source.namelist():
            short = name.endswith("data/0")
            target.writestr(name, source.read(name)[:8] if short else source.read(name))
    with pytest.raises(CheckpointError, match="are inconsistent"):
        read_state_dict(tmp_path / "bad.pt")


def test_compressed_and_foreign_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 10_000_000)
    (tmp_path / "text.pt").write_text("hello")
    with zipfile.ZipFile(tmp_path / "empty.pt", "w"):
        pass
    for name, message in (
        ("bomb.pt", "compressed"),
        ("text.pt", "not a zip"),
        ("empty.pt", "exactly one data.pkl"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_state_dict(tmp_path / name)


def test_a_failed_import_leaves_nothing_and_the_corrected_one_works(tmp_path):
    path, state = reference_file(tmp_path)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in state.items()}
    torch.save(broken, tmp_path / "broken.pt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(LaptopError):
        import_weights(tmp_path / "broken.pt", recipe(tmp_path), tmp_path / "runs" / "new")
    assert sorted(tmp_path.rglob("*")) == before
    import_weights(path, recipe(tmp_path), tmp_path / "runs" / "new")
    assert Run(tmp_path / "runs" / "new").checkpoints().newest_step() == 0


def test_a_place_for_a_run_that_is_taken_is_refused_before_the_weights_are_read(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(LaptopError, match="is a file, not a run directory"):
        import_weights(tmp_path / "missing.pt", recipe(tmp_path), tmp_path / "file")


def test_a_pipe_is_refused_immediately(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="it is a pipe, not a regular file"):
        read_state_dict(tmp_path / "pipe.pt")
    assert time.monotonic() - started < 1
