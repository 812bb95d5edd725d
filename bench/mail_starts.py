"""Measure what a classifier of mail should start from: `python bench/mail_starts.py MAIL --work DIRECTORY`.

MAIL is a directory whose folders are the categories; 15 % of it is held out. The recipe `email` is trained
from random weights, with embeddings from co-occurrence, and from a model that predicted masked tokens of the
same training messages. Nothing is chosen on what is held out: the accuracy is that of the last step.
Datasets and runs in the working directory are kept, and finished runs are not repeated.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from trm.arrays import IntArray
from trm.batch import IGNORE_LABEL
from trm.runs.directory import Run, is_run
from trm.runs.rows import Row, kind_of
from trm.tasks.dataset import Split, open_split
from trm.tasks.dataset_writer import DatasetWriter
from trm.tasks.documents.email import TASK
from trm.tasks.documents.masked import masked
from trm.tasks.documents.tokens import FILE_NAME

TRAIN = [sys.executable, "-c", "from trm.cli import main; main()", "train"]
STARTS = ("random", "cooccurrence", "pretrained")
MASKED_TEST_EVERY = 20  # messages of the training split


def build(arguments: argparse.Namespace) -> None:
    """Build the dataset, and one with masked tokens from its training split only."""
    labelled, masked_rows = arguments.work / "email", arguments.work / "email-masked"
    if not labelled.exists():
        options = {"from": [str(arguments.mail)], "length": arguments.length}
        TASK.build(options, labelled, lambda what, done, total: None, jobs=2)
    if not masked_rows.exists():
        split = open_split(labelled, "train")
        is_test = np.arange(len(split)) % MASKED_TEST_EVERY == 0
        with DatasetWriter(masked_rows, {"task": "email-masked", "options": {}}) as writer:
            write_masked(split, np.flatnonzero(~is_test), writer, "train")
            write_masked(split, np.flatnonzero(is_test), writer, "test")
            writer.write_json(FILE_NAME, json.loads((labelled / FILE_NAME).read_text(encoding="utf-8")))


def write_masked(split: Split, rows: IntArray, writer: DatasetWriter, name: str) -> None:
    batch = split.batch(rows)
    vocab_size = split.spec.vocab_size
    spec = replace(split.spec, num_outputs=vocab_size, class_names=())
    inputs, labels = masked(batch.inputs, np.arange(len(rows)))
    writer.split(name, spec, IGNORE_LABEL).add_examples(inputs, labels, lengths=batch.lengths)


def train(recipe: str, overrides: list[str], run: Path, steps: int) -> Row:
    """Train unless the run has finished, and return its last evaluation."""
    fixed = [f"training.max_steps={steps}", f"evaluation.every_steps={max(1, steps // 2)}"]
    if not is_run(run) or last_evaluation(run)["step"] < steps:
        command = [*TRAIN, recipe, *fixed, *overrides, "--run", str(run), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{run}: {done.stderr}")
    return last_evaluation(run)


def last_evaluation(run: Path) -> Row:
    return next((row for row in reversed(Run(run).rows()) if kind_of(row) == "eval"), {"step": 0})


def measure(arguments: argparse.Namespace, start: str, seed: int) -> str:
    size = f"model.hidden_size={arguments.hidden_size}"
    common = [f"seed={seed}", size]
    chosen = ["training.initial_embeddings=random"]
    before = ""
    if start == "cooccurrence":
        chosen = ["training.initial_embeddings=cooccurrence"]
    elif start == "pretrained":
        run = arguments.work / f"masked-{seed}"
        data = f"data.path={arguments.work / 'email-masked'}"
        row = train("email-pretrain", [*common, data], run, arguments.pretrain_steps or arguments.steps)
        before = f" after {row['seconds']:.0f} s on masked tokens ({row['token_accuracy']:.1%} right)"
        chosen = ["training.initial_embeddings=random", f"training.initial_weights={run}"]
    data = f"data.path={arguments.work / 'email'}"
    path = arguments.work / f"{start}-{seed}"
    row = train("email", [*common, data, *chosen], path, arguments.steps)
    return f"{start}, seed {seed}: {row['accuracy']:.2%} in {row['seconds']:.0f} s{before}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("mail", type=Path, help="directory whose folders are the categories")
    parser.add_argument("--work", type=Path, required=True, help="directory for datasets and runs")
    parser.add_argument("--steps", type=int, default=400, help="steps of the classifier (default: 400)")
    parser.add_argument("--pretrain-steps", type=int, help="steps on masked tokens (default: --steps)")
    parser.add_argument("--length", type=int, default=128, help="tokens per message (default: 128)")
    parser.add_argument("--hidden-size", type=int, default=64, help="(default: 64)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="(default: 0 1)")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS, help="(default: all)")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    build(arguments)
    for seed in arguments.seeds:
        for start in arguments.starts:
            sys.stdout.write(f"{measure(arguments, start, seed)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
