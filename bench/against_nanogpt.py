"""Compare a small decoder with nanoGPT: `python bench/against_nanogpt.py --nanogpt DIR --text FILE`.

DIR is a checkout of karpathy/nanoGPT, of which nothing is in this project; FILE is a text such as
tinyshakespeare. Both train at nanoGPT's setting for a CPU: 4 layers, 4 heads, width 128, context 64, batch
12, no dropout, eager. A step is all that training repeats: reading the batch, forward, backward, clipping,
update and the loss as a number. Ours includes the order of the data and the slots, too.

Each configuration runs in a process of its own, in the environment that it would have, and they take turns of
a few steps, so that a disturbance affects all of them. Results are medians of the turns, with the spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from macbook_optimization.cpu_optimization import environment
from trm.backends.base import Program, SingleProcess, load_backend
from trm.config import load_config
from trm.feed import Feed
from trm.plan import Execution, Plan
from trm.tasks.dataset import complete_spec, open_split
from trm.tasks.documents.text import TASK
from trm.training.state import TrainingState

CONTEXT = 64
BATCH = 12
TOKENS = CONTEXT * BATCH
WARMUP_STEPS = 20


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    is_ours: bool
    threads: int
    workers: int = 1
    kv_heads: int = 4

    @property
    def variables(self) -> dict[str, str]:
        return environment(self.threads) if self.is_ours else {"OMP_NUM_THREADS": str(self.threads)}


def sides(threads: int) -> list[Side]:
    """Return what is compared with a number of threads; `trm train` uses the fastest number of workers."""
    found = [Side("nanoGPT", False, threads)]
    for workers in sorted({1, threads}):
        how = "" if workers == 1 else f", {workers} workers"
        found.append(Side(f"text-char{how}", True, threads, workers, kv_heads=2))
        found.append(Side(f"with 4 key/value heads{how}", True, threads, workers))
    return found


Step = Callable[[], float]  # returns the loss


def our_step(dataset: Path, side: Side) -> tuple[Step, int]:
    config = load_config("text-char", [f"data.path={dataset}", f"model.num_kv_heads={side.kv_heads}"])
    split = open_split(dataset, "train")
    execution = Execution(side.threads, side.workers)
    backend = load_backend(execution)
    backend.prepare(execution)
    program = Program.of(config, complete_spec(TASK, split))
    world = SingleProcess(BATCH)
    make = partial(backend.learner, program, execution, world)
    state = TrainingState(config, Plan.of(execution, BATCH, BATCH), Feed(config, TASK, split), world, make)
    size = sum(each.size for each in map(np.asarray, state.learner.state()["weights"].values()))
    return (lambda: state.advance(lambda done: BATCH)[1].loss), size


def nanogpt_step(directory: Path, tokens: Path, side: Side) -> tuple[Step, int]:
    """Return a step with nanoGPT's model and its optimizer, as its README trains them on a CPU."""
    import torch

    sys.path.insert(0, str(directory))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.set_num_threads(side.threads)
    data = np.memmap(tokens, dtype=np.uint16, mode="r")
    vocabulary = int(data.max()) + 1
    model = GPT(GPTConfig(CONTEXT, vocabulary, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")

    def windows(starts: list[int], shift: int) -> torch.Tensor:
        rows = [data[start + shift : start + shift + CONTEXT].astype(np.int64) for start in starts]
        return torch.stack([torch.from_numpy(row) for row in rows])

    def step() -> float:
        starts = torch.randint(len(data) - CONTEXT, (BATCH,)).tolist()
        _, loss = model(windows(starts, 0), windows(starts, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)

    return step, sum(each.numel() for each in model.parameters())


def serve(arguments: argparse.Namespace) -> None:
    """Run one configuration: take as many steps as a line of input says, and write what they took."""
    side = Side(**json.loads(arguments.side))
    make = partial(our_step, arguments.data) if side.is_ours else partial(nanogpt_step, arguments.nanogpt)
    output = os.dup(1)
    os.dup2(2, 1)  # nanoGPT prints
    step, size = make(side) if side.is_ours else make(arguments.data / "tokens.bin", side)
    for line in sys.stdin:
        cpu, started = time.process_time(), time.perf_counter()
        for _ in range(int(line)):
            loss = step()
        seconds = time.perf_counter() - started
        result = {"seconds": seconds, "cpu": time.process_time() - cpu, "loss": loss, "size": size}
        os.write(output, (json.dumps(result) + "\n").encode())


class SideProcess:
    """The process of one configuration, and the results of its turns."""

    def __init__(self, side: Side, arguments: argparse.Namespace, data: Path) -> None:
        self.side = side
        ours = dict(each.split("=", 1) for each in arguments.setting) if side.is_ours else {}
        facts = {name: getattr(side, name) for name in Side.__slots__}
        command = [sys.executable, "-W", "ignore", __file__, "--nanogpt", str(arguments.nanogpt)]
        command += ["--data", str(data), "--side", json.dumps(facts)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **side.variables, **ours},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not side.is_ours else None,
        )
        self.turns: list[dict[str, float]] = []

    def take(self, steps: int) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.side.name} ended with exit code {self.process.wait()}")
        result: dict[str, float] = json.loads(line)
        return result

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(threads: int, arguments: argparse.Namespace, data: Path) -> list[str]:
    """Return a table of all configurations with a number of threads."""
    processes = [SideProcess(side, arguments, data) for side in sides(threads)]
    try:
        for process in processes:
            process.take(WARMUP_STEPS)
        for turn in range(arguments.turns):
            sys.stderr.write(f"\r{threads} threads, turn {turn + 1} of {arguments.turns} ")
            order = processes if turn % 2 else processes[::-1]
            for process in order:
                process.turns.append(process.take(arguments.steps))
    finally:
        for process in processes:
            process.close()
    sys.stderr.write("\n")
    return [f"{threads} threads", *(row_of(process, processes[0], arguments.steps) for process in processes)]


def row_of(process: SideProcess, other: SideProcess, steps: int) -> str:
    rates = [TOKENS * steps / turn["seconds"] for turn in process.turns]
    pairs = list(zip(process.turns, other.turns, strict=True))
    ratio = statistics.median(theirs["seconds"] / ours["seconds"] for ours, theirs in pairs)
    cpu_ratio = statistics.median(theirs["cpu"] / ours["cpu"] for ours, theirs in pairs)
    return (
        f"  {process.side.name:34} {process.turns[0]['size'] / 1e6:.3f}M  "
        f"{statistics.median(rates):7.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f})  "
        f"{ratio:.3f} of nanoGPT's, {cpu_ratio:.3f} per CPU second"
    )


def write_data(text: Path, directory: Path) -> None:
    """Write the training text for both: as windows, and as the file of tokens that nanoGPT reads."""
    options = {"from": [str(text)], "tokenizer": "char", "context": CONTEXT}
    TASK.build(options, directory, lambda what, done, total: None)
    whole = text.read_text(encoding="utf-8")
    TASK.tokenizer(directory).encode(whole[: int(0.9 * len(whole))]).astype(np.uint16).tofile(
        directory / "tokens.bin"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="checkout of nanoGPT")
    parser.add_argument("--text", type=Path, help="text to train on")
    parser.add_argument("--threads", default="1,2", help="thread counts to compare with (default: 1,2)")
    parser.add_argument("--turns", type=int, default=15, help="turns of each configuration (default: 15)")
    parser.add_argument("--steps", type=int, default=20, help="steps per turn (default: 20)")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="environment variable for ours"
    )
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)  # this process runs it
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments)
        return
    if arguments.text is None:
        parser.error("--text FILE is missing")
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        write_data(arguments.text, data)
        for threads in map(int, arguments.threads.split(",")):
            sys.stdout.write("\n".join(compare(threads, arguments, data)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
