import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import model_config, run_config, training_config

from trm.schedule import cycles_of_step, learning_rate_factor, typical_cycles, value_at


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
