"""What each setting of the process does to a training step: `python bench/cpu_settings.py [RECIPE]`.

Every variant is a process of its own, because most settings must stand before torch is loaded. The variants
are interleaved over five rounds; the ratio is between medians, the spread that of single runs.
"""

import json
import os
import statistics
import subprocess
import sys

import torch
from training_step import seconds_of_step

from macbook_optimization.cpu_optimization import settings_before_torch
from macbook_optimization.hardware_detection import HardwareDetector
from macbook_optimization.memory_management import MIB, peak_bytes
from trm.backends.base import load_backend
from trm.config import load_config
from trm.tasks import load_task
from trm.training.benchmark import random_batch

ROUNDS = 5
NAMES = [setting.name for setting in settings_before_torch(1, compact=True)]
VARIANTS: dict[str, dict[str, str]] = {
    "plain": {},
    "as trm train sets it": {"ALL": "1"},
    "GOMP_SPINCOUNT": {"GOMP_SPINCOUNT": "2000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "MALLOC_ARENA_MAX=1": {"MALLOC_ARENA_MAX": "1"},
    "compact allocator": {"MALLOC_MMAP_THRESHOLD_": "65536"},
    "interop threads 1": {"BENCH_INTEROP": "1"},
    "flush denormals": {"BENCH_FLUSH": "1"},
    "without oneDNN": {"BENCH_NO_ONEDNN": "1"},
}


def one_variant(recipe: str) -> None:
    """The body of a process."""
    threads = HardwareDetector().detect_cpu_specs().compute_threads
    if "BENCH_INTEROP" in os.environ:
        torch.set_num_interop_threads(1)
    torch.set_flush_denormal("BENCH_FLUSH" in os.environ)
    if "BENCH_NO_ONEDNN" in os.environ:
        torch.backends.mkldnn.set_flags(False)
    config, backend = load_config(recipe), load_backend()
    backend.prepare(threads=threads, deterministic=False)
    shape = load_task(config.task).shape(config.data.build or {})
    learner = backend.learner(config.model, config.training, shape, config.seed)
    slots = config.training.effective_batch_size
    batch = random_batch(slots, shape)
    cycles = max(config.training.depths.values())
    times = [seconds_of_step(learner, batch, cycles, min(slots, 32)) for _ in range(25)][5:]
    result = {"ms": 1000 * statistics.median(times), "peak_mib": peak_bytes() / MIB}
    sys.stdout.write(json.dumps(result))


def measure(variables: dict[str, str], recipe: str) -> dict[str, float]:
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    if "ALL" in variables:
        threads = HardwareDetector().detect_cpu_specs().compute_threads
        variables = {s.name: s.value for s in settings_before_torch(threads) if s.value is not None}
    command = [sys.executable, __file__, "--variant", recipe]
    answer: dict[str, float] = json.loads(subprocess.check_output(command, env={**clean, **variables}))
    return answer


def main(recipe: str) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for start in range(ROUNDS):  # each round begins elsewhere, so that no variant is always the last
        for name in names[2 * start :] + names[: 2 * start]:
            found[name].append(measure(VARIANTS[name], recipe))
    for name, results in found.items():
        times = sorted(r["ms"] for r in results)
        median, plain = statistics.median(times), statistics.median(r["ms"] for r in found["plain"])
        sys.stdout.write(
            f"{name:26} {median:6.1f} ms a step ({times[0]:.1f} to {times[-1]:.1f}), "
            f"speed {plain / median:.2f}, peak {statistics.median(r['peak_mib'] for r in results):.0f} MiB\n"
        )


if __name__ == "__main__":
    if "--variant" in sys.argv:
        one_variant(sys.argv[-1])
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "sudoku-6x6")
