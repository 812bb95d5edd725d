"""How fast questions are answered: `python bench/answering.py --reference DIR [--run RUN]`.

DIR is a checkout of SamsungSAILMontreal/TinyRecursiveModels (its model needs the package einops). Its
evaluation loop and ours answer the same puzzles with the same weights, taking turns; how many agree is told.
Then one puzzle at a time on one core, at the size of the paper. With a trained RUN also what early halting
saves: its own test puzzles at full depth, until settled, and until the halting head believes the answer, in
batches and, the first of them, one at a time on one core.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from against_reference import MIXER, Shape, reference_network
from numpy.typing import NDArray

from trm.backends.base import load_backend
from trm.config import EvaluationConfig, ModelConfig, TrainingConfig
from trm.inference import load_answerer, open_model, open_test_set
from trm.training.benchmark import random_batch
from trm.training.evaluation import evaluate

ONE_AT_A_TIME = 50
Answer = Callable[[int], NDArray[np.int64]]  # after so many supervision steps


def seconds(sides: dict[str, Answer], repeats: int) -> dict[str, list[float]]:
    """They take turns. The first round shows that they agree, after one step: weights that have learned
    nothing make a chaotic recursion, in which the last bit of a number soon decides."""
    answers = [answer(1) for answer in sides.values()]
    same = min(float((answers[0] == other).all(-1).mean()) for other in answers)
    sys.stdout.write(f"  after one step the same answer to {same:.1%} of the puzzles\n")
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, answer in sides.items():
            started = time.perf_counter()
            answer(MIXER.halt_max_steps)
            found[name].append(time.perf_counter() - started)
    return found


def spread(values: list[float], scale: float, unit: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle * scale:.3g} {unit} ({low * scale:.3g} to {high * scale:.3g})"


def against_reference(directory: Path, puzzles: int, batch: int, hidden: int, repeats: int) -> None:
    import torch

    threads = psutil.cpu_count(logical=False) or 1
    model = MIXER.model_copy(update={"hidden_size": hidden, "puzzle_emb_ndim": hidden})
    shape = Shape("", batch, 81, 11, model)
    questions = random_batch(puzzles, shape.task)
    backend = load_backend()
    backend.prepare(threads=threads, deterministic=False)
    network = reference_network(shape, directory).eval()
    weights = backend.learner(model, shape.training, shape.task, 0).tensors()["weights"]
    answerer = backend.answerer(model, shape.training, shape.task, weights, lanes=threads)

    @torch.inference_mode()
    def theirs(steps: int) -> NDArray[np.int64]:
        found = []
        network.model.config.halt_max_steps = steps
        for start in range(0, puzzles, batch):
            cut = slice(start, start + batch)
            tensors = {
                "inputs": torch.from_numpy(questions.inputs[cut]),
                "labels": torch.from_numpy(questions.labels[cut]),
                "puzzle_identifiers": torch.from_numpy(questions.puzzle_identifiers[cut]),
            }
            carry, finished = network.initial_carry(tensors), False
            while not finished:
                carry, _, _, outputs, finished = network(carry=carry, batch=tensors, return_keys=["preds"])
            found.append(outputs["preds"].numpy())
        return np.concatenate(found)

    def ours(steps: int) -> NDArray[np.int64]:
        found = []
        for start in range(0, puzzles, batch):
            cut = slice(start, start + batch)
            answers = answerer.answer(
                questions.inputs[cut], questions.puzzle_identifiers[cut], EvaluationConfig(depth=steps)
            )
            found.append(answers.tokens[-1])
        return np.concatenate(found)

    sys.stdout.write(
        f"{puzzles} puzzles, {model.halt_max_steps} supervision steps, hidden {hidden}, batch {batch}\n"
    )
    found = seconds({"reference": theirs, "ours": ours}, repeats)
    for name, times in found.items():
        rates = [puzzles / each for each in times]
        sys.stdout.write(f"  {name:10} {spread(rates, 1, 'puzzles/s')}\n")
    ratio = statistics.median(found["reference"]) / statistics.median(found["ours"])
    sys.stdout.write(f"  ours is {ratio:.2f} times as fast\n")


def one_puzzle(repeats: int) -> None:
    """Milliseconds a step: what a model needs to answer is this times the steps that it takes."""
    backend = load_backend()
    backend.prepare(threads=1, deterministic=False)
    one_level = ModelConfig(
        variant="transformer", H_layers=2, hidden_size=512, mlp_t=True, pos_encodings="none"
    )
    for name, model, training in (
        ("one recursion of one level", one_level, TrainingConfig(supervision="terminal")),
        ("one supervision step of the paper", MIXER, TrainingConfig()),
    ):
        shape = Shape("", 1, 81, 11, model)
        weights = backend.learner(model, training, shape.task, 0).tensors()["weights"]
        answerer = backend.answerer(model, training, shape.task, weights, lanes=1)
        question = random_batch(1, shape.task)
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            answerer.answer(question.inputs, question.puzzle_identifiers, EvaluationConfig(depth=10))
            times.append((time.perf_counter() - started) / 10)
        size = sum(tensor.size for tensor in map(np.asarray, weights.values()))
        sys.stdout.write(f"one puzzle, one core, {size / 1e6:.1f}M: {name} {spread(times[1:], 1e3, 'ms')}\n")


def halting(run: Path, repeats: int) -> None:
    model = open_model(run)
    answerer, split = load_answerer(model), open_test_set(model)
    depth, settle = model.config.evaluation.depth, model.config.evaluation.settle
    ways = {
        f"all {depth} steps": EvaluationConfig(depth=depth),
        f"until unchanged {settle} times": EvaluationConfig(depth=depth, settle=settle),
        "until the halting head agrees": EvaluationConfig(depth=depth, settle=settle, halt=True),
    }
    sys.stdout.write(f"{len(split)} test puzzles of {run}\n")
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        results = {name: evaluate(answerer, split, way, batch_size=64) for name, way in ways.items()}
        for name, result in results.items():
            found[name].append(len(split) / result.evaluation_seconds)
    for name, result in results.items():
        sys.stdout.write(
            f"  {name:32} {result.exact_accuracy:.1%}, {result.mean_steps:.1f} steps, "
            f"{spread(found[name], 1, 'puzzles/s')}\n"
        )
    load_backend().prepare(threads=1, deterministic=False)
    for name, way in ways.items():
        times = []
        for example in range(ONE_AT_A_TIME):
            inputs, _ = split.rows(np.array([example]))
            started = time.perf_counter()
            answerer.answer(inputs, split.identifiers(np.array([example])), way)
            times.append(time.perf_counter() - started)
        sys.stdout.write(f"  one at a time, one core, {name}: {spread(times, 1e3, 'ms')}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--reference", type=Path, help="a checkout of the public code")
    parser.add_argument("--run", type=Path, help="a trained run")
    parser.add_argument("--puzzles", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    one_puzzle(arguments.repeats)
    if arguments.run:
        halting(arguments.run, arguments.repeats)
    if arguments.reference:
        against_reference(
            arguments.reference, arguments.puzzles, arguments.batch, arguments.hidden, arguments.repeats
        )


if __name__ == "__main__":
    main()
