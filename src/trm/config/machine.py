"""Settings of how this machine runs a recipe. None of them changes what is learned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from macbook_optimization.training_config_adapter import Checkpointing
from trm.config.values import Count, Positive, PositiveOrZero, Rate, Section


def _checkpointing(value: object) -> object:
    return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


class PlanSettings(Section):
    """Settings of how this machine runs a recipe. Null values are measured unless the key says otherwise."""

    backend: str = "pytorch"
    """Library that computes: `pytorch`, `mlx` (for Apple Silicon, an optional extra), or `auto` for the
    fastest of those that are installed and pass the check."""
    device: str = "cpu"
    """Device to compute on: `cpu`, the GPU of a Mac (`mps` with PyTorch, `gpu` with MLX), or `auto` for the
    fastest. All but PyTorch on the CPU are checked before a run, which uses the CPU if the check fails."""
    micro_batch_size: Count | None = None
    """Examples computed at a time."""
    threads: Count | None = None
    """CPU threads."""
    workers: Count | None = None
    """Worker threads that share the CPU threads; each takes examples through the whole model."""
    precision: Literal["float32", "bfloat16", "auto"] | None = None
    """Precision of activations; `auto` measures which is faster, null takes the recipe's."""
    gradient_checkpointing: Annotated[Checkpointing, BeforeValidator(_checkpointing)] | None = None
    """Layers that are recomputed in the backward pass to save memory: `none`, `alternate` or `all`."""
    allocator: Literal["system", "compact"] | None = None
    """`compact` returns freed memory to the system immediately (Linux)."""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is known, so that gradients take no memory (decoder). The
    whole batch is then one micro-batch; clipping and the moving average are excluded."""
    compile: bool | None = None
    """Compile one block of layers; null measures it in the background of a long run, and uses it if it is
    faster."""
    keep_awake: bool = False
    """Prevent the machine from sleeping while it trains (`caffeinate` on a Mac, `systemd-inhibit` on
    Linux)."""
    peer_timeout_seconds: Annotated[Positive, Field(le=86400)] = 60.0
    """Seconds without a sign of life until another machine counts as lost (`trm train --listen`). A machine
    that computes, evaluates or waits for disk space shows signs of life, for up to a day."""
    report: bool = True
    """Write `report.html` into the run when training ends by itself; pictures of answers are added after more
    than a minute of training."""
    profile: bool = False
    """Record a few steps once auto-tuning has finished (`trm train --profile`). This applies to one start:
    the recipe in the run directory has false."""


class LimitSettings(Section):
    """Limits on the use of the machine, and reactions to pressure, heat and batteries."""

    memory_limit_mb: Annotated[Positive, Field(le=2**30)] | None = None
    """Memory budget in MiB; null for a share of what is available."""
    memory_fraction: Annotated[Positive, Field(le=1)] = 0.8
    """Share of the available memory to use when there is no limit."""
    dynamic_batch_sizing: bool = True
    """Lower the micro-batch size under memory pressure."""
    memory_pressure_threshold: Annotated[Positive, Field(le=100)] = 90.0
    """Percentage of memory in use above which the micro-batch size is lowered."""
    garbage_collection_frequency: Count | None = None
    """Steps between garbage collections; null collects only when the micro-batch size is lowered."""
    low_battery_percent: Annotated[PositiveOrZero, Field(le=100)] = 10.0
    """Save a checkpoint when the battery falls below this percentage."""
    on_battery: Literal["continue", "slow", "pause"] = "continue"
    """Without mains power: `continue`, `slow` (compute for a share of the time and sleep for the rest), or
    `pause` (save, and wait until mains power is back)."""
    on_battery_factor: Rate = 0.5
    """Share of the time that `on_battery: slow` computes."""
    enable_thermal_monitoring: bool = True
    """Pause briefly when the machine is too hot."""
    thermal_throttle_threshold: Annotated[Positive, Field(le=150)] | None = None
    """Temperature in degrees Celsius that counts as too hot, as throttling that the system reports always
    does."""
    cooling_delay_seconds: Annotated[PositiveOrZero, Field(le=3600)] = 3.0
    """Length of such a pause in seconds."""
    thermal_batch_reduction: bool = True
    """Compute for only a share of the time while the machine is too hot, and sleep for the rest. The batch
    stays as it is: a smaller one keeps the cores as busy, so it does not cool."""
    thermal_batch_reduction_factor: Rate = 0.75
    """That share; it is applied again every minute while the machine is too hot, down to a quarter of the
    time, and taken back step by step after five minutes without heat."""
