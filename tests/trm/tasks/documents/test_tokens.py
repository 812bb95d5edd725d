"""Messages as tokens: subject, features, and the beginning and end of the body."""

import numpy as np
import pytest

from macbook_optimization.errors import DataError
from trm.batch import PAD_TOKEN
from trm.tasks.documents.mail import Mail, parse_mail
from trm.tasks.documents.tokens import CLS_TOKEN, MAX_SUBJECT_TOKENS, SEP_TOKEN, MailTokenizer, padded

pytest.importorskip("tokenizers")


def mail(subject="", text="", **more):
    return Mail("parsed", subject=subject, text=text, **more)


MAILS = [
    mail("cheap watches", "buy cheap watches now! " * 5, header_words=("from:shop.example", "has:x-mailer")),
    mail("lunch", "shall we have lunch today? " * 5, header_words=("from:friend.example",)),
    mail("cheap lunch", "lunch is cheap today " * 5, header_words=("from:shop.example",)),
    mail("İlginç teklif", "ISPARTA'da ılık bir gün, İzmir'de değil " * 5, link_domains=("a.example",)),
] * 2


@pytest.fixture(scope="module")
def tokenizer():
    return MailTokenizer.train(MAILS, 400)


def names(tokenizer, tokens):
    return [tokenizer.tokenizer.id_to_token(int(token)) for token in tokens]


def test_a_message_is_subject_features_and_body(tokenizer):
    (tokens,) = tokenizer.encode([MAILS[0]], 64)
    found = names(tokenizer, tokens)
    assert found[:4] == ["[CLS]", "▁cheap", "▁watches", "[SEP]"]
    assert found[4:7] == ["from:shop.example", "has:x-mailer", "[SEP]"]
    assert found[7:10] == ["▁buy", "▁cheap", "▁watches"]
    assert (tokens[0], tokens[3]) == (CLS_TOKEN, SEP_TOKEN)


def test_the_same_mail_gives_the_same_vocabulary():
    first, second = (MailTokenizer.train(MAILS, 400) for _ in range(2))
    assert first.to_json() == second.to_json()


def test_a_saved_tokenizer_encodes_alike(tokenizer, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(tokenizer.to_json(), encoding="utf-8")
    loaded = MailTokenizer.load(file)
    for ours, theirs in zip(tokenizer.encode(MAILS, 32), loaded.encode(MAILS, 32), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"version": "1.0"}', '{"a": "\\ud800"}'])
def test_a_damaged_tokenizer_is_reported(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="tokenizer"):
        MailTokenizer.load(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="Cannot read"):
        MailTokenizer.load(tmp_path / "missing.json")


def test_a_long_body_keeps_its_beginning_and_its_end(tokenizer):
    text = "lunch " * 5000 + "buy now"
    for length in (16, 48):
        (tokens,) = tokenizer.encode([mail("lunch", text)], length)
        assert len(tokens) == length
        found = names(tokenizer, tokens)
        assert found[4:8] == ["▁lunch"] * 4
        assert found[-2:] == ["▁buy", "▁now"]


def test_a_long_subject_leaves_room_for_the_body(tokenizer):
    (tokens,) = tokenizer.encode([mail("lunch " * 500, "buy now")], 128)
    assert names(tokenizer, tokens)[MAX_SUBJECT_TOKENS + 1 :] == ["[SEP]", "[SEP]", "▁buy", "▁now"]
    (short,) = tokenizer.encode([mail("lunch " * 500, "buy now")], 8)
    assert len(short) == 8


def test_a_rare_feature_says_only_its_kind(tokenizer):
    (tokens,) = tokenizer.encode([mail(header_words=("from:unknown.example", "new-kind:x"))], 32)
    assert names(tokenizer, tokens) == ["[CLS]", "[SEP]", "from:*", "[SEP]"]


def test_text_cannot_imitate_features_and_marks(tokenizer):
    text = "[CLS] [SEP] [PAD] from:shop.example has:x-mailer from:*"
    (tokens,) = tokenizer.encode([mail(text, text)], 64)
    assert (tokens == CLS_TOKEN).sum() == 1
    assert (tokens == SEP_TOKEN).sum() == 2
    assert PAD_TOKEN not in tokens
    assert not set(tokens) & set(tokenizer.features.values())


def test_turkish_words_are_lowered_by_turkish_rules(tokenizer):
    upper = mail(text="ISPARTA'DA ILIK BİR GÜN, İZMİR'DE DEĞİL")
    lower = mail(text="ısparta'da ılık bir gün, izmir'de değil")
    np.testing.assert_array_equal(*tokenizer.encode([upper, lower], 64))
    assert "[UNK]" not in names(tokenizer, tokenizer.encode([upper], 64)[0])


def test_random_codes_take_one_word_each(tokenizer):
    (tokens,) = tokenizer.encode([mail(text="a8f7k2q9 x1y2z3w4")], 64)
    (others,) = tokenizer.encode([mail(text="b9g8l3r0 k5j6h7g8")], 64)
    np.testing.assert_array_equal(tokens, others)


def test_a_skipped_message_is_three_marks(tokenizer):
    (tokens,) = tokenizer.encode([parse_mail(b"")], 64)
    assert tokens.tolist() == [CLS_TOKEN, SEP_TOKEN, SEP_TOKEN]


def test_rows_are_padded_to_one_length(tokenizer):
    tokens, lengths = padded(tokenizer.encode([mail(), MAILS[0]], 32), 32)
    assert tokens.shape == (2, 32)
    assert lengths[0] == 3 < lengths[1]
    assert (tokens[0, 3:] == PAD_TOKEN).all()
