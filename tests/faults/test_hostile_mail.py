"""Every message gets a verdict, whatever is in it, within 2 s and 256 MiB."""

import tarfile
import time
from collections import Counter
from pathlib import Path

import pytest
from faults.mutations import MUTATIONS, SHARED, WRITTEN, mutate, real_messages

from trm.tasks.documents.mail import parse_mail
from trm.tasks.documents.mailboxes import Message, read_messages
from trm.tasks.documents.parse_pool import Failure, ParsePool
from trm.tasks.documents.words import ngrams

SHORT, FULL = 300, 10_000
VERDICTS = ("parsed", "truncated", "skipped")


def measure(raw):
    """Parse a message and take its features. Return the verdict, CPU seconds and extra memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = resident("VmRSS")
    started = time.process_time()
    mail = parse_mail(raw)
    Counter(ngrams(mail))
    return mail.verdict, time.process_time() - started, resident("VmHWM") - before


def resident(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def check(messages, tally):
    """Send all messages through a pool, and report the worst."""
    with ParsePool(measure, jobs=2) as pool:
        verdicts: Counter[str] = Counter()
        slowest = largest = 0.0
        num_messages = 0
        for message, result in pool.map(messages):
            num_messages += 1
            assert tally.add(not isinstance(result, Failure)), (message.key, result)
            verdict, seconds, extra_bytes = result
            assert verdict in VERDICTS
            verdicts[verdict] += 1
            slowest = max(slowest, seconds)
            largest = max(largest, extra_bytes)
    assert verdicts.total() == num_messages
    assert slowest < 2.0
    assert largest < 256 * 2**20
    counts = ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS)
    tally.remark(f"{counts}; at most {slowest:.2f} s and {largest / 2**20:.0f} MiB")
    return num_messages


def mutated(count, messages):
    for seed in range(count):
        name, raw = mutate(seed, messages)
        yield Message(f"{name} {seed}", raw)


@pytest.mark.slow
def test_mutations_of_written_mail_have_a_verdict(tally, full):
    count = FULL if full else SHORT
    assert check(mutated(count, WRITTEN), tally("mutations of written mail")) == count


@pytest.mark.slow
def test_mutations_of_real_mail_have_a_verdict(tally, full):
    messages = real_messages(4000 if full else 60)
    if not messages:
        pytest.skip(f"{SHARED}/spamassassin.tar.xz is not there")
    count = FULL if full else SHORT
    assert check(mutated(count, messages), tally("mutations of real mail")) == count


@pytest.mark.slow
def test_the_torture_set_has_verdicts(tally, tmp_path):
    archive = SHARED / "email_torture.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    num_files = sum(path.is_file() for path in tmp_path.rglob("*"))
    paths = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    messages = (message for path in paths for message in read_messages(path, "eml"))
    assert check(messages, tally("torture set")) == num_files > 500


def test_the_same_seed_makes_the_same_mutation():
    for seed in range(len(MUTATIONS)):
        assert mutate(seed, WRITTEN) == mutate(seed, WRITTEN)
