"""Categories from folders, labels and a mapping that the user edits."""

import tarfile
from collections import Counter
from pathlib import Path

import pytest
import yaml

from macbook_optimization.errors import ConfigError, DataError
from trm.tasks.documents.labels import (
    CATEGORIES,
    CategoryMap,
    LabelCounts,
    category_of,
    default_map,
    fold,
    load_map,
    ready_map,
    starter_map,
    write_starter_map,
)
from trm.tasks.documents.mail import parse_mail
from trm.tasks.documents.mailboxes import read_messages


def mapping(tmp_path, text):
    path = tmp_path / "map.yaml"
    path.write_text(text, encoding="utf-8")
    return load_map(path)


def counts(folders=(), labels=()):
    found = LabelCounts()
    for folder in folders:
        found.add([folder], [])
    for several in labels:
        found.add([], several)
    return found


def test_without_a_mapping_the_folder_is_the_category():
    assert category_of(("work/plans",), ("Inbox",), None) == "work/plans"
    assert category_of((), ("Inbox",), None) is None


def test_the_first_category_that_matches_wins(tmp_path):
    found = mapping(tmp_path, "categories: {a: ['label:Two'], b: ['label:One', 'label:Two']}\nunmatched: c\n")
    assert found.category([], ["One", "Two"]) == "a"
    assert found.category([], ["One"]) == "b"
    assert found.category([], ["Three"]) == "c"


def test_ignored_messages_have_no_category(tmp_path):
    found = mapping(tmp_path, "categories: {a: [X]}\nignore: ['Sent*']\nunmatched: a\n")
    assert found.category(["Sent Items"], ["X"]) is None
    assert mapping(tmp_path, "categories: {a: [X]}").category(["Y"], []) is None


def test_patterns_match_folders_labels_or_both():
    found = CategoryMap(
        {"f": ("folder:A",), "l": ("label:A",), "both": ("B",), "path": ("C/D",), "all": ("E/*",)}
    )
    assert [found.category(["A"]), found.category([], ["A"])] == ["f", "l"]
    assert [found.category(["B"]), found.category([], ["B"]), found.category(["X/Y/B"])] == ["both"] * 3
    assert [found.category(["C/D"]), found.category(["X/C/D"])] == ["path", None]
    assert [found.category(["E/1"]), found.category(["E"])] == ["all", None]


def test_case_and_turkish_letters_do_not_matter():
    assert fold("İSTANBUL  Işık") == fold("istanbul ışık") == fold("istanbul is\u0327ik") == "istanbul işik"
    found = CategoryMap({"work": ("İş",), "odd": ("[a]*:",)})
    assert [found.category([name]) for name in ("İŞ", "iş", "IŞ", "Is")] == ["work", "work", "work", None]
    assert found.category(["[A]b:"]) == "odd"


def test_the_ready_mapping_has_the_ten_categories():
    ready = ready_map()
    assert set(ready.categories) == set(CATEGORIES)
    labels = {
        "spam": ["Spam", "Category Promotions", "Unread"],
        "promotional": ["Inbox", "Category Promotions", "Unread"],
        "social": ["Category Social"],
        "personal": ["Inbox", "Category Personal"],
        "shopping": ["Category Purchases", "Category Updates"],
        "other": ["Category Updates"],
    }
    assert {name: ready.category([], found) for name, found in labels.items()} == {
        name: name for name in labels
    }
    folders = {"work": "INBOX/İş", "spam": "Gereksiz", "newsletter": "Bültenler", "travel": "Seyahat"}
    assert {name: ready.category([found]) for name, found in folders.items()} == {
        name: name for name in folders
    }
    assert ready.category(["Gönderilmiş Öğeler"], ["Category Personal"]) is None
    assert ready.category([], ["Inbox", "Unread"]) is None


def test_labels_without_folders_use_the_ready_mapping():
    assert default_map(counts(labels=[["Spam"]])) == ready_map()
    assert default_map(counts(folders=["a", "b"], labels=[["Spam"]])) is None
    assert default_map(counts(folders=["a"])) is None


def test_a_starter_mapping_can_be_loaded_and_places_what_it_knows(tmp_path):
    found = counts(
        folders=["Inbox/Work", "Recipes", "Recipes", 'odd "#: name\u2028'],
        labels=[["Spam", "Unread"], ["Category Social", "Unread"], ["Trash"]],
    )
    write_starter_map(tmp_path / "map.yaml", found)
    text = (tmp_path / "map.yaml").read_text()
    assert '- "folder:Recipes"  # 2' in text
    assert '#   - "label:Unread"  # 2' in text
    loaded = load_map(tmp_path / "map.yaml")
    assert loaded.category(["Recipes"]) == "Recipes"
    assert loaded.category(["Inbox/Work"]) == "work"
    assert loaded.category(['odd "#: name\u2028']) == 'odd "#: name'
    assert loaded.category([], ["Spam"]) == "spam"
    assert loaded.category(["Recipes"], ["Trash"]) is None
    with pytest.raises(DataError, match="exists already"):
        write_starter_map(tmp_path / "map.yaml", found)


def test_a_starter_mapping_is_the_same_every_time():
    forwards = counts(folders=["b", "a", "c"])
    backwards = counts(folders=["c", "a", "b"])
    assert starter_map(forwards) == starter_map(backwards)
    assert yaml.safe_load(starter_map(counts()))["unmatched"] == "skip"


WRONG = {
    "[]": "it needs `categories:`",
    "categories: {}": "it needs `categories:`",
    "categories: {a: x}": "a should be a list",
    "categories: {a: [x], a: [y]}": "a is there twice",
    "categories: {a: [x]}\ncategories: {b: [x]}": "categories is there twice",
    "categories: {no: [x]}": "False is not a name",
    "categories: {a: [[x]]}": "is not text",
    "categories: {a: [yes]}": "put it in quotes",
    "categories: {a: [x]}\nignored: [y]": "unknown key 'ignored'",
    "categories: {a: [x]}\nunmatched: 3": "unmatched is 3",
    "categories: {a: [x": "not valid YAML",
    "a: !!python/object/apply:os.system [x]": "not valid YAML",
    "{" * 3000: "too deeply nested",
    "\x00": "not valid YAML",
    "#" * 300_000: "too large",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_a_wrong_mapping_is_refused_with_the_reason(tmp_path, text):
    with pytest.raises(ConfigError, match=WRONG[text].replace("[", r"\[")):
        mapping(tmp_path, text)


def test_all_problems_are_reported_together(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key 'x'; a should be a list .*; unmatched is"):
        mapping(tmp_path, "x: 1\ncategories: {a: y}\nunmatched: ''\n")


def test_numbers_are_names_of_folders(tmp_path):
    assert mapping(tmp_path, "categories: {old: [2019]}").category(["Archive/2019"]) == "old"


SHARED = Path(__file__).resolve().parents[5] / "shared" / "data" / "gmail_markup.tar.xz"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the Takeout in ../shared/data")
def test_a_real_takeout_has_categories(tmp_path):
    with tarfile.open(SHARED) as archive:
        archive.extractall(tmp_path, filter="data")
    [path] = tmp_path.rglob("*.mbox")
    found = LabelCounts()
    mails = [parse_mail(message.raw) for message in read_messages(path)]
    for mail in mails:
        found.add([], mail.labels)
    write_starter_map(tmp_path / "map.yaml", found)
    loaded = load_map(tmp_path / "map.yaml")
    categories = Counter(category_of([], mail.labels, loaded) for mail in mails)
    assert categories == Counter(category_of([], mail.labels, default_map(found)) for mail in mails)
    assert categories == {"promotional": 187, "spam": 156, "other": 91, "personal": 10, None: 4}
