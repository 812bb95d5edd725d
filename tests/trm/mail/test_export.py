"""An exported model decides as its run does, can be smaller, and reveals no more than its card says."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from letters import TOPICS, letter

import trm
from macbook_optimization.errors import DataError, LaptopError
from trm.cli import cli
from trm.mail.compression import SCALE, pruned, quantized, restored
from trm.mail.deciding import open_classifier
from trm.mail.export import ExportOptions, export_model
from trm.mail.loading import load_mail
from trm.mail.model import load_model, save_model
from trm.mail.onnx_graph import onnx_model, run_onnx
from trm.runs.directory import MAIL
from trm.tasks.documents.email import question_batch
from trm.tasks.documents.mailboxes import Message

LETTERS = [letter(category, number, 3) for category in TOPICS for number in range(8)]


@pytest.mark.slow
def test_three_lines_of_python_use_an_exported_model(trained, tmp_path):
    export_model(load_mail(trained[0]).model, tmp_path / "model", ExportOptions())
    (tmp_path / "message.eml").write_bytes(LETTERS[0])
    code = (
        "import trm\n"
        f"model = trm.load_mail({str(tmp_path / 'model')!r})\n"
        "print(model.classify(open('message.eml', 'rb').read()).category)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "work\n", done.stderr


def test_an_exported_model_decides_as_its_run_with_its_corrections(untrained, tmp_path):
    run = shutil.copytree(untrained, tmp_path / "run")
    with open_classifier(run) as classifier:
        classifier.learn([Message("letter", LETTERS[0])], "spam")
    export_model(load_mail(run).model, tmp_path / "model", ExportOptions())
    expected = load_mail(run).classify_all(LETTERS)
    found = trm.load_mail(tmp_path / "model").classify_all(LETTERS)
    assert found == expected
    assert found[0].category == "spam"
    with pytest.raises(DataError, match="already exists"):
        export_model(load_mail(run).model, tmp_path / "model", ExportOptions())


def test_an_exported_model_holds_no_message_and_says_what_it_reveals(untrained, tmp_path):
    exported = export_model(load_mail(untrained).model, tmp_path / "model", ExportOptions())
    content = b"".join(path.read_bytes() for path in (tmp_path / "model").iterdir())
    for raw in LETTERS:
        assert raw.split(b"\n\n", 1)[1].strip() not in content
    assert str(untrained).encode() not in content
    assert b"nothing" not in (tmp_path / "model" / "mail.json").read_bytes()  # the path of the dataset
    card = (tmp_path / "model" / "README.md").read_text()
    assert "at least\n2 training messages" in card
    assert "not used" not in card
    assert set(exported.files) == {
        "README.md", "mail.json", "linear.safetensors", "vocabulary.txt", "recursive.safetensors",
        "tokenizer.json",
    }  # fmt: skip


def test_a_larger_min_df_leaves_rare_ngrams_out(trained, tmp_path):
    model = load_mail(trained[0]).model
    export_model(model, tmp_path / "model", ExportOptions(min_documents=20))
    smaller = load_model(tmp_path / "model")
    assert 0 < len(smaller.vocabulary.columns) < len(model.vocabulary.columns)
    assert set(smaller.vocabulary.columns) < set(model.vocabulary.columns)
    for name, column in smaller.vocabulary.columns.items():
        earlier = model.vocabulary.columns[name]
        np.testing.assert_array_equal(smaller.table.weights[column], model.table.weights[earlier])
    # idf = log((1 + n) / (1 + df)) + 1, and 81 of the 90 messages were trained on
    assert smaller.vocabulary.idf.max() <= np.log(82 / 21) + 1 + 1e-6
    least = re.search(r"at least\n(\d+) training", (tmp_path / "model" / "README.md").read_text())
    assert int(least[1]) == round(82 / np.exp(smaller.vocabulary.idf.max() - 1) - 1) >= 20


def test_quantized_weights_are_within_half_a_step(untrained):
    rng = np.random.default_rng(0)
    weights = {"matrix": rng.normal(size=(64, 48)).astype(np.float32), "bias": np.ones(3, np.float32)}
    stored = quantized(weights)
    assert stored["matrix"].dtype == np.int8
    assert stored["bias"] is weights["bias"]
    error = np.abs(restored(stored)["matrix"] - weights["matrix"])
    assert (error <= stored["matrix" + SCALE] / 2 + 1e-7).all()
    assert restored(weights).keys() == weights.keys()


def test_pruning_removes_the_smallest_weights(untrained):
    matrix = np.random.default_rng(1).normal(size=(64, 48)).astype(np.float32)
    found = pruned({"matrix": matrix}, 0.75)["matrix"]
    assert (found == 0).mean() == pytest.approx(0.75, abs=1e-3)
    assert np.abs(matrix[found == 0]).max() <= np.abs(found[found != 0]).min()


def test_a_compressed_model_is_smaller_and_still_answers(untrained, tmp_path):
    model = load_mail(untrained).model
    plain = export_model(model, tmp_path / "plain", ExportOptions())
    small = export_model(model, tmp_path / "small", ExportOptions(prune=0.3, int8=True))
    name = "recursive.safetensors"
    assert small.files[name] < 0.6 * plain.files[name]
    one, other = (trm.load_mail(tmp_path / each).classify_all(LETTERS) for each in ("plain", "small"))
    assert one != other
    assert "measured before the export" in (tmp_path / "small" / "README.md").read_text()
    assert "measured before the export" not in (tmp_path / "plain" / "README.md").read_text()
    assert np.mean([a.category == b.category for a, b in zip(one, other, strict=True)]) > 0.8


VARIANTS = {
    "transformer": {},
    "window": {"attention_window": 5},
    "learned positions": {"pos_encodings": "learned"},
    "no positions": {"pos_encodings": "none"},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("variant", ["transformer", "singlez", "trm"])
def test_the_onnx_graph_equals_our_output(untrained, changes, variant):
    pytest.importorskip("onnx", reason="the export to ONNX needs onnx")
    from safetensors.numpy import load, save
    from tiny import make_learner

    network = load_model(untrained / MAIL).network
    shape = {**network.recipe["model"], "variant": variant, "L_cycles": 2, "L_layers": 1, **changes}
    recipe = {**network.recipe, "model": shape, "inference": {"depth": 2}}
    recipe["training"] = {**recipe["training"], "supervision": "terminal", "loss": "softmax_cross_entropy"}
    network = replace(network, recipe=recipe)
    weights = make_learner(network.config.model, network.config.training, network.data).state()["weights"]
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    network = replace(network, files={**network.files, "recursive.safetensors": save(arrays)})
    assert load(network.files["recursive.safetensors"]).keys() == arrays.keys()
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, network.data.vocab_size, length) for length in (1, 7, 20, 48)]
    batch = question_batch(rows, network.length)
    found = run_onnx(onnx_model(network.config, network.data, arrays), batch.inputs, batch.lengths)
    np.testing.assert_allclose(found, network.probabilities_of(rows), atol=2e-6)
    narrow = run_onnx(
        onnx_model(network.config, network.data, arrays), batch.inputs[:3, :20], batch.lengths[:3]
    )
    np.testing.assert_allclose(narrow, found[:3], atol=2e-6)


def test_several_networks_are_averaged_saved_and_exported(untrained, tmp_path):
    pytest.importorskip("onnx", reason="the export to ONNX needs onnx")
    from safetensors.torch import save
    from tiny import make_learner

    model = load_model(untrained / MAIL)
    one = model.network
    recipe = {**one.recipe, "training": {**one.recipe["training"], "loss": "softmax_cross_entropy"}}
    other = make_learner(one.config.model, one.config.training, one.data, seed=8).state()["weights"]
    both = replace(one, recipe=recipe, files={"recursive-1.safetensors": save(other), **one.files})
    save_model(replace(model, network=both), tmp_path / "mail")
    both = load_model(tmp_path / "mail").network
    rows = [np.arange(2, 20), np.arange(30, 77)]
    single = [both.probabilities_of(rows, [member]) for member in (0, 1)]
    assert np.abs(single[0] - single[1]).max() > 0.01
    np.testing.assert_allclose(both.probabilities_of(rows), np.mean(single, axis=0), atol=1e-6)
    exported = export_model(load_mail(tmp_path).model, tmp_path / "model", ExportOptions(onnx=True))
    assert {"recursive.onnx", "recursive-1.onnx"} < set(exported.files)
    assert exported.onnx_difference < 1e-5


def test_onnx_needs_a_recursive_path(trained, tmp_path):
    pytest.importorskip("onnx", reason="the export to ONNX needs onnx")
    with pytest.raises(LaptopError, match="no recursive path"):
        export_model(load_mail(trained[0]).model, tmp_path / "model", ExportOptions(onnx=True))
    assert not (tmp_path / "model").exists()


def test_the_command_reports_what_it_wrote(trained, tmp_path):
    arguments = ["email", "export", str(trained[0]), str(tmp_path / "model"), "--json"]
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    facts = json.loads(done.stdout)
    assert facts["files"]["mail.json"] == (tmp_path / "model" / "mail.json").stat().st_size
    assert facts["onnx_difference"] is None
