"""The examples in a report are real answers of the best checkpoint, drawn in another process."""

import base64
import shutil
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from recorded import recorded_run

from trm.reports.examples import MAX_PER_KIND, find_examples
from trm.reports.facts import gather
from trm.reports.report import as_html
from trm.runs.directory import Run

EARLIER = Path(__file__).parents[2] / "fixtures" / "earlier"


@pytest.mark.slow
def test_answers_of_a_trained_run_are_drawn(tmp_path, monkeypatch):
    shutil.copytree(EARLIER, tmp_path / "earlier")
    monkeypatch.chdir(tmp_path / "earlier")
    run = Run(Path("candidates"))
    examples = find_examples(run.path)
    assert examples.problem is None
    assert examples.num_tried > 0
    assert 0 < len(examples.shown) <= 2 * MAX_PER_KIND
    assert sum(example.is_right for example in examples.shown) == min(examples.num_right, MAX_PER_KIND)
    for example in examples.shown:
        assert max(Image.open(BytesIO(base64.b64decode(example.png))).size) <= 320
    assert as_html(gather(run, examples)).count("data:image/png") == len(examples.shown)


def test_a_run_without_checkpoint_has_no_examples_and_says_why(tmp_path):
    examples = find_examples(recorded_run(tmp_path / "run").path)
    assert examples.shown == []
    assert "no usable checkpoint" in examples.problem


def test_a_time_limit_is_kept(tmp_path):
    examples = find_examples(recorded_run(tmp_path / "run").path, timeout_seconds=0.05)
    assert "limit" in examples.problem
