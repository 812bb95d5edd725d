"""Settings of the whole suite."""

import os
import tempfile

import pytest
import torch
from hypothesis import settings

# One place for measurements of this suite, so that it neither uses nor touches the user's.
os.environ["TRM_CACHE_DIR"] = tempfile.mkdtemp(prefix="trm-tests-")

# A busy machine is slow now and then, which is no failure; and runs are to repeat.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# Tiny models gain nothing from threads, and one thread repeats bit for bit.
torch.set_num_threads(1)


@pytest.fixture
def float64():
    """Nearly without rounding, so that what differs is a mistake."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
