"""Words and n-grams, in English and Turkish."""

from trm.tasks.documents.mail import Mail
from trm.tasks.documents.words import ngrams, words


def test_turkish_words_are_lowered_by_their_own_rules():
    assert words("ISPARTA'DA IŞIK") == ["ısparta", "da", "ışık"]


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
