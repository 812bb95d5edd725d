"""What a run starts from: co-occurrence, or the weights of another run. Resuming needs neither again."""

import shutil

import pytest
import torch
from tiny import Recorder, make_learner, plan_of, run, run_config, sudoku_dataset
from tiny_mail import email_config, email_dataset, masked_dataset

from macbook_optimization.errors import CheckpointError, ConfigError, LaptopError
from trm.backends.base import SingleProcess
from trm.config import load_config
from trm.feed import Feed
from trm.runs.directory import EVENTS, Run
from trm.tasks.dataset import open_split
from trm.tasks.documents.email import TASK
from trm.training import initial
from trm.training.loop import Limits
from trm.training.start import train
from trm.training.state import TrainingState

pytest.importorskip("tokenizers")
pytest.importorskip("scipy")

EMBEDDINGS = "embed_tokens.embedding_weight"
STEPS = 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return email_dataset(tmp_path_factory.mktemp("email") / "set")


@pytest.fixture(scope="module")
def pretrained(dataset):
    """A run on masked tokens, whose best checkpoint is not its newest."""
    masked = masked_dataset(dataset.with_name("masked"), dataset)
    config = short(masked, task="email-masked", evaluation={"every_steps": 4}, seed=3)
    path = dataset.with_name("pretrained")
    run(config, path)
    return path


def short(dataset, **training_and_sections):
    sections = {
        key: value for key, value in training_and_sections.items() if key in ("task", "evaluation", "seed")
    }
    training = {key: value for key, value in training_and_sections.items() if key not in sections}
    config = email_config(dataset, **sections)
    settings = {**config.training.model_dump(), "max_steps": STEPS, "ema_rate": 0.5, **training}
    return config.model_validate({**config.model_dump(), "training": settings})


def drawn(config):
    """Return the weights of a learner of this recipe before the first step."""
    spec = open_split(config.data.path, "train").spec
    learner = make_learner(config.model, config.training, spec, seed=config.seed)
    return {name: tensor.clone() for name, tensor in learner.state()["weights"].items()}


def groups_at(path, step):
    found = [each for each in Run(path).checkpoints().intact_checkpoints() if each.step == step]
    return found[0].load_all()


def assert_same_end(one, other):
    first, second = groups_at(one, STEPS), groups_at(other, STEPS)
    for group, tensors in first.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, second[group][name]), f"{group} {name}"


@pytest.mark.slow
def test_embeddings_start_from_cooccurrence_and_everything_else_from_the_seed(tmp_path, dataset):
    config = short(dataset, initial_embeddings="cooccurrence")
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=2), display)
    tokens, vectors = TASK.word_vectors(open_split(dataset, "train"), config.model.hidden_size)
    text = f"The embeddings of {len(tokens)} tokens of 300 start from co-occurrence"
    assert f"{text}." in display.messages
    assert [
        row["description"] for row in Run(tmp_path / "run").rows(EVENTS) if row["event"] == "initialised"
    ] == [text]
    expected = drawn(config)
    expected[EMBEDDINGS][tokens] = torch.from_numpy(vectors)
    known = expected[EMBEDDINGS][tokens].std()
    others = torch.ones(300, dtype=torch.bool)
    others[tokens] = False
    assert float(known / expected[EMBEDDINGS][others].std()) == pytest.approx(1, abs=0.05)
    start = groups_at(tmp_path / "run", 0)
    for group in ("weights", "ema"):
        for name, tensor in expected.items():
            assert torch.equal(start[group][name], tensor), f"{group} {name}"
    assert not any(moment.any() for moment in start["optimizer"].values())


@pytest.mark.slow
def test_embeddings_are_computed_once(tmp_path, dataset, monkeypatch):
    config = short(dataset, initial_embeddings="cooccurrence")
    run(config, tmp_path / "whole")
    run(config, tmp_path / "resumed", max_step=0)

    def fail(*arguments, **options):
        raise AssertionError

    monkeypatch.setattr(initial, "_word_vectors", fail)
    for stop_at in (3, STEPS):
        assert run(config, tmp_path / "resumed", max_step=stop_at).step == stop_at
    assert_same_end(tmp_path / "whole", tmp_path / "resumed")


def test_a_run_without_these_keys_saves_no_start(tmp_path, dataset):
    run(short(dataset), tmp_path / "run", max_step=2)
    assert [each.step for each in Run(tmp_path / "run").checkpoints().intact_checkpoints()] == [2]


def test_a_run_starts_from_the_best_weights_of_another(tmp_path, dataset, pretrained):
    config = short(dataset, initial_weights=str(pretrained))
    display = Recorder()
    train(config, tmp_path / "run", plan_of(config), Limits(max_step=1), display)
    assert (
        f"Starting from {pretrained}: L_level, embed_tokens, initial_latents, q_head; "
        "drawn at random: lm_head."
    ) in display.messages
    theirs = Run(pretrained).checkpoints().best_or_newest().load("ema")
    start = groups_at(tmp_path / "run", 0)
    for group in ("weights", "ema"):
        for name, tensor in drawn(config).items():
            expected = tensor if name.startswith("lm_head") else theirs[name]
            assert torch.equal(start[group][name], expected), f"{group} {name}"
    assert Run(tmp_path / "run").config.training.initial_weights == pretrained


@pytest.mark.slow
def test_resuming_does_not_need_the_other_run(tmp_path, dataset, pretrained):
    other = tmp_path / "other"
    shutil.copytree(pretrained, other)
    config = short(dataset, initial_weights=str(other))
    run(config, tmp_path / "whole")
    for name, stop_at in (("early", 0), ("late", 3)):
        run(config, tmp_path / name, max_step=stop_at)
    shutil.rmtree(other)
    for name in ("early", "late"):
        run(Run(tmp_path / name).config, tmp_path / name)
        assert_same_end(tmp_path / "whole", tmp_path / name)
    with pytest.raises(LaptopError, match="other"):
        run(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_other_initial_weights_are_another_recipe(tmp_path, dataset, pretrained):
    run(short(dataset, initial_weights=str(pretrained)), tmp_path / "run", max_step=2)
    with pytest.raises(LaptopError, match=r"training\.initial_weights"):
        run(short(dataset), tmp_path / "run")


def test_a_run_of_another_size_is_refused(tmp_path, dataset, pretrained):
    config = short(dataset, initial_weights=str(pretrained))
    wider = config.model_copy(update={"model": config.model.model_copy(update={"hidden_size": 64})})
    with pytest.raises(CheckpointError, match=r"No embedding and no layer of .*pretrained"):
        run(wider, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_with_another_vocabulary_is_refused(tmp_path, dataset, pretrained):
    other = tmp_path / "set"
    shutil.copytree(dataset, other)
    with (other / "tokenizer.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match="another vocabulary than") as refused:
        run(short(other, initial_weights=str(pretrained)), tmp_path / "run")
    assert "--tokenizer" in refused.value.hint
    assert not (tmp_path / "run").exists()


def test_a_run_whose_dataset_is_gone_can_still_be_started_from(tmp_path, dataset, pretrained):
    other = tmp_path / "other"
    shutil.copytree(pretrained, other)
    recipe = other / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(dataset.with_name("masked")), "gone"))
    assert run(short(dataset, initial_weights=str(other)), tmp_path / "run", max_step=1).step == 1


def test_a_rolled_back_run_returns_to_what_it_started_from(dataset, pretrained):
    config = short(dataset, initial_weights=str(pretrained))
    split = open_split(dataset, "train")
    world = SingleProcess(config.training.effective_batch_size)
    feed = Feed(config, TASK, split)
    state = TrainingState(
        config, plan_of(config), feed, world, lambda: make_learner(config.model, config.training, split.spec)
    )
    state.roll_back(None)
    theirs = Run(pretrained).checkpoints().best_or_newest().load("ema")
    assert torch.equal(state.learner.state()["weights"][EMBEDDINGS], theirs[EMBEDDINGS])


def test_only_words_have_cooccurrence(tmp_path):
    dataset = sudoku_dataset(tmp_path / "set")
    config = run_config(dataset, training={"initial_embeddings": "cooccurrence"})
    with pytest.raises(ConfigError, match="those of sudoku are not"):
        run(config, tmp_path / "run")


def test_one_start_is_enough():
    both = ["training.initial_embeddings=cooccurrence", "training.initial_weights=runs/other"]
    with pytest.raises(ConfigError, match="one is enough"):
        load_config("email", both)
