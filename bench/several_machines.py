"""Measure training by several machines: `python bench/several_machines.py processes|links|messages`.

`processes`: two `trm` processes of one thread each against one of two threads, in turns, on the same two
cores (Linux; elsewhere, use a machine that has two). The ratio is that of their samples per second, without
evaluations and saves.

`links`: two network namespaces and a cable of limited rate between them (root, ip and tc). Efficiency is
the share of the time in which the slowest machine computes; what `trm` predicts when the machines meet is
compared with what the rows of the run show afterwards.

`messages`: what `training.gradient_message` costs and saves. Two ranks, which are threads connected by gloo,
train from the same seed; bytes are those of one rank's messages per step.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trm.backends.base import EXCHANGE, Program, load_backend
from trm.backends.pytorch.world import GlooWorld, c10d, gloo_world
from trm.backends.world import Place
from trm.config import RunConfig, load_config
from trm.display import Silent
from trm.feed import Feed
from trm.plan import Execution, Plan
from trm.runs.directory import EVENTS, Run
from trm.runs.rows import Row
from trm.tasks.dataset import complete_spec
from trm.tasks.registry import load_task
from trm.training.preparation import build_if_missing
from trm.training.start import open_splits
from trm.training.state import TrainingState

TRM = Path(sys.executable).with_name("trm")
WITHOUT_EVALUATION = ("evaluation.every_steps=1000000", "evaluation.target_accuracy=null")
STEADY = (
    *WITHOUT_EVALUATION,
    "training.max_steps=1000000",
    "plan.report=false",
    "checkpoints.every_seconds=100000",
)
ON_EACH = ("plan.compile=false", "limits.dynamic_batch_sizing=false")  # a host does not send them to a guest
SAME_DEPTH = "training.depths={0: 2}"  # the same work in every step; text has no recursion
SIZE = ("plan.micro_batch_size=4",)  # nothing is tuned, and the slots are divided equally
LINK_RECIPE = (
    "sudoku-6x6",
    "model.mixer=mlp",
    "model.hidden_size=384",
    "training.effective_batch_size=32",
    "data.build={size: 6, blanks: 22, train: 500, test: 16}",
)
NAMESPACES = ("trm-bench-host", "trm-bench-guest")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
PATIENCE_SECONDS = 90.0


@dataclass
class Machines:
    """A host, perhaps a guest, and what the host records."""

    directory: Path
    address: str = "127.0.0.1"
    within: Sequence[Sequence[str]] = ((), ())  # the commands that run others there
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def run(self) -> Run:
        return Run(self.directory / "host" / "run")

    def start(self, recipe: Sequence[str], plan: Sequence[str], *, together: bool) -> None:
        listen = ("--listen", f"{self.address}:0") if together else ()
        self._command(0, ("train", *recipe, *ON_EACH, *plan, "--run", "run", *listen))
        if together:
            place = wait_for(self._place)
            self._command(1, ("join", place, *ON_EACH, *plan))

    def _command(self, machine: int, words: Sequence[str]) -> None:
        directory = self.directory / ("host", "guest")[machine]
        directory.mkdir(parents=True)
        log = self.stack.enter_context((directory / "log").open("wb"))
        command = (*self.within[machine], str(TRM), *words)
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
        self.stack.callback(_end, process)

    def _place(self) -> str | None:
        log = (self.directory / "host" / "log").read_text(errors="replace")
        _, found, rest = log.partition("trm join ")
        return rest.split()[0] if found and "\n" in rest else None

    def world(self, size: int) -> Row | None:
        """Return the event of the newest group of machines, if it has this size."""
        events = self.run.path / EVENTS
        rows = self.run.rows(EVENTS) if events.exists() else []
        formed = [row for row in rows if row["event"] == "machines"]
        return formed[-1] if formed and len(formed[-1]["machines"]) == size else None

    def measured(self, since: float, seconds: float) -> list[Row]:
        """Return the rows of this many seconds, after the first few."""
        time.sleep(3.0)
        started = max(since, time.time())
        time.sleep(seconds)
        return [row for row in self.run.rows() if row["kind"] == "train" and row["time"] > started + 1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait(60)


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError("it did not happen in time")
        time.sleep(0.1)
    return found


@contextmanager
def machines(root: Path, **where: Any) -> Iterator[Machines]:
    found = Machines(Path(tempfile.mkdtemp(dir=root)), **where)
    with found.stack:
        yield found


def samples_per_second(rows: Sequence[Row]) -> float:
    return statistics.median(row["samples_per_second"] for row in rows)


def processes(recipes: Sequence[str], pairs: int, seconds: float) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory(prefix="machines-") as directory:
        root = Path(directory)
        for name in recipes:
            recipe = (name, *STEADY, *data_of(name, root))
            ratios = [_pair(recipe, root, seconds) for _ in range(pairs)]
            alone, both = (statistics.median(column) for column in zip(*ratios, strict=True))
            ratio = sorted(two / one for one, two in ratios)
            say(
                f"{name}: one process {alone:.1f} samples/s, two processes {both:.1f}; ratio "
                f"{statistics.median(ratio):.3f} ({ratio[0]:.3f} to {ratio[-1]:.3f}, {pairs} pairs)"
            )


def _pair(recipe: Sequence[str], root: Path, seconds: float) -> tuple[float, float]:
    with machines(root) as one:
        one.start(recipe, (*SIZE, "plan.threads=2"), together=False)
        wait_for(lambda: (one.run.path / "metrics.jsonl").exists())
        alone = samples_per_second(one.measured(0.0, seconds))
    with machines(root) as two:
        two.start(recipe, (*SIZE, "plan.threads=1"), together=True)
        world = wait_for(lambda: two.world(2))
        both = samples_per_second(two.measured(world["time"], seconds))
    say(f"  {recipe[0]}: {alone:.1f} and {both:.1f} samples/s, slots {world['shares']}")
    return alone, both


def data_of(recipe: str, root: Path) -> list[str]:
    """Return the overrides by which every process finds its data; text is that of our own documents."""
    config = load_config(recipe)
    data = root / recipe
    if config.task != "text":
        return [f"data.path={data}", f"data.build={json.dumps(config.data.build)}", SAME_DEPTH]
    if not data.exists():
        pages = sorted(Path(__file__).parents[1].glob("docs/*.md"))
        text = root / "text"
        text.write_text("".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
        options = ("--tokenizer", "char", "--context", "64", "--out", str(data))
        subprocess.run([TRM, "data", "build", "text", str(text), *options], check=True, capture_output=True)
    return [f"data.path={data}"]


def links(rates: Sequence[str], seconds: float) -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        say("Skipped: network namespaces need root and the commands ip and tc.")
        return
    with tempfile.TemporaryDirectory(prefix="machines-") as directory:
        for rate in rates:
            with (
                cable(rate),
                machines(
                    Path(directory),
                    address=ADDRESSES[0],
                    within=[("ip", "netns", "exec", name) for name in NAMESPACES],
                ) as found,
            ):
                found.start((*LINK_RECIPE, *STEADY, SAME_DEPTH), ("plan.threads=1",), together=True)
                world = wait_for(lambda found=found: found.world(2))
                rows = found.measured(world["time"], seconds)
                predicted, measured = world["efficiency"], efficiency(rows, world["machines"][1])
                say(
                    f"{rate}: slots {world['shares']}, predicted {predicted:.1%}, measured {measured:.1%} in "
                    f"{sum(row['num_steps'] for row in rows)} steps: {predicted / measured - 1:+.1%}"
                )


def efficiency(rows: Sequence[Row], guest: str) -> float:
    """Return the share of the training time in which the slowest machine computes.

    That is the host, except for the time in which it waits for the guest.
    """
    num_slots = load_config(LINK_RECIPE[0], LINK_RECIPE[1:]).training.effective_batch_size
    passed = rows[-1]["seconds"] - rows[0]["seconds"]
    computed = 0.0
    for row in rows[1:]:
        steps = row["num_steps"] * num_slots / row["samples_per_second"]
        waited_for_guest = row.get("waited_for", {}).get(guest, 0.0)
        computed += steps - row["spent"][EXCHANGE] + waited_for_guest
    return computed / passed


@contextmanager
def cable(rate: str) -> Iterator[None]:
    """Connect two network namespaces by a cable of this rate in both directions."""
    host, guest = NAMESPACES
    ends = list(zip(NAMESPACES, ("bench0", "bench1"), ADDRESSES, strict=True))
    limit = f"tbf rate {rate} burst 256kb latency 50ms"
    commands = [
        f"ip netns add {host}",
        f"ip netns add {guest}",
        f"ip link add bench0 netns {host} type veth peer name bench1 netns {guest}",
        *(f"ip -n {name} addr add {address}/24 dev {device}" for name, device, address in ends),
        *(f"ip -n {name} link set {device} up" for name, device, _ in ends),
        *(f"ip -n {name} link set lo up" for name in NAMESPACES),  # the host connects to itself as well
        *(f"ip netns exec {name} tc qdisc add dev {device} root {limit}" for name, device, _ in ends),
    ]
    for name in NAMESPACES:  # of a run that was killed
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], check=False)


KINDS: tuple[tuple[str, float], ...] = (("float32", 0.1), ("bfloat16", 0.1), ("topk", 0.1), ("topk", 0.01))


@dataclass
class CountingWorld:
    """A world that counts the bytes of its messages."""

    world: GlooWorld
    num_bytes: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def sum(self, message: Any) -> None:
        self.num_bytes += message.nbytes
        self.world.sum(message)


@dataclass(frozen=True)
class Learned:
    loss: float  # mean of the last steps
    accuracy: float  # of tokens, likewise
    bytes_per_step: float


def learn_with_messages(recipe: str, steps: int, seeds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="machines-") as directory:
        data = data_of(recipe, Path(directory))[:2]
        config = load_config(recipe, data)
        build_if_missing(config, load_task(config.task), Silent())
        for kind, share in KINDS:
            found = []
            for seed in range(seeds):
                how = (f"training.gradient_message={kind}", f"training.gradient_share={share}")
                config = load_config(recipe, (*how, *data, f"seed={seed}"))
                half = config.training.effective_batch_size // 2
                shares = (config.training.effective_batch_size - half, half)
                found.append(together(partial(_learned, config, steps), shares)[0])
            losses = ", ".join(f"{each.loss:.4f}" for each in found)
            accuracy = statistics.mean(each.accuracy for each in found)
            say(
                f"{recipe}, {steps} steps, {_name(kind, share)}: loss {losses} ({seeds} seeds), "
                f"{accuracy:.1%} of the tokens, {found[0].bytes_per_step / 1000:,.0f} kB per step"
            )


def time_messages() -> None:
    for kind, share in KINDS:
        how = (f"training.gradient_message={kind}", f"training.gradient_share={share}")
        config = load_config("sudoku-extreme", (*how, "training.effective_batch_size=2"))
        seconds = together(partial(_message_seconds, config), (1, 1))
        milliseconds = 1000 * max(seconds)
        say(f"sudoku-extreme, 5 million weights, {_name(kind, share)}: {milliseconds:.0f} ms per message")


def _name(kind: str, share: float) -> str:
    return f"{kind} {share:.0%}" if kind == "topk" else kind


def together(compute: Callable[[GlooWorld], Any], shares: tuple[int, int]) -> list[Any]:
    """Return what two ranks, which are threads, compute in their world of gloo."""
    store = c10d.HashStore()

    def connected(rank: int) -> Any:
        torch.set_num_threads(1)
        return compute(gloo_world(store, Place(rank, shares, 0, "127.0.0.1")))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(connected, range(2)))


def _learned(config: RunConfig, steps: int, connected: GlooWorld) -> Learned:
    world = CountingWorld(connected)
    task = load_task(config.task)
    split, _ = open_splits(config, task)
    program = Program.of(config, complete_spec(task, split))
    plan = Plan.of(Execution(), 8, program.num_slots)
    make = partial(load_backend(plan.execution).learner, program, plan.execution, world)
    state = TrainingState(config, plan, Feed(config, task, split), world, make)
    results = [state.advance(lambda done: 8)[1] for _ in range(steps)]
    last = results[-max(1, steps // 10) :]
    return Learned(
        statistics.mean(each.loss for each in last),
        statistics.mean(each.token_accuracy for each in last),
        world.num_bytes / steps,
    )


def _message_seconds(config: RunConfig, world: GlooWorld) -> float:
    task = load_task(config.task)
    program = Program.of(config, task.complete(task.spec(config.data.build or {})))
    learner = load_backend(Execution()).learner(program, Execution(), world)
    return statistics.median(learner.message_seconds() for _ in range(7))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("processes", "links", "messages"))
    parser.add_argument("--recipes", default="sudoku-9x9,text-char", help="for processes")
    parser.add_argument("--pairs", type=int, default=3, help="of measurements, for processes")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one measurement")
    parser.add_argument("--rates", default="100mbit,1gbit", help="of the cable, for links")
    parser.add_argument("--steps", type=int, default=300, help="for messages")
    parser.add_argument("--seeds", type=int, default=3, help="for messages; 0 only times them")
    arguments = parser.parse_args()
    if arguments.what == "processes":
        processes(arguments.recipes.split(","), arguments.pairs, arguments.seconds)
    elif arguments.what == "links":
        links(arguments.rates.split(","), arguments.seconds)
    else:
        if arguments.seeds:
            learn_with_messages("sudoku-6x6", arguments.steps, arguments.seeds)
        time_messages()


if __name__ == "__main__":
    main()
