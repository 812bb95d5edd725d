"""Text as a task: vocabularies, windows, and a split without overlap."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from macbook_optimization.errors import ConfigError, DataError
from macbook_optimization.units import MIB
from trm.batch import IGNORE_LABEL
from trm.tasks.dataset import open_split
from trm.tasks.documents import text_tokens
from trm.tasks.documents.text import TASK, encode_prompt
from trm.tasks.documents.text_tokens import (
    Bytes,
    Characters,
    decoded,
    encode_texts,
    load_tokenizer,
    train_tokenizer,
)

TEXT = "".join(f"{number} is followed by {number + 1}; naïve café.\n" for number in range(200))


def build(directory, text=TEXT, **options):
    source = directory / "text.txt"
    source.write_text(text, encoding="utf-8")
    dataset = directory / "set"
    given = {"from": [str(source)], "tokenizer": "char", "context": 16, **options}
    TASK.build(given, dataset, lambda what, done, total: None)
    return dataset


def text_of(tokenizer, tokens):
    return "".join(decoded(tokenizer, iter(int(token) for token in tokens)))


@pytest.mark.parametrize("name", ["char", "bytes", "bpe"])
def test_windows_are_the_text_and_labels_are_one_token_further(tmp_path, name):
    dataset = build(tmp_path, tokenizer=name, vocab_size=300)
    tokenizer = load_tokenizer(dataset)
    train = open_split(dataset, "train")
    joined = np.asarray(train.inputs).reshape(-1)
    assert TEXT.startswith(text_of(tokenizer, joined)[:-1])
    np.testing.assert_array_equal(np.asarray(train.labels).reshape(-1)[:-1], joined[1:])
    assert train.spec.vocab_size == tokenizer.vocab_size
    assert train.inputs.dtype == (np.uint8 if tokenizer.vocab_size <= 256 else np.uint16)


@pytest.mark.parametrize("name", ["char", "bytes", "bpe"])
def test_every_token_of_the_test_split_is_a_label_once(tmp_path, name):
    dataset = build(tmp_path, tokenizer=name, vocab_size=300)
    tokenizer = load_tokenizer(dataset)
    test_text = TEXT[len(TEXT) - int(0.1 * len(TEXT)) :]
    expected = tokenizer.encode(test_text)[1:]  # the first one has nothing before it
    test = open_split(dataset, "test")
    labels = np.asarray(test.labels).reshape(-1)
    np.testing.assert_array_equal(labels[labels != IGNORE_LABEL], expected)


def test_the_end_of_every_file_is_the_test_split(tmp_path):
    files = []
    for number, letter in enumerate("abc"):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(letter * 90 + letter.upper() * 10)
    TASK.build({"from": [str(file) for file in files], "tokenizer": "bytes", "context": 4}, tmp_path / "set",
               lambda what, done, total: None)  # fmt: skip
    train, test = (bytes(np.asarray(open_split(tmp_path / "set", name).inputs).reshape(-1).tolist())
                   for name in ("train", "test"))  # fmt: skip
    assert set(train.decode()) == set("abc")
    assert set(test.decode()) == set("ABC")


def test_a_vocabulary_is_made_of_the_training_text_only(tmp_path):
    dataset = build(tmp_path, TEXT + "\u20ac" * 10)
    tokenizer = load_tokenizer(dataset)
    assert "\u20ac" not in json.loads((dataset / "tokenizer.json").read_text())["characters"]
    assert tokenizer.encode("\u20ac").tolist() == [0]
    with pytest.raises(DataError, match="has no '\u20ac'"):
        encode_prompt(tokenizer, "3 \u20ac")


@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_encoding_and_decoding_are_inverses(text):
    for tokenizer in (Bytes(), Characters("".join(sorted({*text, "a"})))):
        assert text_of(tokenizer, tokenizer.encode(text)) == text


def test_pieces_of_words_decode_to_the_same_text():
    tokenizer = train_tokenizer("bpe", [TEXT], 400)
    for text in (TEXT[:500], "a word that is not there: \u6f22\u5b57 \U0001f600"):
        assert text_of(tokenizer, tokenizer.encode(text)) == text
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 2


@pytest.mark.parametrize(("name", "dtype"), [("char", "uint8"), ("bytes", "uint8"), ("bpe", "uint16")])
def test_long_texts_have_the_tokens_of_their_parts_in_the_smallest_type(monkeypatch, name, dtype):
    """As few characters per part as a few lines, so that several groups of parts are encoded."""
    texts = [TEXT, "", "no line ends here " * 30]
    tokenizer = train_tokenizer(name, texts, 300)
    monkeypatch.setattr(text_tokens, "_CHARACTERS_AT_A_TIME", 200)
    parts = [part for text in texts for part in text_tokens._parts(text)]
    found = encode_texts(tokenizer, texts)
    assert len(parts) > 40
    assert found.dtype == dtype
    assert found.tolist() == [token for part in parts for token in tokenizer.encode(part).tolist()]
    assert text_of(tokenizer, found) == "".join(texts)
    assert encode_texts(tokenizer, [""]).tolist() == []


def test_encoding_characters_takes_little_more_memory_than_the_tokens():
    """Measured: 57 MiB, and 193 with all characters at a time."""
    text = TEXT * 1000
    tokenizer = train_tokenizer("char", [text], 0)
    tracemalloc.start()
    encode_texts(tokenizer, [text])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) > 6 * MIB
    assert peak < 2 * len(text) + 50 * MIB


ENCODE = """
from trm.tasks.documents.text_tokens import encode_texts, train_tokenizer
from macbook_optimization.memory_management import peak_bytes

text = "".join(f"{number} is followed by {number + 1}; naïve café.\\n" for number in range(290_000))
tokenizer = train_tokenizer("bpe", [text[:100_000]], 400)
encode_texts(tokenizer, [text[: len(text) // 3]])
before = peak_bytes()
encode_texts(tokenizer, [text])
print(len(text), peak_bytes() - before)
"""


@pytest.mark.slow
@pytest.mark.alone
def test_the_memory_for_encoding_word_pieces_does_not_grow_with_the_text():
    """Measured with all parts at a time: 600 MiB more for twelve parts than for four."""
    shown = subprocess.check_output([sys.executable, "-c", ENCODE], text=True)
    characters, more = map(int, shown.split())
    assert characters > 11 * MIB
    assert more < 150 * MIB


def test_the_vocabulary_survives_on_disk(tmp_path):
    dataset = build(tmp_path, tokenizer="bpe", vocab_size=300)
    again = load_tokenizer(dataset)
    assert text_of(again, again.encode(TEXT)) == TEXT
    assert TASK.vocabulary(dataset) == TASK.vocabulary(dataset)
    assert TASK.vocabulary(tmp_path / "elsewhere") is None


def test_a_text_that_is_too_short_is_refused(tmp_path):
    with pytest.raises(DataError, match="one window takes 17"):
        build(tmp_path, "abc" * 20)


def test_bytes_that_are_not_text_are_refused(tmp_path):
    source = tmp_path / "binary"
    source.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not text in UTF-8"):
        TASK.build({"from": [str(source)]}, tmp_path / "set", lambda what, done, total: None)


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="contxt"):
        TASK.check_options({"from": ["x"], "contxt": 3})
