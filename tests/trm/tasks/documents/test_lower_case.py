"""Lower case, in English and Turkish."""

from trm.tasks.documents.lower_case import is_turkish, lower


def test_turkish_text_is_lowered_by_its_own_rules():
    assert lower("IŞIK ve İĞDE, DIŞARI") == "ışık ve iğde, dışarı"


def test_english_text_is_lowered_by_its_own_rules():
    assert lower("INBOX LIMIT") == "inbox limit"
    assert lower("a flight to İzmir" + " and back" * 50) == "a flight to izmir" + " and back" * 50
    assert not is_turkish("A mail that names Işık once" + " in many words" * 50)
