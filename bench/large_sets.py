"""Training from a set that is larger than memory should be: `python bench/large_sets.py --directory DIR`.

Builds a set of random tokens there (900 cells a row, as mazes and ARC have), and one of the same shape that
fits into memory, and trains a small model on them with `trm train`: held in memory, mapped, and read row by
row. The starts are interleaved; figures are medians over them with the spread. A small model, so that the
reading would show. The page cache keeps what it has room for, as it does on any machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from trm.tasks.dataset_writer import DatasetWriter

SEQ_LEN, VOCAB = 900, 6
BLOCK = 20_000  # rows written at a time
TRM = Path(sys.executable).with_name("trm")
RECIPE = (
    "model.variant=transformer", "model.H_layers=1", "model.hidden_size=32", "model.expansion=0.25",
    "model.width_multiple=32", "model.mlp_t=true", "model.pos_encodings=none", "model.puzzle_emb_ndim=0",
    "data.augment=false",
    "training.supervision=terminal", "training.depths={0: 1}", "training.effective_batch_size=32",
    "evaluation.examples=1", "evaluation.every_steps=100000", "evaluation.target_accuracy=null",
    "plan.threads=1", "plan.micro_batch_size=32", "plan.compile=false", "training.max_steps=100000",
)  # fmt: skip
WAYS = {
    "memory": ("small", ("data.loading.cache_threshold_mb=1000",)),
    "mapped": ("large", ("data.loading.cache_threshold_mb=0", "data.loading.streaming_threshold_mb=1e6")),
    "streaming": ("large", ("data.loading.force_streaming_mode=true",)),
}


def build(directory: Path, num_bytes: float) -> None:
    if directory.exists():
        return
    rng = np.random.default_rng(0)
    rows = max(BLOCK, int(num_bytes / (2 * SEQ_LEN)))
    with DatasetWriter(directory, {"task": "random tokens"}) as writer:
        train, test = (writer.split(name, SEQ_LEN, VOCAB) for name in ("train", "test"))
        for start in range(0, rows, BLOCK):
            tokens = rng.integers(1, VOCAB, (min(BLOCK, rows - start), SEQ_LEN), dtype=np.uint8)
            train.add_examples(tokens, tokens[::-1])
        test.add_examples(tokens[:100], tokens[:100])


def measure(dataset: Path, overrides: tuple[str, ...], steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        command = [TRM, "train", "maze-hard", *RECIPE, f"data.path={dataset}", *overrides]
        command += ["--run", run, "--max-steps", str(steps)]
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "samples_per_second" in row][len(rows) // 4 :]  # the first ones warm up
    return {
        "samples_per_second": statistics.median(row["samples_per_second"] for row in rows),
        "megabytes": max(row["rss_bytes"] for row in rows) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="where the sets are, or will be")
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    for name, gigabytes in (("small", 0.09), ("large", asked.gigabytes)):
        build(asked.directory / name, gigabytes * 2**30)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(asked.repeats):
        for way, (name, overrides) in WAYS.items():
            found[way].append(measure(asked.directory / name, overrides, asked.steps))
    base = [each["samples_per_second"] for each in found["memory"]]
    for way, each in found.items():
        rates = [one["samples_per_second"] for one in each]
        ratios = [rate / other for rate, other in zip(rates, base, strict=True)]
        sys.stdout.write(
            f"{way:9}  {statistics.median(rates):6.1f} samples/s ({min(rates):.1f} to {max(rates):.1f}), "
            f"{statistics.median(ratios):.3f} of memory ({min(ratios):.3f} to {max(ratios):.3f}), "
            f"{statistics.median(one['megabytes'] for one in each):.0f} MiB resident\n"
        )


if __name__ == "__main__":
    main()
