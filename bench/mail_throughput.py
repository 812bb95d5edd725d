"""Measure mails per second from a raw mbox to verdicts: `python bench/mail_throughput.py RUN MAIL`.

MAIL is a directory whose folders are the categories. Its messages, five times over by default, become one
mbox. `trm email classify` reads it as a user would run it, start included: as it is, and with `--full`, which
uses the recursive path also where the linear one is certain. The right answers of both are counted.
"""

import argparse
import json
import mailbox
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRM = Path(sys.executable).with_name("trm")


def write_mbox(mail: Path, target: Path, copies: int) -> list[str]:
    """Write all messages one after the other, and return the category of each."""
    box = mailbox.mbox(target)
    files = [path for path in sorted(mail.glob("*/*")) if path.is_file()]
    for _ in range(copies):
        for path in files:
            box.add(path.read_bytes())
    box.close()
    return [path.parent.name for path in files] * copies


def classify(run: Path, mbox: Path, *options: str) -> tuple[float, list[str]]:
    started = time.perf_counter()
    command = [TRM, "email", "classify", run, mbox, "--json", *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - started, [json.loads(line)["category"] for line in output.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("mail", type=Path, help="directory whose folders are the categories")
    parser.add_argument("--copies", type=int, default=5, help="of every message [default: 5]")
    parser.add_argument("--times", type=int, default=3, help="how often to measure [default: 3]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mail-throughput-") as directory:
        mbox = Path(directory) / "all.mbox"
        expected = write_mbox(arguments.mail, mbox, arguments.copies)
        for options in ((), ("--full",)):
            times = []
            for _ in range(arguments.times):
                seconds, found = classify(arguments.run, mbox, *options)
                times.append(seconds)
            right = sum(one == other for one, other in zip(expected, found, strict=True))
            rates = [len(expected) / seconds for seconds in times]
            speed = f"{statistics.median(rates):.0f} mails/s ({min(rates):.0f} to {max(rates):.0f})"
            sys.stdout.write(f"{options or 'default'}: {speed}, {right} of {len(expected)} mails right\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
