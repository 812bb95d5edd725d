"""The FLOPs of a step, against a plain count and against torch's own."""

import pytest
import torch
from tiny import model_config
from torch.utils.flop_counter import FlopCounterMode

from macbook_optimization.training_config_adapter import PROFILES
from trm.backends.pytorch.model import TinyRecursiveModel
from trm.backends.sizes import flops_per_sample
from trm.config import ModelConfig
from trm.tasks.base import DataSpec


def product(rows, inner, columns):
    return sum(2 for _ in range(rows) for _ in range(columns) for _ in range(inner))


def test_flops_are_those_of_a_plain_count():
    """The inner width is 8: 1.5 * 8 * 2 / 3, which is a multiple of 4 already."""
    L, D, inner, layers = 5, 8, 8, 2
    layer = product(L, D, 3 * D) + product(L, D, L) + product(L, L, D) + product(L, D, D)
    layer += product(L, D, 2 * inner) + product(L, inner, D)
    count = 0
    for cycle in range(2):  # H_cycles
        for _ in range(3):  # L_cycles for the latent, one for the answer
            count += layers * layer * (3 if cycle == 1 else 1)  # forward, and twice as much backward
    assert flops_per_sample(model_config(), DataSpec(L, 6, 6)) == count


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_flops_are_those_that_torch_counts(profile):
    """The model is as wide as the profile's. Torch does not count the two products inside attention."""
    length = 24
    width = {name: getattr(profile, name) for name in ("hidden_size", "num_heads", "L_layers")}
    config = ModelConfig(**width, expansion=profile.expansion, H_cycles=2, L_cycles=1)
    data = DataSpec(length, 16, 16)
    model = TinyRecursiveModel(config, data)
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, length, dtype=torch.long), None, model.start(1), cycles=2).sum().backward()
    counted = counter.get_flop_counts()["Global"]
    matrices = sum(count for name, count in counted.items() if "attention" not in str(name))
    inside = 2 * product(1, length * length, config.hidden_size) * config.L_layers
    block_passes = 2 * (1 + 3)
    assert flops_per_sample(config, data) == matrices + inside * block_passes
