"""Compare a training step with the reference: `python bench/against_reference.py --reference DIR`.

DIR is a checkout of SamsungSAILMontreal/TinyRecursiveModels, the reference implementation; nothing of it is
in this project. Its model needs the package einops. Its own optimizer needs CUDA, so both use AdamW here.
Weights, batches and settings are the same, and the losses of every step must agree.

Each configuration runs in a process of its own, in the environment that it would have: ours gets what
`trm train` sets. Configurations take turns step by step, so a disturbance affects all of them. Results are
medians, with the spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from reference_model import MLP_MIXER, WEIGHT_DECAY, Case, attention, reference_network, reference_tensors

from macbook_optimization.cpu_optimization import environment, time_products
from macbook_optimization.memory_management import peak_bytes
from macbook_optimization.units import MIB
from trm.backends.base import Learner, SingleProcess, StepSettings, load_backend
from trm.backends.sizes import flops_per_sample
from trm.batch import Batch
from trm.machine.benchmark import random_batch
from trm.plan import Execution

LEARNING_RATE = 1e-4
EMBEDDING_LEARNING_RATE = 1e-2
SEARCH_ROUNDS = 3
CASES = {
    "i": Case("Sudoku, paper, MLP mixer, batch 32", 32, 81, 11, MLP_MIXER),
    "ii": Case("Sudoku, paper, attention, batch 32", 32, 81, 11, attention(512, 3, 6)),
    "iii": Case("length 900, attention, batch 2, H3 L4", 2, 900, 6, attention(512, 3, 4)),
    "iv": Case("hidden 384, length 512, batch 4, H2 L3", 4, 512, 11, attention(384, 2, 3)),
}
CONFIGURATIONS = {  # with the arguments of their processes
    "reference, eager": [],
    "reference, compiled": ["--compiled"],
    "ours": [],
    "ours, compiled": ["--compiled"],
    "ours, one micro-batch": ["--micro-batch", "whole"],
    "ours, checkpointing": ["--micro-batch", "whole", "--checkpointing", "all"],
    "ours, least memory": ["--micro-batch", "single", "--checkpointing", "all"],
}


def reference_steps(case: Case, directory: Path, threads: int, compiled: bool) -> Iterator[float]:
    """Yield the loss of one step of the reference implementation after the other."""
    import torch

    network = reference_network(case, directory)
    from models.ema import EMAHelper  # type: ignore[import-not-found]
    from models.sparse_embedding import (  # type: ignore[import-not-found]
        CastedSparseEmbeddingSignSGD_Distributed,
    )

    torch.set_num_threads(threads)
    if compiled:
        network = torch.compile(network)
    optimizers = [
        CastedSparseEmbeddingSignSGD_Distributed(
            network.model.puzzle_emb.buffers(),
            world_size=1,
            lr=EMBEDDING_LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
        ),
        torch.optim.AdamW(
            network.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
        ),
    ]
    average = EMAHelper(0.999)
    average.register(network)
    tensors = reference_tensors(random_batch(case.batch_size, case.program.data))
    carry = network.initial_carry(tensors)
    while True:
        carry, loss, _, _, _ = network(carry=carry, batch=tensors, return_keys=[])
        (loss / case.batch_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average.update(network)
        yield loss.item() / case.batch_size


def our_steps(case: Case, execution: Execution, micro_batch: str, compiled: bool) -> Iterator[float]:
    """Yield the loss of one of our steps after the other.

    `micro_batch` is "whole", "single" or "fastest": the best of a few sizes, as a plan would choose it.
    """
    backend = load_backend(execution)
    backend.prepare(execution)
    program = case.program
    world = SingleProcess(program.num_slots)
    batch = random_batch(case.batch_size, program.data)
    sizes = {"whole": case.batch_size, "single": 1}
    size = sizes.get(micro_batch)
    if size is None:
        size = fastest_size(backend.learner(program, execution, world), case, batch, execution.workers)
    learner = backend.learner(program, execution, world)
    if compiled:
        learner.reconfigure(replace(execution, compiled_size=size))
    step = 0
    while True:
        step += 1
        settings = StepSettings(step, case.model.H_cycles, LEARNING_RATE, EMBEDDING_LEARNING_RATE)
        yield learner.step(batch, settings, partial(_always, size)).loss
        batch = replace(batch, fresh=np.zeros_like(batch.fresh))


def _always(size: int, done: int) -> int:
    return size


def fastest_size(learner: Learner, case: Case, batch: Batch, workers: int) -> int:
    """Return the fastest micro-batch size: the best of a few rounds, as noise only ever slows a step."""
    candidates: list[int] = [workers * 2**i for i in range(5)]
    sizes = [size for size in candidates if size <= case.batch_size] or [case.batch_size]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    settings = StepSettings(1, case.model.H_cycles, 0.0, 0.0)
    for _ in range(SEARCH_ROUNDS):
        for size in sizes:
            part = batch[: max(size, min(8, case.batch_size))]
            started = time.perf_counter()
            learner.step(part, settings, partial(_always, size))
            seconds[size].append((time.perf_counter() - started) / len(part))
    return min(sizes, key=lambda size: min(seconds[size]))


def serve(arguments: argparse.Namespace) -> None:
    """Run one configuration: take a step per line of input, and write its result as a line of JSON."""
    case = CASES[arguments.cases]
    threads = arguments.threads
    if arguments.configuration.startswith("reference"):
        steps = reference_steps(case, arguments.reference, threads, arguments.compiled)
    else:
        workers = threads if arguments.micro_batch == "fastest" else 1
        execution = Execution(threads, workers, gradient_checkpointing=arguments.checkpointing)
        steps = our_steps(case, execution, arguments.micro_batch, arguments.compiled)
    for line in sys.stdin:
        if line.strip() == "peak":
            result = {"flops_per_second": time_products("float32", [threads], (1024, 1024, 1024))[threads]}
        else:
            started = time.perf_counter()
            loss = next(steps)
            result = {"loss": loss, "seconds": time.perf_counter() - started, "peak_bytes": peak_bytes()}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


class ConfigurationProcess:
    """The process of one configuration, and the results of its steps."""

    def __init__(self, name: str, arguments: argparse.Namespace, case: str) -> None:
        self.name = name
        command = [sys.executable, "-W", "ignore", __file__, "--configuration", name, "--cases", case]
        command += ["--reference", str(arguments.reference), "--threads", str(arguments.threads)]
        command += CONFIGURATIONS[name]
        variables = environment(arguments.threads) if name.startswith("ours") else {}
        self.process = subprocess.Popen(
            command, env={**os.environ, **variables}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.steps: list[dict[str, float]] = []

    def request(self, what: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}")
        result: dict[str, float] = json.loads(line)
        return result

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(key: str, arguments: argparse.Namespace) -> dict[str, Any]:
    case = CASES[key]
    processes = [
        ConfigurationProcess(name, arguments, key)
        for name in CONFIGURATIONS
        if name in arguments.configurations
    ]
    peaks = []
    for repeat in range(arguments.repeats + 1):
        for process in processes:
            sys.stderr.write(f"\r{key}: {process.name}, repeat {repeat} of {arguments.repeats}" + " " * 20)
            process.steps.append(process.request("step"))
        peaks.append(processes[-1].request("peak")["flops_per_second"])
    for process in processes:
        process.close()
    sys.stderr.write("\n")
    flops = case.batch_size * flops_per_sample(case.model, case.program.data)
    rows = {}
    for process in processes:
        seconds = [step["seconds"] for step in process.steps[1:]]  # the first one warms up, or compiles
        rows[process.name] = {
            "first_step_seconds": process.steps[0]["seconds"],
            "seconds": seconds,
            "peak_share": flops / statistics.median(seconds) / statistics.median(peaks),
            "peak_mib": process.steps[-1]["peak_bytes"] / MIB,
            "losses": [step["loss"] for step in process.steps],
        }
    return {"case": {**asdict(case), "model": case.model.model_dump()}, "peak": peaks, "rows": rows}


def format_table(key: str, found: dict[str, Any]) -> str:
    """Return a table; the two ratios are speed-ups over the reference implementation."""
    rows = found["rows"]
    medians = {name: statistics.median(row["seconds"]) for name, row in rows.items()}
    losses = np.array([row["losses"] for row in rows.values()])
    difference = float(np.abs(losses - losses[0]).max())
    lines = [
        f"({key}) {found['case']['name']}; losses differ by at most {difference:.1e}; "
        f"peak {statistics.median(found['peak']) / 1e9:.0f} GFLOP/s",
        f"{'':22}{'s/step':>9}{'spread':>16}{'x eager':>9}{'x compiled':>11}"
        f"{'of peak':>9}{'MiB':>8}{'first':>8}",
    ]
    for name, row in rows.items():
        ratios = [
            f"{medians[base] / medians[name]:.2f}" if base in medians else ""
            for base in ("reference, eager", "reference, compiled")
        ]
        spread = f"{min(row['seconds']):.2f} to {max(row['seconds']):.2f}"
        lines.append(
            f"{name:22}{medians[name]:9.2f}{spread:>16}{ratios[0]:>9}{ratios[1]:>11}"
            f"{row['peak_share']:9.0%}{row['peak_mib']:8.0f}{row['first_step_seconds']:7.1f}s"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--reference", type=Path, required=True, help="checkout of the reference implementation"
    )
    parser.add_argument("--cases", default=",".join(CASES), help="(default: all, i,ii,iii,iv)")
    parser.add_argument(
        "--configurations",
        default=";".join(CONFIGURATIONS),
        help="separated by semicolons (default: all): " + "; ".join(CONFIGURATIONS),
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed steps (default: 5)")
    parser.add_argument(
        "--threads",
        type=int,
        default=psutil.cpu_count(logical=False) or 1,
        help="CPU threads (default: one per core)",
    )
    parser.add_argument("--out", type=Path, help="file to write all measurements to, as JSON")
    parser.add_argument("--configuration", help=argparse.SUPPRESS)  # this process runs it
    parser.add_argument("--micro-batch", default="fastest", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.configuration:
        serve(arguments)
        return
    arguments.configurations = [name.strip() for name in arguments.configurations.split(";")]
    found = {}
    for key in arguments.cases.split(","):
        found[key] = compare(key, arguments)
        sys.stdout.write(format_table(key, found[key]) + "\n\n")
        sys.stdout.flush()
        if arguments.out:
            arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
