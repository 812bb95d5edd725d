"""A real Google Takeout, from its labels to decisions, with a mapping that the user has edited."""

import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from trm.cli import cli
from trm.mail.model import load_model
from trm.runs.directory import MAIL

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "gmail_markup.tar.xz"
NUM_MESSAGES = 448

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.exists(), reason="needs the Takeout in ../shared/data"),
]


def run_command(*arguments):
    done = CliRunner().invoke(cli, ["email", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def takeout(tmp_path_factory):
    directory = tmp_path_factory.mktemp("takeout")
    with tarfile.open(SHARED) as archive:
        archive.extractall(directory, filter="data")
    [path] = directory.rglob("*.mbox")
    return path


def edited(text):
    """Edit a starter mapping: rename a category, and use a label that was left over."""
    assert 'label:Important"  # 11' in text
    text = text.replace('  "other":\n', '  "newsletter":\n')
    text = text.replace("categories:\n", 'categories:\n  "work":\n    - "label:Important"\n', 1)
    return text


def test_a_takeout_is_sorted_by_an_edited_mapping(takeout, tmp_path):
    mapping, run = tmp_path / "mapping.yaml", tmp_path / "run"
    assert run_command("mapping", takeout, "--out", mapping, "--json")[0]["messages"] == NUM_MESSAGES
    mapping.write_text(edited(mapping.read_text()))
    trained = run_command("train", takeout, "--run", run, "--mapping", mapping, "--linear", "--json")[0]
    quality = trained["quality"]
    categories = quality["categories"]
    assert set(categories) == {"work", "spam", "promotional", "personal", "newsletter"}
    assert sum(quality["verdicts"].values()) == NUM_MESSAGES
    skipped = quality["verdicts"]["skipped"]
    assert categories["work"] <= 11
    assert sum(categories.values()) + quality["without_category"] + skipped == NUM_MESSAGES
    facts = load_model(run / MAIL).facts
    assert facts["documents"] + trained["held_out"]["messages"] == quality["used"]

    answers = run_command("classify", run, takeout, "--json")
    assert len({answer["path"] for answer in answers}) == len(answers) == NUM_MESSAGES
    verdicts = Counter(answer["verdict"] for answer in answers)
    assert verdicts == Counter({name: count for name, count in quality["verdicts"].items() if count})
    assert {answer["category"] for answer in answers if answer["verdict"] != "skipped"} <= set(categories)

    measured = run_command("eval", run, takeout, "--mapping", mapping, "--json")[0]
    assert measured["without_category"] == quality["without_category"]
    assert measured["unknown_categories"] == {}
    by_category = {each["name"]: each["number"] for each in measured["columns"][0]["categories"]}
    assert by_category == categories
    # Nine in ten of these were trained on: this only says that the categories of the mapping were learned.
    assert measured["columns"][0]["accuracy"] >= 0.85
