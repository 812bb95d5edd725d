"""The candidates of a search: around the recipe, valid, and with as many examples."""

import itertools

import pytest
from tiny import run_config

from trm.config import load_config, shipped_recipes
from trm.tuning.space import (
    BATCH,
    CYCLES,
    DEPTH_FACTOR,
    LEARNING_RATE,
    MAX_STEPS,
    WIDTH,
    depth_key,
    described,
    search_space,
    start_values,
    with_values,
)


@pytest.fixture
def recipe(tmp_path):
    """A recipe with everything that is counted in steps."""
    return run_config(
        tmp_path / "set",
        training__supervision="terminal",
        training__depths={0: 1, 50: 2, 80: 4},
        training__max_steps=100,
        training__warmup_steps=10,
        training__ema_rate=0.99,
        training__phases=[{"name": "first", "steps": 20}, {"name": "last"}],
        training__effective_batch_size=8,
    )


def changed(config, **values):
    return with_values(config, {**start_values(config), **values})


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_corner_of_the_space_of_a_shipped_recipe_is_a_valid_recipe(name):
    config = load_config(name)
    space = search_space(config)
    start = start_values(config)
    for key, value in start.items():
        if key != LEARNING_RATE:
            assert value in space.choices[key]
    assert space.learning_rates[0] < config.training.learning_rate < space.learning_rates[1]
    ends = [[(key, value) for value in (values[0], values[-1])] for key, values in space.choices.items()]
    for rate, *others in itertools.product(space.learning_rates, *ends):
        candidate = with_values(config, {LEARNING_RATE: rate, **dict(others)})
        assert candidate.model.hidden_size == dict(others)[WIDTH]
        assert candidate.data == config.data


def test_the_start_of_a_search_is_the_recipe_itself(recipe):
    assert with_values(recipe, start_values(recipe)) is recipe


def test_another_batch_size_keeps_the_number_of_examples(recipe):
    candidate = changed(recipe, effective_batch_size=2)
    training = candidate.training
    assert training.max_steps * training.effective_batch_size == 100 * 8
    assert training.warmup_steps == 40
    assert training.depths == {0: 1, 200: 2, 320: 4}
    assert training.phases[0].steps == 80
    assert candidate.evaluation.every_steps == 4 * recipe.evaluation.every_steps
    assert training.ema_rate**4 == pytest.approx(0.99, abs=1e-5), "per step; four steps are one of before"
    larger = changed(recipe, effective_batch_size=32)
    assert (larger.training.max_steps, larger.training.depths) == (25, {0: 1, 12: 2, 20: 4})


def test_the_depth_is_what_suits_the_supervision(recipe, tmp_path):
    assert depth_key(recipe) == DEPTH_FACTOR
    assert changed(recipe, depth_factor=2.0).training.depths == {0: 2, 50: 4, 80: 8}
    assert changed(recipe, depth_factor=0.5).training.depths == {0: 1, 50: 1, 80: 2}
    shallow = run_config(tmp_path, training__supervision="terminal")
    assert search_space(shallow).choices[DEPTH_FACTOR] == (1.0, 2.0, 4.0)
    deep = run_config(tmp_path)
    assert depth_key(deep) == CYCLES
    assert changed(deep, H_cycles=1).model.H_cycles == 1
    one_latent = run_config(tmp_path, model__variant="transformer")
    assert depth_key(one_latent) == MAX_STEPS
    assert changed(one_latent, halt_max_steps=8).model.halt_max_steps == 8


def test_a_puzzle_embedding_as_wide_as_the_model_stays_so():
    config = load_config("sudoku-extreme")
    candidate = changed(config, hidden_size=256)
    assert (candidate.model.hidden_size, candidate.model.puzzle_emb_ndim) == (256, 256)
    assert candidate.model.hidden_size % candidate.model.num_heads == 0


def test_a_candidate_is_described_in_one_line(recipe):
    text = described(start_values(recipe))
    assert text == "learning rate 0.01, batch 8, depths x 1, width 8"
    assert BATCH not in text
