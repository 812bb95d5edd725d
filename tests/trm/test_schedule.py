import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import model_config, run_config, training_config

from trm.schedule import (
    cycles_of_step,
    label_smoothing_of_step,
    learning_rate_factor,
    phase_of_step,
    typical_cycles,
    value_at,
    word_dropout_of_step,
)


def test_the_learning_rate_warms_up_and_falls_like_a_cosine():
    training = training_config(warmup_steps=10, max_steps=110, lr_min_ratio=0.2)
    assert learning_rate_factor(1, training) == pytest.approx(0.1)
    assert learning_rate_factor(10, training) == 1
    assert learning_rate_factor(60, training) == pytest.approx(0.6)  # half-way: (1 + 0.2) / 2
    quarter = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate_factor(35, training) == pytest.approx(quarter)
    assert learning_rate_factor(110, training) == pytest.approx(0.2)


@given(step=st.integers(1, 10**6), warmup=st.integers(0, 1000), ratio=st.floats(0, 1))
def test_the_learning_rate_is_between_zero_and_its_peak(step, warmup, ratio):
    factor = learning_rate_factor(
        step, training_config(warmup_steps=warmup, max_steps=5000, lr_min_ratio=ratio)
    )
    assert 0 <= factor <= 1


def test_a_value_applies_to_the_steps_after_the_one_that_it_is_given_for():
    assert [value_at({0: "a", 2: "b"}, step) for step in (1, 2, 3, 100)] == ["a", "a", "b", "b"]


def test_deep_supervision_always_takes_the_model_s_number_of_recursions():
    training = training_config(supervision="deep")
    assert {cycles_of_step(step, model_config(H_cycles=3), training, 0) for step in range(1, 50)} == {3}
    assert cycles_of_step(1, model_config(variant="transformer", H_cycles=3), training, 0) == 1


def test_terminal_supervision_draws_every_allowed_depth_and_no_other():
    training = training_config(supervision="terminal", depths={0: 1, 100: 4, 200: 8})
    depths = [cycles_of_step(step, model_config(), training, seed=0) for step in range(1, 601)]
    assert set(depths[:100]) == {1}
    assert set(depths[100:200]) == {1, 2, 3, 4}
    assert set(depths[200:]) == set(range(1, 9))


@given(step=st.integers(1, 10_000), seed=st.integers(0, 1000))
def test_the_depth_of_a_step_is_a_pure_function(step, seed):
    training = training_config(supervision="terminal", depths={0: 6})
    draws = {cycles_of_step(step, model_config(), training, seed) for _ in range(3)}
    assert len(draws) == 1
    assert 1 <= draws.pop() <= 6


def test_a_typical_step_has_the_median_number_of_recursions_of_the_last_stage(tmp_path):
    deep = run_config(tmp_path, model__H_cycles=3)
    assert typical_cycles(deep.model, deep.training) == 3
    terminal = run_config(tmp_path, training__supervision="terminal", training__depths={0: 1, 100: 7})
    assert typical_cycles(terminal.model, terminal.training) == 4


def test_an_extension_changes_the_learning_rate_of_later_steps_only():
    short = training_config(warmup_steps=10, max_steps=110, lr_min_ratio=0.2)
    extended = training_config(warmup_steps=10, max_steps=110, lr_min_ratio=0.2, extensions={110: 210})
    long = training_config(warmup_steps=10, max_steps=210, lr_min_ratio=0.2)
    assert (short.last_step, extended.last_step) == (110, 210)
    for step in range(1, 111):
        assert learning_rate_factor(step, extended) == learning_rate_factor(step, short)
    for step in range(111, 220):
        assert learning_rate_factor(step, extended) == learning_rate_factor(step, long)


PHASES = [
    {"name": "warm-up", "share": 0.1, "learning_rate_factor": 0.5, "word_dropout": 0.0},
    {"name": "main", "share": 0.6},
    {"name": "fine-tune", "share": 0.3, "learning_rate_factor": 0.1, "label_smoothing": 0.2},
]


def test_a_phase_multiplies_what_warm_up_and_decay_give():
    schedule = {"warmup_steps": 20, "max_steps": 100, "lr_min_ratio": 0.2}
    plain = training_config(**schedule)
    phased = training_config(**schedule, phases=PHASES)
    factors = [0.5] * 10 + [1.0] * 60 + [0.1] * 30
    for step, factor in enumerate(factors, start=1):
        expected = pytest.approx(factor * learning_rate_factor(step, plain))
        assert learning_rate_factor(step, phased) == expected, step


def test_a_phase_has_its_own_word_dropout_and_label_smoothing_or_the_recipe_s():
    training = training_config(max_steps=100, phases=PHASES, word_dropout=0.3, label_smoothing=0.1)
    steps = (1, 10, 11, 70, 71, 100)
    assert [word_dropout_of_step(step, training) for step in steps] == [0.0, 0.0, 0.3, 0.3, 0.3, 0.3]
    assert [label_smoothing_of_step(step, training) for step in steps] == [0.1, 0.1, 0.1, 0.1, 0.2, 0.2]
    plain = training_config(word_dropout=0.3, label_smoothing=0.1)
    assert (word_dropout_of_step(1, plain), label_smoothing_of_step(1, plain)) == (0.3, 0.1)


def test_a_share_and_as_many_steps_are_the_same_phase():
    by_share = training_config(max_steps=40, phases=PHASES)
    by_steps = training_config(
        max_steps=40,
        phases=[
            {**PHASES[0], "share": None, "steps": 4},
            {**PHASES[1], "share": None, "steps": 24},
            {**PHASES[2], "share": None},
        ],
    )
    for step in range(1, 41):
        ours, theirs = (phase_of_step(step, each) for each in (by_share, by_steps))
        assert ours.name == theirs.name
        assert learning_rate_factor(step, by_share) == learning_rate_factor(step, by_steps)


def test_more_steps_belong_to_the_last_phase():
    extended = training_config(max_steps=100, phases=PHASES, extensions={100: 300})
    assert {phase_of_step(step, extended).name for step in range(71, 301)} == {"fine-tune"}


def test_before_the_first_step_there_is_no_phase():
    assert phase_of_step(0, training_config(phases=PHASES)) is None
    assert phase_of_step(1, training_config()) is None


@given(
    shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    max_steps=st.integers(1000, 100_000),
)
def test_phases_cover_every_step_in_their_order(shares, max_steps):
    total = sum(shares)
    phases = [{"name": str(number), "share": share / total} for number, share in enumerate(shares)]
    starts = training_config(max_steps=max_steps, phases=phases).phase_starts
    assert [phase.name for _, phase in sorted(starts.items())] == [phase["name"] for phase in phases]
    assert min(starts) == 0
    assert max(starts) < max_steps
