"""The report adds up, and says what is wrong with a collection of mail."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.tasks.documents.duplicates import find_duplicates, fingerprint
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.quality import QualityCounter, language_of

TEXTS = {
    "English": [
        "Hi Bob, are we still on for lunch at the new place on Friday? Let me know.",
        "Your order has been shipped and will be with you in three days. Track it with the link below.",
    ],
    "Turkish": [
        "Merhaba Ayşe, yarınki toplantı için saat onda buluşalım, olur mu? Görüşürüz.",
        "SAYIN MÜŞTERİMİZ, SİPARİŞİNİZ KARGOYA VERİLDİ. KARGO TAKİBİ İÇİN TIKLAYIN.",
        "Sayin musterimiz, siparisiniz icin tesekkur ederiz. Kargo bu hafta size ulasacak",
        "Çok teşekkürler",
    ],
    "other": [
        "Sehr geehrte Damen und Herren, anbei erhalten Sie unsere Rechnung vom letzten Monat",
        "Bonjour, veuillez trouver notre nouvelle adresse et nos horaires pour la semaine",
    ],
    "unknown": ["", "ok", "şğı şğı", "http://x.org 12345 $$$"],
}


@pytest.mark.parametrize(
    ("language", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts]
)
def test_the_language_is_guessed(language, text):
    assert language_of(Mail("parsed", text=text)) == language


def count(*rows):
    counter = QualityCounter()
    for mail, category in rows:
        counter.add(mail, category, language_of(mail))
    used = [mail for mail, category in rows if mail.verdict != "skipped" and category is not None]
    return counter.report(find_duplicates([fingerprint(mail) for mail in used]))


mails = st.builds(
    Mail,
    verdict=st.sampled_from(["parsed", "truncated", "skipped"]),
    subject=st.sampled_from(["", "one", "two three"]),
    text=st.sampled_from(["", "the same text for all of you in the house"]),
)


@given(st.lists(st.tuples(mails, st.sampled_from([None, "a", "b"])), max_size=30))
def test_all_counts_add_up(rows):
    report = count(*rows)
    assert sum(report.verdicts.values()) == report.num_messages == len(rows)
    assert report.num_used + report.num_without_category + report.verdicts["skipped"] == len(rows)
    assert sum(report.languages.values()) == report.num_used
    assert report.num_exact_copies + report.num_near_copies <= report.num_used
    assert json.loads(json.dumps(report.to_json()))["messages"] == len(rows)
    assert report.text()


def test_reasons_are_counted_and_sorted():
    rows = [(Mail("skipped", reason), None) for reason in ("empty", "larger", "empty")]
    rows += [(Mail("truncated", "headers", subject="x"), "a")]
    report = count(*rows)
    assert report.reasons == {"skipped": {"empty": 2, "larger": 1}, "truncated": {"headers": 1}}
    assert list(report.reasons["skipped"]) == ["empty", "larger"]


def test_the_report_reads_well():
    english = "are we still on for lunch at the new place on friday"
    rows = [(Mail("parsed", subject=f"{number} x", text=english), "work") for number in range(3)]
    rows += [
        (Mail("parsed"), "spam"),
        (Mail("skipped", "empty"), None),
        (Mail("truncated", "text", "s"), None),
    ]
    assert count(*rows).text().splitlines() == [
        "Messages     6: 4 parsed, 1 truncated, 1 skipped",
        "  skipped    1: empty",
        "  truncated  1: text",
        "Used         4; 1 without a category, 1 skipped",
        "         3   75.0%  work",
        "         1   25.0%  spam",
        "Copies       2 exact, 0 nearly the same",
        "Empty        1 without subject and text",
        "Languages    English 3, unknown 1 (a guess from frequent words)",
        "Warning: Without a category: 1 of 6 messages. Such mail is not learned. "
        "`trm email mapping MAIL --out FILE` writes a mapping of folders and labels to edit.",
        "Warning: Fewer than 20 messages: work, spam.",
        "Warning: 50% of the messages are copies or near-copies of others.",
    ]


def test_unusable_collections_are_pointed_out():
    assert count((Mail("parsed", subject="x"), "a")).warnings() == [
        "One category was found; a classifier needs two."
    ]
    many = [(Mail("parsed", subject=f"unique{number}"), "a") for number in range(500)]
    found = count(*many, (Mail("parsed", subject="y"), "b")).warnings()
    assert any("20 times" in warning for warning in found)
