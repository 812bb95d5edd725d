"""Measure inference: `python bench/inference.py [--reference DIR] [--run RUN]`.

- Always: one puzzle at a time on one core, with a model of the paper's size.
- With DIR, a checkout of SamsungSAILMontreal/TinyRecursiveModels (its model needs the package einops): its
  evaluation loop and ours take turns on the same puzzles with the same weights.
- With a trained RUN, what early exit saves: its test puzzles at full depth, until the answer has converged,
  and until the halting head is confident. Puzzles are answered in batches, and the first of them one at a
  time on one core.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from reference_model import MLP_MIXER, Case, reference_network, reference_tensors

from trm.arrays import IntArray
from trm.backends.base import Program, SingleProcess, load_backend
from trm.batch import Batch
from trm.config import InferenceConfig, ModelConfig, TrainingConfig
from trm.inference.predict import load_search, open_model, open_test_set
from trm.inference.search import Search
from trm.machine.benchmark import random_batch
from trm.plan import Execution
from trm.training.evaluation import evaluate

NUM_SINGLE_PUZZLES = 50
EVALUATION_BATCH_SIZE = 64
SINGLE_DEPTH = 10
Answer = Callable[[int], IntArray]  # number of supervision steps -> answers


def write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def format_spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):.3g} {unit} ({min(values):.3g} to {max(values):.3g})"


def untrained_search(program: Program, execution: Execution, depth: int) -> tuple[Search, int]:
    """Return a search with the initial weights of a model, and how many weights it has."""
    backend = load_backend(execution)
    backend.prepare(execution)
    learner = backend.learner(program, execution, SingleProcess(program.num_slots))
    weights = learner.state()["weights"]
    predictor = backend.predictor(program, execution, weights)
    num_weights = sum(np.asarray(tensor).size for tensor in weights.values())
    return Search(predictor, InferenceConfig(depth=depth), program.data), num_weights


def measure_single_puzzles(repeats: int) -> None:
    """Print milliseconds per step; an answer takes this times its number of steps."""
    one_latent = ModelConfig(
        variant="transformer", H_layers=2, hidden_size=512, mixer="mlp", pos_encodings="none"
    )
    terminal = TrainingConfig(supervision="terminal", effective_batch_size=1)
    paper = Case("", 1, 81, 11, MLP_MIXER).program
    programs = {
        "one recursion of one latent": replace(paper, model=one_latent, training=terminal),
        "one supervision step of the paper": paper,
    }
    for name, program in programs.items():
        search, num_weights = untrained_search(program, Execution(), SINGLE_DEPTH)
        question = random_batch(1, program.data)
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            search.answer(question)
            times.append(1e3 * (time.perf_counter() - started) / SINGLE_DEPTH)
        spread = format_spread(times[1:], "ms")
        write(f"one puzzle, one core, {num_weights / 1e6:.1f}M weights: {name} {spread}")


@dataclass(frozen=True, slots=True)
class ReferenceComparison:
    """The same puzzles for the evaluation loop of the reference implementation and for ours."""

    directory: Path
    num_puzzles: int
    batch_size: int
    hidden_size: int

    @property
    def case(self) -> Case:
        sizes = {"hidden_size": self.hidden_size, "puzzle_emb_ndim": self.hidden_size}
        return Case("", self.batch_size, 81, 11, MLP_MIXER.model_copy(update=sizes))

    def batches(self) -> list[Batch]:
        questions = random_batch(self.num_puzzles, self.case.program.data)
        starts = range(0, self.num_puzzles, self.batch_size)
        return [questions[start : start + self.batch_size] for start in starts]

    def reference(self) -> Answer:
        import torch

        network = reference_network(self.case, self.directory).eval()
        batches = [reference_tensors(batch) for batch in self.batches()]

        @torch.inference_mode()
        def answer(steps: int) -> IntArray:
            network.model.config.halt_max_steps = steps
            answers = []
            for tensors in batches:
                carry = network.initial_carry(tensors)
                finished = False
                while not finished:
                    carry, _, _, outputs, finished = network(
                        carry=carry, batch=tensors, return_keys=["preds"]
                    )
                answers.append(outputs["preds"].numpy())
            return np.concatenate(answers)

        return answer

    def ours(self) -> Answer:
        threads = psutil.cpu_count(logical=False) or 1
        search, _ = untrained_search(self.case.program, Execution(threads, workers=threads), depth=1)
        batches = self.batches()

        def answer(steps: int) -> IntArray:
            deeper = replace(search, settings=InferenceConfig(depth=steps))
            return np.concatenate([deeper.answer(batch).final().tokens for batch in batches])

        return answer


def compare_with_reference(comparison: ReferenceComparison, repeats: int) -> None:
    """Print the throughput of both, and how far their answers agree.

    They are compared after one step: untrained weights make a chaotic recursion, in which rounding soon
    decides the answer.
    """
    implementations = {"ours": comparison.ours(), "reference": comparison.reference()}
    depth = comparison.case.model.halt_max_steps
    write(
        f"{comparison.num_puzzles} puzzles, {depth} supervision steps, hidden {comparison.hidden_size}, "
        f"batch {comparison.batch_size}"
    )
    same = (implementations["ours"](1) == implementations["reference"](1)).all(-1).mean()
    write(f"  after one step, {same:.1%} of the answers are the same")
    rates: dict[str, list[float]] = {name: [] for name in implementations}
    for _ in range(repeats):
        for name, answer in implementations.items():
            started = time.perf_counter()
            answer(depth)
            rates[name].append(comparison.num_puzzles / (time.perf_counter() - started))
    for name, values in rates.items():
        write(f"  {name:10} {format_spread(values, 'puzzles/s')}")
    ratio = statistics.median(rates["ours"]) / statistics.median(rates["reference"])
    write(f"  ours is {ratio:.2f} times as fast")


def measure_early_exit(run: Path, repeats: int) -> None:
    model = open_model(run)
    split = open_test_set(model)
    depth = model.config.inference.depth
    converged_after = model.config.inference.converged_after or 2
    converged = InferenceConfig(depth=depth, converged_after=converged_after)
    settings = {
        f"all {depth} steps": InferenceConfig(depth=depth),
        f"until unchanged for {converged_after} steps": converged,
        "until the halting head is confident": converged.model_copy(update={"halt": True}),
    }
    searches = {name: load_search(model, each) for name, each in settings.items()}
    write(f"{len(split)} test puzzles of {run}")
    rates: dict[str, list[float]] = {name: [] for name in searches}
    for _ in range(repeats):
        for name, search in searches.items():
            result = evaluate(search, split, model.task.scorer(split), EVALUATION_BATCH_SIZE)
            rates[name].append(len(split) / result.evaluation_seconds)
            if len(rates[name]) == repeats:
                metric = model.task.primary_metric
                write(
                    f"  {name:36} {metric} {result.metrics.scalars[metric]:.1%}, "
                    f"{result.mean_steps:.1f} steps, {format_spread(rates[name], 'puzzles/s')}"
                )
    one_core = replace(model.execution, threads=1, workers=1)
    for name, each in settings.items():
        search = load_search(model, each, one_core)
        times = []
        for example in range(min(NUM_SINGLE_PUZZLES, len(split))):
            question = split.batch(np.array([example]))
            started = time.perf_counter()
            search.answer(question)
            times.append(1e3 * (time.perf_counter() - started))
        write(f"  one at a time, one core, {name}: {format_spread(times, 'ms')}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--reference", type=Path, help="checkout of the reference implementation")
    parser.add_argument("--run", type=Path, help="trained run")
    parser.add_argument("--puzzles", type=int, default=1000, help="random puzzles (default: 1000)")
    parser.add_argument("--batch", type=int, default=64, help="puzzles at a time (default: 64)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (default: 128)")
    parser.add_argument("--repeats", type=int, default=5, help="timed rounds (default: 5)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    measure_single_puzzles(arguments.repeats)
    if arguments.run:
        measure_early_exit(arguments.run, arguments.repeats)
    if arguments.reference:
        comparison = ReferenceComparison(
            arguments.reference, arguments.puzzles, arguments.batch, arguments.hidden
        )
        compare_with_reference(comparison, arguments.repeats)


if __name__ == "__main__":
    main()
