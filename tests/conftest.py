"""Settings of the whole suite."""

import os
import signal
import tempfile

import pytest
import torch
from hypothesis import settings

# A cache of its own, so that the suite neither reads nor changes the measurements of the user.
os.environ["TRM_CACHE_DIR"] = tempfile.mkdtemp(prefix="trm-tests-")

# The background job of a script inherits SIGINT as ignored, and under nohup SIGHUP, too; so would every
# command that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine exceeds deadlines now and then, and examples must be the same in every run.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# Tiny models gain nothing from threads, and with one thread results are reproducible bit for bit.
torch.set_num_threads(1)


@pytest.fixture
def float64():
    """Compute in float64, where rounding is too small to explain a difference."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
