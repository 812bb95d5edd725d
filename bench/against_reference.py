"""A training step against the public code: `python bench/against_reference.py --reference DIR`.

DIR is a checkout of SamsungSAILMontreal/TinyRecursiveModels; nothing of it is in this project. Its model
needs the package einops. Its own optimizer needs CUDA, so both sides use AdamW here; weights, batches and
settings are the same, and the losses of every step must agree.

Every side is a process of its own, in the environment that it would have: ours gets what `trm train` sets.
They take turns, step by step, so that a noisy machine is noisy for all. Medians, with the spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from macbook_optimization.cpu_optimization import environment, time_products
from macbook_optimization.memory_management import MIB, peak_bytes
from trm.backends.base import Learner, StepBatch, StepSettings
from trm.config import ModelConfig, TrainingConfig
from trm.tasks.base import TaskShape
from trm.training.benchmark import operations_per_sample, random_batch

RATE, DECAY, EMBEDDING_RATE = 1e-4, 0.1, 1e-2


@dataclass(frozen=True, slots=True)
class Shape:
    what: str
    batch: int
    length: int
    vocabulary: int
    model: ModelConfig

    @property
    def task(self) -> TaskShape:
        size = self.vocabulary
        return TaskShape(self.length, size, size, num_puzzle_identifiers=2)

    @property
    def training(self) -> TrainingConfig:
        return TrainingConfig(
            effective_batch_size=self.batch,
            optimizer="adamw",
            weight_decay=DECAY,
            puzzle_emb_weight_decay=DECAY,
        )


def attention(hidden_size: int, H_cycles: int, L_cycles: int) -> ModelConfig:
    return ModelConfig(
        hidden_size=hidden_size, H_cycles=H_cycles, L_cycles=L_cycles, puzzle_emb_ndim=hidden_size
    )


MIXER = attention(512, 3, 6).model_copy(update={"mlp_t": True, "pos_encodings": "none"})
SHAPES = {
    "i": Shape("Sudoku, paper, mixer, batch 32", 32, 81, 11, MIXER),
    "ii": Shape("Sudoku, paper, attention, batch 32", 32, 81, 11, attention(512, 3, 6)),
    "iii": Shape("length 900, attention, batch 2, H3 L4", 2, 900, 6, attention(512, 3, 4)),
    "iv": Shape("hidden 384, length 512, batch 4, H2 L3", 4, 512, 11, attention(384, 2, 3)),
}
SIDES = {
    "reference, eager": [],
    "reference, compiled": ["--compiled"],
    "ours": [],
    "ours, compiled": ["--compiled"],
    "ours, one cut": ["--cut", "whole"],
    "ours, checkpointing": ["--cut", "whole", "--checkpointing", "all"],
    "ours, smallest": ["--cut", "single", "--checkpointing", "all"],
}


def reference_network(shape: Shape, directory: Path) -> Any:
    """The public model with our weights, inside its loss."""
    sys.path.insert(0, str(directory))
    from models.losses import ACTLossHead  # type: ignore[import-not-found]
    from models.recursive_reasoning.trm import (  # type: ignore[import-not-found]
        TinyRecursiveReasoningModel_ACTV1,
    )

    from trm.backends.pytorch.exchange import to_reference
    from trm.backends.pytorch.model import TinyRecursiveModel

    model, task = shape.model, shape.task
    names = (
        "hidden_size H_cycles L_cycles L_layers H_layers num_heads expansion mlp_t pos_encodings "
        "forward_dtype halt_max_steps puzzle_emb_ndim puzzle_emb_len"
    )
    settings = {name: getattr(model, name) for name in names.split()} | {
        "batch_size": shape.batch,
        "seq_len": task.seq_len,
        "vocab_size": task.vocab_size,
        "num_puzzle_identifiers": task.num_puzzle_identifiers,
        "halt_exploration_prob": 0.0,
    }
    network = ACTLossHead(TinyRecursiveReasoningModel_ACTV1(settings), "stablemax_cross_entropy")
    network.load_state_dict(to_reference(TinyRecursiveModel(model, task).state_dict(), model, compiled=False))
    return network


def reference_steps(shape: Shape, directory: Path, threads: int, compiled: bool) -> Any:
    """A generator: each `next` is a step of the public code, and gives its loss."""
    import torch

    network = reference_network(shape, directory)
    from models.ema import EMAHelper  # type: ignore[import-not-found]
    from models.sparse_embedding import (  # type: ignore[import-not-found]
        CastedSparseEmbeddingSignSGD_Distributed,
    )

    torch.set_num_threads(threads)
    if compiled:
        network = torch.compile(network)
    optimizers = [
        CastedSparseEmbeddingSignSGD_Distributed(
            network.model.puzzle_emb.buffers(), world_size=1, lr=EMBEDDING_RATE, weight_decay=DECAY
        ),
        torch.optim.AdamW(network.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY),
    ]
    average = EMAHelper(0.999)
    average.register(network)
    batch = random_batch(shape.batch, shape.task)
    tensors = {
        "inputs": torch.from_numpy(batch.inputs),
        "labels": torch.from_numpy(batch.labels),
        "puzzle_identifiers": torch.from_numpy(batch.puzzle_identifiers),
    }
    carry = network.initial_carry(tensors)
    while True:
        carry, loss, _, _, _ = network(carry=carry, batch=tensors, return_keys=[])
        (loss / shape.batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average.update(network)
        yield loss.item() / shape.batch


def our_steps(shape: Shape, threads: int, cut: str, checkpointing: str, compiled: bool) -> Any:
    """The same of ours, with the fastest of a few cuts, as the plan would have it, in one cut, or one slot at
    a time."""
    from trm.backends.base import load_backend

    backend = load_backend()
    backend.prepare(threads=threads, deterministic=False)
    lanes = threads if cut == "fastest" else 1

    def learner() -> Learner:
        return backend.learner(shape.model, shape.training, shape.task, 0, checkpointing, lanes)  # type: ignore[arg-type]

    batch = random_batch(shape.batch, shape.task)
    sizes = {"whole": shape.batch, "single": 1}
    size = sizes.get(cut) or fastest_cut(learner(), shape, batch, lanes)
    ours = learner()
    if compiled:
        ours.compile(size)
    fresh = batch.fresh
    for step in range(1, 10_000):
        now = StepBatch(batch.inputs, batch.labels, batch.puzzle_identifiers, fresh)
        settings = StepSettings(step, shape.model.H_cycles, RATE, EMBEDDING_RATE)
        yield ours.step(now, settings, lambda done: size).loss
        fresh = np.zeros_like(fresh)


def fastest_cut(learner: Learner, shape: Shape, batch: StepBatch, lanes: int) -> int:
    """The best of a few rounds each, interleaved: noise only ever makes a step slower."""
    sizes = [lanes * 2**i for i in range(5) if lanes * 2**i <= shape.batch] or [shape.batch]
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(3):
        for size, times in seconds.items():
            part = batch.first(max(size, min(8, shape.batch)))
            started = time.perf_counter()
            learner.step(part, StepSettings(1, shape.model.H_cycles, 0.0, 0.0), lambda done, n=size: n)  # type: ignore[misc]
            times.append((time.perf_counter() - started) / len(part.inputs))
    return min(seconds, key=lambda size: min(seconds[size]))


def work(arguments: argparse.Namespace) -> None:
    """The body of a side: one line in, one step, one line out."""
    shape, threads = SHAPES[arguments.shapes], arguments.threads
    if arguments.side.startswith("reference"):
        steps = reference_steps(shape, arguments.reference, threads, arguments.compiled)
    else:
        steps = our_steps(shape, threads, arguments.cut, arguments.checkpointing, arguments.compiled)
    for line in sys.stdin:
        if line.strip() == "peak":
            rate = time_products("float32", [threads], (1024, 1024, 1024))[threads]
            answer = {"operations_per_second": rate}
        else:
            started = time.perf_counter()
            answer = {"loss": next(steps), "seconds": time.perf_counter() - started, "peak": peak_bytes()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


class Side:
    def __init__(self, name: str, arguments: argparse.Namespace, shape: str) -> None:
        self.name = name
        command = [sys.executable, "-W", "ignore", __file__, "--side", name, "--shapes", shape, *SIDES[name]]
        command += ["--reference", str(arguments.reference), "--threads", str(arguments.threads)]
        ours = environment(arguments.threads) if name.startswith("ours") else {}
        self.process = subprocess.Popen(
            command, env={**os.environ, **ours}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.steps: list[dict[str, float]] = []

    def ask(self, what: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died with exit code {self.process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(key: str, arguments: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[key]
    sides = [Side(name, arguments, key) for name in SIDES if name in arguments.sides]
    peaks = []
    for repeat in range(arguments.repeats + 1):
        for side in sides:
            sys.stderr.write(f"\r{key}: {side.name}, repeat {repeat} of {arguments.repeats}" + " " * 20)
            side.steps.append(side.ask("step"))
        peaks.append(sides[-1].ask("peak")["operations_per_second"])
    for side in sides:
        side.end()
    sys.stderr.write("\n")
    peak = statistics.median(peaks)
    operations = shape.batch * operations_per_sample(shape.model, shape.length)
    rows = {}
    for side in sides:
        seconds = [step["seconds"] for step in side.steps[1:]]  # the first one warms up, or compiles
        rows[side.name] = {
            "first_step_seconds": side.steps[0]["seconds"],
            "seconds": seconds,
            "peak_share": operations / statistics.median(seconds) / peak,
            "peak_mib": side.steps[-1]["peak"] / MIB,
            "losses": [step["loss"] for step in side.steps],
        }
    return {"shape": {**asdict(shape), "model": shape.model.model_dump()}, "peak": peaks, "sides": rows}


def show(key: str, found: dict[str, Any]) -> list[str]:
    """A table; the ratios are to the reference, more is faster."""
    rows = found["sides"]
    medians = {name: statistics.median(row["seconds"]) for name, row in rows.items()}
    losses = np.array([row["losses"] for row in rows.values()])
    differ = float(np.abs(losses - losses[0]).max())
    lines = [
        f"({key}) {found['shape']['what']}; losses differ by {differ:.1e} at most; "
        f"peak {statistics.median(found['peak']) / 1e9:.0f} GFLOP/s",
        f"{'':22}{'s a step':>9}{'spread':>16}{'x eager':>9}{'x compiled':>11}"
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
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--reference", type=Path, required=True, help="a checkout of the public code")
    parser.add_argument("--shapes", default="i,ii,iii,iv")
    parser.add_argument("--sides", default=";".join(SIDES), help="of: " + "; ".join(SIDES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--out", type=Path, help="also write everything as JSON")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--cut", default="fastest", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        work(arguments)
        return
    arguments.sides = [name.strip() for name in arguments.sides.split(";")]
    found = {}
    for key in arguments.shapes.split(","):
        found[key] = compare(key, arguments)
        sys.stdout.write("\n".join(show(key, found[key])) + "\n\n")
        sys.stdout.flush()
        if arguments.out:
            arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
