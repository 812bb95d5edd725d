"""A small mailbox that is made up, to try the classifier without mail of one's own.

Every message is put together from sentences written for this project. Categories share sentences, as they do
in real mail, and some messages borrow one from another category.
"""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path

from macbook_optimization.durable_files import make_directory, replace_file

_START = datetime(2025, 1, 6, 9, 0, tzinfo=UTC)
_SHARED = (
    "Hello,", "I hope you are well.", "Please find the details below.", "Thank you for your patience.",
    "Let me know if you have any questions.", "Best regards", "This concerns {day}.", "See you on {day}.",
    "You can answer this message directly.", "We look forward to hearing from you.",
)  # fmt: skip
_WORDS = {
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"),
    "name": ("Anna", "Ben", "Cem", "Deniz", "Elif", "Frank", "Grace", "Hugo"),
    "city": ("Ankara", "Berlin", "Izmir", "Lisbon", "Oslo", "Vienna"),
    "amount": ("12.50", "49.90", "120.00", "310.75", "999.00"),
    "number": ("18", "204", "3711", "55102"),
}
_CATEGORIES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "work": (
        ("{name} <{name}@office.example>", "Project office <projects@office.example>"),
        ("Agenda for {day}", "Review of the draft", "Numbers for the quarter", "Release {number}"),
        (
            "The meeting about the release is on {day} at ten.", "Could you review the draft before noon?",
            "The client asked for a new estimate.", "I moved the deadline of milestone {number} to {day}.",
            "Please add your hours to the project sheet.", "The build failed again; {name} is looking at it.",
            "We need a decision about the budget.", "The minutes of the call are attached.",
            "The test plan still lacks a section on errors.", "{name} will present the roadmap.",
            "Can you take over the support rota on {day}?", "The contract needs two signatures.",
        ),
    ),
    "personal": (
        ("{name} <{name}@home.example>",),
        ("Dinner on {day}?", "Photos from {city}", "Happy birthday!", "News from us"),
        (
            "We had a wonderful weekend in {city}.", "The children send their love.",
            "Are you free for dinner on {day}?", "Grandmother asked about you again.",
            "I found the old photos in the attic.", "{name} learned to ride a bicycle!",
            "Shall we go hiking when the weather is better?", "The cake turned out better than I thought.",
            "Do you still have my book?", "We painted the kitchen yellow.",
            "Give my regards to {name}.", "The cat sleeps on my keyboard as I write this.",
        ),
    ),
    "newsletter": (
        ("The Weekly Loop <news@loop.example>", "Garden Letter <letter@garden.example>"),
        ("Issue {number}: what we read this week", "This week in gardens", "Your digest for {day}"),
        (
            "In this issue: five articles worth your time.", "Read the full story on our site.",
            "Our editors picked {number} articles for you.",
            "You receive this letter because you subscribed.",
            "Unsubscribe with one click at any time.", "This month's interview is with {name}.",
            "Forward this issue to a friend.", "The archive has all earlier issues.",
            "What to plant before {day}.", "Readers ask, we answer.",
            "Podcast of the week: stories from {city}.", "Was this issue useful? Vote below.",
        ),
    ),
    "shopping": (
        ("Orders <orders@shop.example>", "Bookstore <service@books.example>"),
        ("Your order {number} has shipped", "Receipt for order {number}", "Your return was received"),
        (
            "Your order {number} left our warehouse.", "The parcel arrives on {day}.",
            "You can track the delivery with number {number}.", "The total is {amount} euros, tax included.",
            "One item is on back order.", "Returns are free for thirty days.",
            "Please rate the product you bought.", "The invoice is attached to this message.",
            "The courier will ring twice.", "Your basket still holds one item.",
            "We refunded {amount} euros to your card.", "Pick it up at the shop in {city}.",
        ),
    ),
    "travel": (
        ("Bookings <booking@air.example>", "Hotel Linden <desk@linden.example>"),
        ("Your flight to {city}", "Booking {number} confirmed", "Check-in is open"),
        (
            "Your flight to {city} departs on {day}.", "Online check-in is open now.",
            "The hotel expects you after three.", "Your seat is {number}A, by the window.",
            "Boarding closes twenty minutes before departure.", "Breakfast is included in your booking.",
            "The train to {city} leaves from platform nine.", "Keep your passport at hand.",
            "The booking can be cancelled until {day}.", "Your itinerary has changed slightly.",
            "One piece of luggage is included.", "The shuttle from the airport is free.",
        ),
    ),
    "finance": (
        ("City Bank <service@bank.example>", "Tax office <info@tax.example>"),
        ("Your statement for the month", "Payment of {amount} received", "Transfer {number}"),
        (
            "Your account statement is ready.", "A payment of {amount} euros was booked.",
            "The standing order to {name} was carried out on {day}.", "Your card ends in {number}.",
            "The interest for this year is {amount} euros.", "Please check the transfer list.",
            "The tax return is due on {day}.", "Your limit was not changed.",
            "We never ask for your password.", "The direct debit will be collected on {day}.",
            "The exchange rate applied was 1.07.", "A branch in {city} will close.",
        ),
    ),
    "spam": (
        ("Prize desk <win@{number}-prizes.example>", "Dr. {name} <agent{number}@mail.example>"),
        ("You won {amount}!!!", "URGENT: claim number {number}", "Re: your fortune"),
        (
            "Congratulations, you are our lucky winner!", "Claim your prize of {amount} million now!!!",
            "This offer expires in {number} minutes.", "No risk, no fee, guaranteed income.",
            "A prince in {city} needs your help.", "Click here before it is too late!",
            "Lose ten kilos in a week.", "Cheap pills without prescription.",
            "Your account will be closed unless you confirm your password.", "Send a small fee to unlock it.",
            "Work from home and earn {amount} a day.", "This is not a joke.",
        ),
    ),
}  # fmt: skip
CATEGORIES = tuple(_CATEGORIES)


def sample_message(category: str, number: int, seed: int = 0) -> bytes:
    """Return one message; the same arguments give the same bytes."""
    rng = random.Random(f"{category}/{number}/{seed}")
    senders, subjects, sentences = _CATEGORIES[category]
    sender = _filled(rng.choice(senders), rng)
    message = EmailMessage()
    message["From"] = sender
    message["To"] = "You <you@home.example>"
    message["Subject"] = _filled(rng.choice(subjects), rng)
    message["Date"] = format_datetime(_START + timedelta(hours=7 * number, minutes=rng.randrange(60)))
    message["Message-ID"] = f"<{category}.{number}.{seed}@samples.example>"
    own = rng.sample(sentences, rng.randint(2, 5))
    borrowed = [rng.choice(_CATEGORIES[rng.choice(CATEGORIES)][2]) for _ in range(rng.randint(0, 1))]
    lines = own + borrowed + rng.sample(_SHARED, rng.randint(1, 4))
    rng.shuffle(lines)
    message.set_content("\n".join(_filled(line, rng) for line in lines))
    return bytes(message)


def _filled(text: str, rng: random.Random) -> str:
    return text.format(**{name: rng.choice(values) for name, values in _WORDS.items()})


def write_samples(directory: Path, num_each: int = 60, seed: int = 0) -> int:
    """Write a mailbox whose folders are the categories, and return how many messages it has."""
    for category in CATEGORIES:
        make_directory(directory / category)
        for number in range(num_each):
            replace_file(directory / category / f"{number:03d}.eml", sample_message(category, number, seed))
    return num_each * len(CATEGORIES)
