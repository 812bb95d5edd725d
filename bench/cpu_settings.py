"""Measure how each process setting affects a training step: `python bench/cpu_settings.py [RECIPE]`.

Every variant runs in a new process, because most settings must be set before torch is loaded. The variants
take turns over five rounds. The speed is the ratio of medians; the spread is that of single processes.
"""

import json
import os
import statistics
import subprocess
import sys

import torch
from training_step import recipe_learner, seconds_of_step

from macbook_optimization.cpu_optimization import settings_before_torch
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.memory_management import peak_bytes
from macbook_optimization.units import MIB
from trm.config import load_config
from trm.plan import Execution

ROUNDS = 5
WARM_UP_STEPS = 5
TIMED_STEPS = 20
MICRO_BATCH_SIZE = 32
NAMES = {setting.name for compact in (False, True) for setting in settings_before_torch(1, compact=compact)}
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "as set by trm train": {"ALL": "1"},
    "GOMP_SPINCOUNT": {"GOMP_SPINCOUNT": "2000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "MALLOC_ARENA_MAX=1": {"MALLOC_ARENA_MAX": "1"},
    "memory kept": {"MALLOC_TRIM_THRESHOLD_": str(128 * MIB), "MALLOC_MMAP_THRESHOLD_": str(32 * MIB)},
    "compact allocator": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    "interop threads 1": {"BENCH_INTEROP": "1"},
    "flush denormals": {"BENCH_FLUSH": "1"},
    "without oneDNN": {"BENCH_NO_ONEDNN": "1"},
}


def measure_this_process(recipe: str) -> None:
    """Take steps with the settings of this process and print the result as JSON."""
    if "BENCH_INTEROP" in os.environ:
        torch.set_num_interop_threads(1)
    torch.set_flush_denormal("BENCH_FLUSH" in os.environ)
    if "BENCH_NO_ONEDNN" in os.environ:
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    config = load_config(recipe)
    threads = HardwareDetector().detect_cpu_specs().compute_threads
    learner, batch = recipe_learner(config, Execution(threads=threads))
    cycles = max(config.training.depths.values())
    size = min(len(batch), MICRO_BATCH_SIZE)
    times = [seconds_of_step(learner, batch, cycles, size) for _ in range(WARM_UP_STEPS + TIMED_STEPS)]
    result = {"ms": 1000 * statistics.median(times[WARM_UP_STEPS:]), "peak_mib": peak_bytes() / MIB}
    sys.stdout.write(json.dumps(result))


def measure_variant(variables: dict[str, str], recipe: str) -> dict[str, float]:
    """Start a process with these variables, and with no other setting of ours."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    if "ALL" in variables:
        threads = HardwareDetector().detect_cpu_specs().compute_threads
        variables = {s.name: s.value for s in settings_before_torch(threads) if s.value is not None}
    command = [sys.executable, __file__, "--variant", recipe]
    result: dict[str, float] = json.loads(subprocess.check_output(command, env={**clean, **variables}))
    return result


def main(recipe: str) -> None:
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for start in range(ROUNDS):  # each round starts with a different variant, so none is always the last
        for name in names[2 * start :] + names[: 2 * start]:
            measured[name].append(measure_variant(VARIANTS[name], recipe))
    default = statistics.median(result["ms"] for result in measured["default"])
    for name, results in measured.items():
        times = sorted(result["ms"] for result in results)
        median = statistics.median(times)
        peak = statistics.median(result["peak_mib"] for result in results)
        sys.stdout.write(
            f"{name:26} {median:6.1f} ms per step ({times[0]:.1f} to {times[-1]:.1f}), "
            f"speed {default / median:.2f}, peak {peak:.0f} MiB\n"
        )


if __name__ == "__main__":
    if "--variant" in sys.argv:
        measure_this_process(sys.argv[-1])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "sudoku-6x6")
