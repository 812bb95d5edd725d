"""Measure the import of a large mailbox: `python bench/mail_import.py MAIL [--gigabytes 1] [options]`.

MAIL is a directory whose folders are the categories. Its messages are repeated in one mbox of that size, and
`trm data build email` makes a dataset of it. With an attachment, which is a hole in the file, a mailbox of
10 GB takes little disk space (`--attachment-mib 21`; messages beyond 25 MiB are cut). Resident memory is
sampled five times per second: that of the command, beside the same command with 100 messages without
attachments, and that of its largest worker. `--work DIRECTORY` keeps the mailbox.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

TRM = Path(sys.executable).with_name("trm")
SAMPLE_SECONDS = 0.2
FEW = 100  # messages of the small mailbox
MIB = 2**20
SEPARATOR = b"From bench@example.org Mon Jan  6 09:00:00 2025\n"
WITH_ATTACHMENT = b"""Subject: an attachment
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="of-this-bench"

--of-this-bench
Content-Type: text/plain

%s
--of-this-bench
Content-Type: application/octet-stream
Content-Disposition: attachment; filename="zeros.bin"

"""
END = b"\n--of-this-bench--\n"


def write_mbox(mail: Path, target: Path, limits: tuple[int, int], attachment_bytes: int) -> int:
    """Repeat messages up to a number of bytes or messages, and return how many there are."""
    files = [path for path in sorted(mail.glob("*/*")) if path.is_file()]
    random.Random(0).shuffle(files)  # so that few messages have all categories
    max_bytes, max_messages = limits
    with target.open("wb") as file:
        number = 0
        while file.tell() < max_bytes and number < max_messages:
            path = files[number % len(files)]
            raw = path.read_bytes()
            if raw.startswith(b"From "):  # the separator of an mbox that it came from
                raw = raw.partition(b"\n")[2]
            file.write(SEPARATOR + f"X-Gmail-Labels: {path.parent.name}\n".encode())
            if attachment_bytes:
                raw = WITH_ATTACHMENT % raw.partition(b"\n\n")[2]
            file.write(raw.replace(b"\nFrom ", b"\n>From "))
            if attachment_bytes:
                file.seek(attachment_bytes, 1)
                file.write(END)
            file.write(b"\n\n")
            number += 1
    return number


def write_mapping(mail: Path, target: Path) -> None:
    folders = sorted(path.name for path in mail.iterdir() if path.is_dir())
    target.write_text(json.dumps({"categories": {name: [f"label:{name}"] for name in folders}}))


@dataclass(frozen=True, slots=True)
class Measured:
    facts: dict[str, object]
    seconds: float
    peak_bytes: int  # of the command itself
    worker_bytes: int  # of its largest child


def build(mbox: Path, mapping: Path, out: Path, jobs: int) -> Measured:
    command = [TRM, "data", "build", "email", "--from", mbox, "--mapping", mapping, "--out", out]
    started = time.monotonic()
    peak = worker = 0
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen([*map(str, command), "--jobs", str(jobs), "--json"], stdout=output) as process,
    ):
        while process.poll() is None:
            own, largest = resident_bytes(process.pid)
            peak = max(peak, own)
            worker = max(worker, largest)
            time.sleep(SAMPLE_SECONDS)
        if process.returncode:
            raise SystemExit(f"trm data build email failed with {process.returncode}")
        output.seek(0)
        return Measured(json.load(output), time.monotonic() - started, peak, worker)


def resident_bytes(pid: int) -> tuple[int, int]:
    """Return the resident memory of a process, and of its largest child."""
    own = largest = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        own = process.memory_info().rss
        for child in process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                largest = max(largest, child.memory_info().rss)
    return own, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("mail", type=Path, help="directory whose folders are the categories")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the mbox [default: 1]")
    parser.add_argument("--attachment-mib", type=float, default=0.0, help="of every message [default: none]")
    parser.add_argument("--jobs", type=int, default=2, help="workers that parse [default: 2]")
    parser.add_argument("--work", type=Path, help="new directory to keep [default: a temporary one]")
    arguments = parser.parse_args()
    attachment_bytes = round(arguments.attachment_mib * MIB)
    if arguments.work is None:
        work = tempfile.TemporaryDirectory(prefix="mail-import-")
    else:
        arguments.work.mkdir()
        work = nullcontext(str(arguments.work))
    with work as name:
        directory = Path(name)
        mapping = directory / "mapping.yaml"
        write_mapping(arguments.mail, mapping)
        mbox = directory / "few.mbox"
        write_mbox(arguments.mail, mbox, (sys.maxsize, FEW), 0)
        few = build(mbox, mapping, directory / "few", arguments.jobs)
        mbox = directory / "all.mbox"
        max_bytes = round(arguments.gigabytes * 1e9)
        count = write_mbox(arguments.mail, mbox, (max_bytes, sys.maxsize), attachment_bytes)
        whole = build(mbox, mapping, directory / "all", arguments.jobs)
        more = (whole.peak_bytes - few.peak_bytes) / MIB
        sys.stdout.write(
            f"{count:,} messages, {mbox.stat().st_size / 1e9:.1f} GB: {whole.seconds / 60:.1f} minutes; "
            f"{whole.peak_bytes / MIB:.0f} MiB, {more:.0f} MiB more than {FEW} messages; "
            f"largest worker {whole.worker_bytes / MIB:.0f} MiB\n"
        )
        sys.stdout.write(f"{json.dumps(whole.facts)}\n")


if __name__ == "__main__":
    main()
