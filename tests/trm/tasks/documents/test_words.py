"""Words and n-grams, in English and Turkish."""

from trm.tasks.documents.mail import Mail
from trm.tasks.documents.words import is_turkish, lower, ngrams, words


def test_turkish_text_is_lowered_by_its_own_rules():
    assert lower("IŞIK ve İĞDE, DIŞARI") == "ışık ve iğde, dışarı"
    assert words("ISPARTA'DA IŞIK") == ["ısparta", "da", "ışık"]


def test_english_text_is_lowered_by_its_own_rules():
    assert lower("INBOX LIMIT") == "inbox limit"
    assert lower("a flight to İzmir" + " and back" * 50) == "a flight to izmir" + " and back" * 50
    assert not is_turkish("A mail that names Işık once" + " in many words" * 50)


def test_long_numbers_are_replaced_by_their_length_and_long_words_cut():
    assert words("call 05321234567 now 12345 " + "x" * 100) == ["call", "#11", "now", "12345", "x" * 40]


def test_subject_headers_links_and_attachments_are_marked():
    mail = Mail(
        "parsed", "", "Big sale", "buy now", header_words=("a:b",), link_domains=("c",), attachments=("d",)
    )
    assert list(ngrams(mail)) == [
        *("big", "sale", "buy", "now", "big sale", "sale buy", "buy now"),
        *("S:big", "S:sale", "H:a:b", "L:c", "A:d"),
    ]
