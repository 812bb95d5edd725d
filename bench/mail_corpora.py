"""Train and evaluate mail models on public corpora: `python bench/mail_corpora.py DIRECTORY [options]`.

DIRECTORY holds the corpora as archives (spamassassin.tar.xz, enron_spam.jsonl.xz, trec07p.tar.xz,
20news_bydate.tar.xz, enron_categories.tar.xz); those that are missing are left out. Each corpus has a part to
train on and a part to measure on, which is read once, at the end. `trm email train` and `trm email eval` do
the work, as a user would; the table has the accuracy (macro-F1 for categories) of each path, of both together
and of TF-IDF + LinearSVC on the same messages, the minutes of training, and the peak of its resident memory:
that of all its processes together, pages that they share counted for each.
"""

import argparse
import csv
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TRM = Path(sys.executable).with_name("trm")
COLUMNS = ("linear path", "recursive path", "together", "TF-IDF + LinearSVC")
TREC_TRAINING_MESSAGES = 4500
GENRES = {
    "1": "business", "2": "personal", "3": "personal-professional",
    "4": "logistics", "5": "employment", "6": "editing",
}  # fmt: skip
DEV_GENRE_SHARE = 6  # every sixth message, by its number

SAMPLE_SECONDS = 0.5

Parts = tuple[Path, Path]


def unpack(archive: Path, directory: Path) -> Path:
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    return directory


def spamassassin(data: Path, directory: Path) -> Parts:
    root = unpack(data / "spamassassin.tar.xz", directory) / "spamassassin"
    return root / "train", root / "dev"


def enron_spam(data: Path, directory: Path) -> Parts:
    paths = {name: directory / f"{name}.jsonl" for name in ("train", "dev")}
    files = {name: path.open("w", encoding="utf-8") for name, path in paths.items()}
    with lzma.open(data / "enron_spam.jsonl.xz", "rt", encoding="utf-8") as rows:
        for line in rows:
            row = json.loads(line)
            kept = {"subject": row["subject"], "body": row["text"], "category": row["label"]}
            files[row["split"]].write(json.dumps(kept) + "\n")
    for file in files.values():
        file.close()
    return paths["train"], paths["dev"]


def trec(data: Path, directory: Path) -> Parts:
    root = unpack(data / "trec07p.tar.xz", directory) / "trec07p"
    with (root / "index.csv").open() as file:
        for name, label in csv.reader(file):
            part = "train" if int(name.rpartition(".")[2]) <= TREC_TRAINING_MESSAGES else "dev"
            target = directory / part / label
            target.mkdir(parents=True, exist_ok=True)
            (root / "data" / name).rename(target / f"{name}.eml")
    return directory / "train", directory / "dev"


def newsgroups(data: Path, directory: Path) -> Parts:
    root = unpack(data / "20news_bydate.tar.xz", directory)
    return root / "20news-bydate-train", root / "20news-bydate-test"


def stripped_newsgroups(data: Path, directory: Path) -> Parts:
    """Remove headers, quotes and signatures as scikit-learn does, so that only what was written remains."""
    from sklearn.datasets import _twenty_newsgroups as cleaning

    paths = []
    for root in newsgroups(data, directory):
        paths.append(directory / f"{root.name}.jsonl")
        with paths[-1].open("w", encoding="utf-8") as file:
            for post in sorted(root.glob("*/*")):
                text = post.read_text(encoding="latin-1")
                text = cleaning.strip_newsgroup_header(text)
                text = cleaning.strip_newsgroup_footer(cleaning.strip_newsgroup_quoting(text))
                file.write(json.dumps({"subject": "", "body": text, "category": post.parent.name}) + "\n")
    return paths[0], paths[1]


def genres(data: Path, directory: Path) -> Parts:
    """Take the coarse genre that most annotators gave; messages that are empty have none."""
    root = unpack(data / "enron_categories.tar.xz", directory) / "enron_categories"
    for labels in sorted(root.glob("*/*.cats")):
        rows = [line.split(",") for line in labels.read_text().split()]
        votes = [(-int(count), second) for first, second, count in rows if first == "1" and second in GENRES]
        if not votes:
            continue
        part = "dev" if int(labels.stem) % DEV_GENRE_SHARE == 0 else "train"
        target = directory / part / GENRES[min(votes)[1]]
        target.mkdir(parents=True, exist_ok=True)
        labels.with_suffix(".txt").rename(target / f"{labels.stem}.eml")
    return directory / "train", directory / "dev"


@dataclass(frozen=True, slots=True)
class Corpus:
    name: str
    archive: str
    parts: Callable[[Path, Path], Parts]
    metric: str = "accuracy"


CORPORA = (
    Corpus("SpamAssassin", "spamassassin.tar.xz", spamassassin),
    Corpus("Enron-Spam", "enron_spam.jsonl.xz", enron_spam),
    Corpus("TREC07p", "trec07p.tar.xz", trec),
    Corpus("20 Newsgroups, full", "20news_bydate.tar.xz", newsgroups),
    Corpus("20 Newsgroups, stripped", "20news_bydate.tar.xz", stripped_newsgroups),
    Corpus("Enron categories", "enron_categories.tar.xz", genres, "macro_f1"),
)
CROSS = (("Enron-Spam", "SpamAssassin"), ("SpamAssassin", "Enron-Spam"))


@dataclass(frozen=True, slots=True)
class Measured:
    corpus: str
    seed: int
    minutes: float
    peak_gib: float
    evaluation: dict[str, dict[str, float]]


def run_trm(*arguments: str | Path) -> tuple[dict[str, object], float]:
    """Return what a command reports, and the peak of its memory in GiB."""
    peak = 0
    command = [TRM, *map(str, arguments), "--json"]
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output) as process:
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(SAMPLE_SECONDS)
        if process.returncode:
            raise SystemExit(f"trm {' '.join(map(str, arguments))} failed")
        output.seek(0)
        facts: dict[str, object] = json.load(output)
    return facts, peak / 2**30


def resident_bytes(pid: int) -> int:
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for each in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += each.memory_info().rss
    return total


def measure(name: str, train: Path, dev: Path, run: Path, options: argparse.Namespace) -> Iterator[Measured]:
    for seed in options.seeds:
        shutil.rmtree(run, ignore_errors=True)
        started = time.monotonic()
        command = ["email", "train", train, "--run", run, "--held-out", "0", "--seed", str(seed)]
        _, peak_gib = run_trm(*command, *(["--linear"] if options.linear else []), *options.train)
        minutes = (time.monotonic() - started) / 60
        facts, _ = run_trm("email", "eval", run, dev)
        columns = facts["columns"]
        assert isinstance(columns, list)
        yield Measured(name, seed, minutes, peak_gib, {each["name"]: each for each in columns})


def line(found: Measured, metric: str) -> str:
    values = [found.evaluation[each][metric] if each in found.evaluation else None for each in COLUMNS]
    cells = ["" if value is None else f"{value:.4f}" for value in values]
    cells += [f"{found.minutes:.1f}", f"{found.peak_gib:.2f}"]
    return f"| {found.corpus} | {found.seed} | {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("data", type=Path, help="directory of the archives")
    parser.add_argument("--corpora", help="names, or parts of names, separated by commas [default: all]")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, separated by commas [default: 0,1,2]")
    parser.add_argument("--linear", action="store_true", help="train the linear path alone")
    parser.add_argument("--cross", action="store_true", help="measure across corpora instead")
    parser.add_argument("--train", default="", help="more options of `trm email train`, in one string")
    arguments = parser.parse_args()
    arguments.seeds = [int(seed) for seed in arguments.seeds.split(",")]
    arguments.train = arguments.train.split()
    return arguments


def chosen(arguments: argparse.Namespace) -> list[Corpus]:
    wanted = arguments.corpora.split(",") if arguments.corpora else [""]
    found = [each for each in CORPORA if any(re.search(re.escape(part), each.name, re.I) for part in wanted)]
    return [each for each in found if (arguments.data / each.archive).exists()]


def whole(parts: Parts, directory: Path) -> Path:
    """Return both parts of a corpus as one source."""
    if parts[0].is_file():
        joined = directory / "all.jsonl"
        joined.write_text("".join(part.read_text(encoding="utf-8") for part in parts), encoding="utf-8")
        return joined
    for part in parts:
        for path in sorted(part.glob("*/*")):
            target = directory / "all" / path.parent.name
            target.mkdir(parents=True, exist_ok=True)
            os.link(path, target / f"{part.name}-{path.name}")
    return directory / "all"


def main() -> None:
    arguments = parse_arguments()
    sys.stdout.write(
        f"| corpus | seed | {' | '.join(COLUMNS)} | minutes | GiB |\n|{'---|' * (4 + len(COLUMNS))}\n"
    )
    by_name = {corpus.name: corpus for corpus in CORPORA}
    with tempfile.TemporaryDirectory(prefix="mail-corpora-") as temporary:
        if arguments.cross:
            jobs = []
            for one, other in CROSS:
                paths = []
                for name in (one, other):
                    directory = Path(temporary) / f"{one} to {other}" / name
                    directory.mkdir(parents=True)
                    paths.append(whole(by_name[name].parts(arguments.data, directory), directory))
                jobs.append((f"{one} -> {other}", paths[0], paths[1], "accuracy"))
        else:
            jobs = []
            for corpus in chosen(arguments):
                directory = Path(temporary) / corpus.name
                directory.mkdir()
                jobs.append((corpus.name, *corpus.parts(arguments.data, directory), corpus.metric))
        for name, train, dev, metric in jobs:
            for found in measure(name, train, dev, Path(temporary) / "run", arguments):
                sys.stdout.write(line(found, metric) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
