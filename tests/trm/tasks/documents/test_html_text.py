"""The visible words of hypertext."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trm.tasks.documents.html_text import MAX_CHARACTERS, MAX_TAGS, html_to_text

TEXTS = {
    "<p>One<p>two": "One\ntwo",
    "a<b>b</b>c": "abc",
    "<td>a</td><td>b": "a\nb",
    "<style>p {}</style>x<SCRIPT>if (a<b)</ScRiPt>y": "xy",
    "<script>never closed": "",
    "a<!-- > -->b": "ab",
    "a<!-- never closed": "a",
    "3 < 4 and <5": "3 < 4 and <5",
    "&ccedil;&#351;&#x131;&nbsp;&amp;lt;": "çşı &lt;",
    "a <b": "a b",
    "İ<STYLE>x</STYLE>y": "İy",
    "a \f\f b\n\n \f\n c": "a \f\f b\nc",
}


@pytest.mark.parametrize("source", TEXTS)
def test_the_text_is_what_a_reader_sees(source):
    assert html_to_text(source).text == TEXTS[source]


def test_links_and_pictures_are_collected():
    source = """<a HREF = "https://a.org/x">x</a><img src=http://b.org/y.png><a href="javascript:z">"""
    assert html_to_text(source).links == ("https://a.org/x", "http://b.org/y.png")


@given(st.text("<>!-/ abscript&#;=\"'\n\f", max_size=400))
def test_any_text_is_accepted(source):
    assert not html_to_text(source).truncated


def test_the_text_is_bounded():
    found = html_to_text("x" * (MAX_CHARACTERS + 1))
    assert found.truncated
    assert len(found.text) == MAX_CHARACTERS


def test_the_number_of_tags_is_bounded():
    found = html_to_text("<i>" * MAX_TAGS + "kept<i>left out")
    assert found.truncated
    assert found.text == "kept"
