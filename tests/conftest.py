"""Settings of the whole suite."""

import torch
from hypothesis import settings

# A busy machine is slow now and then, which is no failure; and runs are to repeat.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")

# Tiny models gain nothing from threads, and one thread repeats bit for bit.
torch.set_num_threads(1)
