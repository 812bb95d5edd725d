"""Mailboxes that tests import: an mbox with Gmail labels, copies, long and empty messages."""

import numpy as np

WORDS = {
    "Spam": ["cheap", "watches", "offer", "money", "winner", "prize", "free", "ürün", "indirim"],
    "Work": ["meeting", "report", "project", "deadline", "review", "budget", "team", "plan"],
}


def message(number, rng):
    """Return a message; every tenth has no label, every seventh is a copy, and some are empty or long."""
    label = list(WORDS)[number % 2]
    if number % 23 == 5:
        return b""
    if number % 29 == 7:
        return f"X-Gmail-Labels: {label}\n\n".encode()
    chosen = np.random.default_rng(number % 7) if number % 7 == 3 else rng
    size = 20_000 if number % 40 == 11 else int(chosen.integers(5, 60))
    text = " ".join(chosen.choice(WORDS[label], size))
    headers = [
        f"From: {label.lower()}{number % 5}@example.org",
        f"Subject: {text[:20]}",
        f"Date: Mon, {1 + number % 28:02} Jan 2024 10:00:00 +0000",
        f"Message-ID: <{number}@example.org>",
        f"In-Reply-To: <{number // 4}@example.org>",
        "Content-Type: text/plain; charset=utf-8",
        *([] if number % 10 == 9 else [f"X-Gmail-Labels: {label}"]),
    ]
    return ("\n".join([*headers, "", text]) + "\n").encode()


def messages(count, seed=0):
    rng = np.random.default_rng(seed)
    return [message(number, rng) for number in range(count)]


def write_mbox(path, raws):
    with path.open("wb") as file:
        for raw in raws:
            file.write(b"From someone Mon Jan  1 00:00:00 2024\n" + raw + b"\n")
    return path
