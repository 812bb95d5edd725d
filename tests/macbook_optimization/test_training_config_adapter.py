"""Profiles, plans and validation for machines other than this one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.hardware_detection import GIB, CPUSpecs, HardwareSpecs, MemorySpecs, PowerSpecs
from macbook_optimization.memory_management import MIB
from macbook_optimization.training_config_adapter import (
    PROFILES,
    TrainingConfigAdapter,
    fitting_heads,
    profile_for,
    scaled_learning_rate,
)


def machine(gigabytes, cores=4, quota=None):
    cpu = CPUSpecs(None, "x86_64", cores, 2 * cores, None, None, (), None, None, None, None, None, quota)
    memory = MemorySpecs(int(gigabytes * GIB), int(0.75 * gigabytes * GIB), None, None, None, None, None)
    return HardwareSpecs(cpu, memory, PowerSpecs(None, None), None)


@pytest.mark.parametrize(
    ("gigabytes", "name"), [(4, "8gb"), (8, "8gb"), (15.5, "16gb"), (16, "16gb"), (24, "16gb"), (64, "32gb")]
)
def test_a_machine_gets_the_largest_profile_that_fits_its_memory(gigabytes, name):
    assert profile_for(int(gigabytes * GIB)).name == name


@pytest.mark.parametrize("profile", PROFILES)
def test_the_profiles_are_models_that_can_be_built(profile):
    assert profile.hidden_size % profile.num_heads == 0
    assert profile.batch_size * profile.gradient_accumulation_steps == 32


def test_a_large_model_is_adapted_and_a_small_one_is_left_alone():
    adapter = TrainingConfigAdapter(machine(8))
    large = adapter.adapt_model_config({"hidden_size": 1024, "num_heads": 12, "seq_len": 900, "mlp_t": True})
    assert large == {
        "hidden_size": 256, "num_heads": 8, "seq_len": 256, "mlp_t": True, "L_layers": 2, "expansion": 2.0,
    }  # fmt: skip
    small = {"hidden_size": 64, "num_heads": 4, "L_layers": 1, "expansion": 1.0}
    assert adapter.adapt_model_config(small) == small


@given(st.integers(1, 4096), st.integers(1, 64))
def test_heads_always_divide_the_hidden_size(hidden_size, wanted):
    heads = fitting_heads(hidden_size, wanted)
    assert 1 <= heads <= max(1, wanted)
    assert hidden_size % heads == 0


def test_the_learning_rate_follows_the_square_root_of_the_batch():
    assert scaled_learning_rate(1e-3, 64, 16) == pytest.approx(5e-4)


@pytest.mark.parametrize("gigabytes", [4, 8, 16, 32])
@pytest.mark.parametrize("dataset_size", [1, 1000, 10**7])
def test_training_parameters_fit_their_machine(gigabytes, dataset_size):
    hardware = machine(gigabytes)
    found = TrainingConfigAdapter(hardware).calculate_training_parameters(dataset_size)
    assert found.memory_limit_mb * MIB <= hardware.memory.available_memory
    assert found.effective_batch_size == 32
    assert 0 < found.warmup_steps < found.max_steps
    assert TrainingConfigAdapter(hardware).validate_configuration(found).is_valid


def test_all_problems_are_reported_together_with_suggestions():
    result = TrainingConfigAdapter(machine(8)).validate_configuration(
        {"learning_rate": 3.0, "batch_size": 0, "hidden_size": 500, "num_heads": 7, "num_workers": -1}
    )
    assert not result.is_valid
    assert len(result.errors) == 4
    text = " ".join(result.errors)
    assert all(name in text for name in ("learning_rate", "batch_size", "num_heads", "num_workers"))
    assert "num_heads=5" in result.suggestions
    assert any(text.startswith("hidden_size=256 suits") for text in result.suggestions)


def test_plan_settings_that_cannot_work_here_are_corrected_with_a_warning():
    result = TrainingConfigAdapter(machine(8, cores=4, quota=2.0)).validate_configuration(
        {"threads": 64, "memory_limit_mb": 10**6, "pin_memory": True, "num_workers": 99}
    )
    assert result.is_valid
    assert result.corrections == {
        "threads": 2, "memory_limit_mb": 8192, "pin_memory": False, "num_workers": 8,
    }  # fmt: skip
    assert len(result.warnings) == 4
