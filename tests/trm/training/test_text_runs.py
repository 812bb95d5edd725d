"""Runs of a language model, from a text file to a prompt that it continues."""

import json
import math
import re

import forked
import numpy as np
import pytest
from tiny import Recorder, plan_of, run, training_config

import trm
from macbook_optimization.errors import ConfigError, DataError
from trm.backends.pytorch.gradients import UpdateInBackward
from trm.config import EarlyStoppingConfig, PlateauConfig, RunConfig
from trm.feed import Feed, require_kind, require_target
from trm.inference.sampling import SamplingSettings, draw
from trm.runs.directory import Run
from trm.runs.listing import describe_runs, summarise
from trm.tasks.documents.text import TASK
from trm.tasks.metrics import gain, goodness, has_reached, shown_value, smaller_is_better
from trm.tasks.registry import load_task
from trm.training.early_stopping import EarlyStopping
from trm.training.loop import Limits
from trm.training.plateau import Plateau
from trm.training.start import train

TEXT = "".join(f"After {number} comes {number + 1}.\n" for number in range(150))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    (directory / "text.txt").write_text(TEXT)
    options = {"from": [str(directory / "text.txt")], "tokenizer": "char", "context": 12}
    TASK.build(options, directory / "set", lambda what, done, total: None)
    return directory / "set"


def config(dataset, **changes):
    tree = {
        "task": "text",
        "data": {"path": str(dataset)},
        "model": {"kind": "decoder", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "dropout": 0.1},
        "training": {
            "effective_batch_size": 4, "max_steps": 12, "warmup_steps": 0, "learning_rate": 1e-2,
            "ema": False, "deterministic": True,
        },
        "evaluation": {"every_steps": 4},
        "plan": {"threads": 1},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section] = {**tree[section], name: value}
    return RunConfig.model_validate(tree)


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "text"
    run(config(dataset), path)
    return path


def weights(path, step):
    checkpoint, _ = Run(path).checkpoints().recover()
    assert checkpoint.step == step
    return {**checkpoint.load("weights"), **checkpoint.load("optimizer")}


def test_a_run_that_was_stopped_continues_bit_for_bit(dataset, tmp_path, trained):
    stopped = tmp_path / "stopped"
    run(config(dataset), stopped, max_step=5)
    run(config(dataset), stopped)
    ours, theirs = weights(stopped, 12), weights(trained, 12)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] == tensor).all(), name


def test_a_step_that_has_updated_some_weights_when_it_fails_is_not_skipped(dataset, tmp_path, monkeypatch):
    take, spoiled = UpdateInBackward.take, []

    def take_or_spoil(stream, name, gradient):
        if stream.step == 7 and name.startswith("embed") and not spoiled:
            spoiled.append(name)
            gradient = gradient * math.inf
        take(stream, name, gradient)

    monkeypatch.setattr(UpdateInBackward, "take", take_or_spoil)
    recipe = config(dataset, plan__optimizer_in_backward=True)
    plan = plan_of(recipe).with_execution(optimizer_in_backward=True)
    display = Recorder()
    outcome = train(recipe, tmp_path / "run", plan, Limits(), display)
    assert (outcome.reason, outcome.step) == ("max_steps", 12)
    assert spoiled
    events = Run(tmp_path / "run").rows("events.jsonl")
    assert [(row["step"], row["to"]) for row in events if row["event"] == "rolled back"] == [(6, 4)]
    assert not [row for row in events if row["event"] == "step skipped"]
    assert any("gradient norm nan at step 7. Returning to step 4" in text for text in display.messages)


def test_the_best_checkpoint_has_the_smallest_loss(trained):
    losses = {row["step"]: row["test_loss"] for row in Run(trained).rows() if row["kind"] == "eval"}
    best = Run(trained).checkpoints().best()
    assert len(losses) == 3
    assert best["test_loss"] == min(losses.values())
    assert best["perplexity"] == pytest.approx(math.exp(best["test_loss"]))
    assert f"test loss {best['test_loss']:.4f}" in describe_runs([summarise(Run(trained))])[0]


def test_a_small_enough_loss_ends_training(dataset, tmp_path):
    outcome = run(config(dataset, evaluation__target_loss=100.0), tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("target", 4)


def test_a_loss_that_rises_ends_training_early(dataset, tmp_path):
    changes = {"training__early_stopping": {"patience": 1, "min_delta": 0.9}, "training__learning_rate": 1e-6}
    outcome = run(config(dataset, **changes), tmp_path / "run")
    assert (outcome.reason, outcome.step) == ("early stopping", 8)


def test_the_direction_of_a_metric_follows_from_its_name():
    for name in ("test_loss", "perplexity", "my_error"):
        assert smaller_is_better(name)
        assert gain(name, 1.0, 2.0) == 1.0
        assert goodness(name, 1.0) > goodness(name, 2.0)
        assert has_reached(name, 1.0, 1.5)
        assert not has_reached(name, 2.0, 1.5)
    for name in ("exact_accuracy", "macro_f1", "pass@2"):
        assert not smaller_is_better(name)
        assert gain(name, 1.0, 2.0) == -1.0
        assert not has_reached(name, 0.4, 0.5)
    assert shown_value("test_loss", 1.64649) == "1.6465"
    assert shown_value("exact_accuracy", 0.5) == "50.0%"
    assert not has_reached("test_loss", None, 1.0)


def test_plateaus_and_patience_follow_the_direction():
    state, waiting = Plateau(), EarlyStopping()
    for value in (2.0, 1.0, 1.5):
        state = state.after(value, PlateauConfig(patience=1), "test_loss")
        waiting = waiting.after(value, EarlyStoppingConfig(patience=9), "test_loss")
    assert (state.best, state.scale) == (1.0, 0.5)
    assert (waiting.best, waiting.waited) == (1.0, 1)


def test_a_model_of_the_wrong_kind_is_refused(dataset):
    recursive = {"task": "text", "data": {"path": "x"}, "training": training_config().model_dump()}
    with pytest.raises(ConfigError, match=r"needs model\.kind=decoder"):
        require_kind(RunConfig.model_validate(recursive), TASK)
    with pytest.raises(ConfigError, match=r"needs model\.kind=trm"):
        require_kind(config(dataset), load_task("sudoku"))
    tree = {"task": "sudoku", "data": {"path": "x"}, "evaluation": {"target_loss": 1.0}}
    with_loss = RunConfig.model_validate(tree)
    with pytest.raises(ConfigError, match="target_loss is set"):
        require_target(with_loss, load_task("sudoku"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"training__supervision": "deep"}, "carries latents"),
        ({"training__depths": {0: 4}}, "training.depths is for models that recurse"),
        ({"training__noise": 0.5}, "training.noise is for models that recurse"),
        ({"training__optimizer": "muon"}, "training.optimizer=muon"),
        ({"evaluation__target_accuracy": 0.5}, "use target_loss"),
        ({"model__num_kv_heads": 3}, "not a multiple of num_kv_heads 3"),
        ({"model__hidden_size": 10, "model__num_heads": 2}, "even head size"),
    ],
)
def test_keys_that_a_decoder_cannot_honour_are_refused(dataset, change, problem):
    with pytest.raises(ValueError, match=problem):
        config(dataset, **change)


def test_the_order_of_windows_is_that_of_every_other_task(dataset):
    from trm.slots import Slots
    from trm.tasks.dataset import open_split

    feed = Feed(config(dataset), TASK, open_split(dataset, "train"))
    slots = Slots.new(4).refilled()
    whole = feed.batch(slots, 1)
    np.testing.assert_array_equal(feed.batch(slots[2:], 1).inputs, whole.inputs[2:])
    assert whole.noise_seeds is not None


def test_draws_follow_temperature_and_top_p():
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    assert draw(logits, SamplingSettings(temperature=0), 0.99) == 0
    plain = SamplingSettings(temperature=1.0)
    assert [draw(logits, plain, uniform) for uniform in (0.0, 0.49, 0.51, 0.79, 0.81, 0.999)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
    narrow = SamplingSettings(temperature=1.0, top_p=0.7)
    assert {draw(logits, narrow, uniform) for uniform in np.linspace(0, 0.999, 50)} == {0, 1}


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it must be at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_of_sampling_are_checked(setting, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        SamplingSettings(**setting)


def test_a_loaded_model_continues_a_text(trained):
    model = trm.load(trained)
    text = model.generate("After 1", max_tokens=20, temperature=1.5, seed=3)
    assert text == model.generate("After 1", max_tokens=20, temperature=1.5, seed=3)
    assert text != model.generate("After 1", max_tokens=20, temperature=1.5, seed=4)
    pieces = list(model.stream("After 1", max_tokens=20, temperature=1.5, seed=3))
    assert len(pieces) == 20  # one per character, as it is written
    assert "".join(pieces) == text
    likeliest = model.generate("After 1", max_tokens=5, temperature=0)
    assert likeliest == model.generate("After 1", max_tokens=5, top_p=1e-9, seed=8)


def test_a_loaded_model_says_what_it_cannot_do(trained):
    model = trm.load(trained)
    with pytest.raises(DataError, match="has no questions that can be typed"):
        model.predict("After 1")
    with pytest.raises(DataError, match="has no '\u20ac'"):
        model.stream("\u20ac")  # refused before the first piece is requested
    with pytest.raises(ConfigError, match="temperature is -2"):
        model.generate("After 1", temperature=-2)
    with pytest.raises(ConfigError, match="depth is for models that answer puzzles"):
        trm.load(trained, depth=3)


def command(*words):
    return forked.run([str(word) for word in words], cwd="/", timeout=120)


@pytest.mark.slow
def test_the_commands_evaluate_and_continue_a_text(trained, dataset):
    shown = command("eval", trained)
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(command("eval", trained, "--json").stdout)
    assert facts["perplexity"] == pytest.approx(math.exp(facts["test_loss"]))
    assert facts["test_loss"] == pytest.approx(Run(trained).checkpoints().best()["test_loss"], rel=1e-5)
    options = ("--max-tokens", 20, "--seed", 3, "--temperature", 1.5)
    first, again = (command("predict", trained, "After 1", *options).stdout for _ in range(2))
    assert first == again
    assert first.startswith("After 1")
    written = json.loads(command("predict", trained, "After 1", *options, "--json").stdout)
    assert f"After 1{written['text']}\n" == first
    other = command("predict", trained, "After 1", "--max-tokens", 20, "--temperature", 0, "--seed", 4).stdout
    assert other == command("predict", trained, "After 1", "--max-tokens", 20, "--temperature", 0).stdout
    refused = command("predict", trained, "After 1", "--retries", 3)
    assert refused.returncode == 2
    assert "--retries is for puzzles" in refused.stderr
    unknown = command("predict", trained, "\u20ac")
    assert (unknown.returncode, "has no '\u20ac'" in unknown.stderr) == (1, True)
