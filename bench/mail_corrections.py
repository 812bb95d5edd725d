"""What corrections bring and cost: `python bench/mail_corrections.py TRAIN TEST [--corrections 200]`.

TRAIN and TEST are directories whose folders are the categories. A linear model is trained on TRAIN and
classifies TEST. Wrong answers, up to the number of corrections and spread over TEST, are given to `trm email
learn` with the right category. TEST is classified again: how many of the corrected messages are right now,
and how the accuracy on all others has changed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

TRM = Path(sys.executable).with_name("trm")


def trm(*arguments: str) -> str:
    return subprocess.run([TRM, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def classify(run: Path, test: Path) -> dict[Path, str]:
    lines = trm("email", "classify", str(run), str(test), "--json").splitlines()
    return {Path(row["path"]): row["category"] for row in map(json.loads, lines)}


def share_right(answers: dict[Path, str], paths: list[Path]) -> float:
    return sum(answers[path] == path.parent.name for path in paths) / len(paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--corrections", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mail-corrections-") as directory:
        run = Path(directory) / "run"
        trm("email", "train", str(arguments.train), "--run", str(run), "--linear")
        before = classify(run, arguments.test)
        wrong = [path for path, category in before.items() if category != path.parent.name]
        corrected = wrong[:: max(1, len(wrong) // arguments.corrections)][: arguments.corrections]
        by_category = defaultdict(list)
        for path in corrected:
            by_category[path.parent.name].append(str(path))
        started = time.monotonic()
        for category, paths in by_category.items():
            trm("email", "learn", str(run), category, *paths)
        seconds = time.monotonic() - started
        after = classify(run, arguments.test)
    rest = sorted(set(before) - set(corrected))
    print(  # noqa: T201
        f"{len(corrected)} corrections in {len(by_category)} commands, {seconds:.1f} s: "
        f"{share_right(after, corrected):.1%} of them are right now; accuracy on the other {len(rest)} "
        f"messages {share_right(before, rest):.4f} before, {share_right(after, rest):.4f} after"
    )


if __name__ == "__main__":
    main()
