"""A small mailbox written for the tests: three categories that share most of their words."""

import random
from email.message import EmailMessage

LENGTH = 48  # tokens per message of the small network
COMMON = (
    "please", "note", "that", "this", "week", "the", "team", "will", "have", "a", "look", "at", "it", "and",
    "send", "you", "all", "details", "today",
)  # fmt: skip
TOPICS = {
    "work": ["meeting", "project", "deadline", "report", "budget", "client", "review", "agenda", "minutes"],
    "travel": ["flight", "hotel", "booking", "gate", "boarding", "luggage", "itinerary", "train", "ticket"],
    "spam": ["winner", "prize", "lottery", "claim", "cash", "free", "offer", "urgent", "casino"],
}


def letter(category, number, seed=0):
    rng = random.Random(f"{category} {number} {seed}")
    message = EmailMessage()
    message["From"] = f"{rng.choice(['ann', 'bob', 'eve'])}@{rng.choice(['example.org', 'example.net'])}"
    message["To"] = "you@example.org"
    message["Subject"] = " ".join(rng.sample(TOPICS[category], 2))
    message["Date"] = f"Mon, {1 + number % 28:02d} Jan 2024 10:00:00 +0000"
    message["Message-ID"] = f"<{category}.{number}.{seed}@example.org>"
    words = rng.sample(COMMON, 12) + rng.choices(TOPICS[category], k=4)
    rng.shuffle(words)
    message.set_content(" ".join(words))
    return bytes(message)


def write_mailbox(directory, num_each=30, seed=0):
    """Write a directory whose folders are the categories."""
    for category in TOPICS:
        (directory / category).mkdir(parents=True)
        for number in range(num_each):
            (directory / category / f"{number:03d}.eml").write_bytes(letter(category, number, seed))
    return directory
