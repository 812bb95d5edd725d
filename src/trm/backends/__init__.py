"""What carries out a training step; `base` says what that means, one package per framework does it."""
