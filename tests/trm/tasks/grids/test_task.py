"""A grid task of a user: what follows from symbols, generation and rules."""

import numpy as np
import pytest
from example_batches import answers_of, batch_of

from macbook_optimization.errors import DataError
from macbook_optimization.output_files import GIF, PNG, OutputFile
from trm.tasks.base import DataSpec, Drawable, GridLayout, Interactive
from trm.tasks.dataset import open_split
from trm.tasks.grids import GridOptions, GridTask
from trm.tasks.grids.pictures import write_gif, write_png

QUESTION = "ab..ba..aa..bb.."
ANSWER = "abbabaabaaaabbbb"
FOUR = DataSpec(16, 4, 4)


class MirrorOptions(GridOptions):
    letters: int = 2


class Mirror(GridTask):
    """Completes a picture that is symmetric from left to right; as in docs/tasks.md."""

    name = "mirror"
    Options = MirrorOptions

    def symbols(self, size):
        return ".ab"

    def generate(self, options, count, first):
        rng = np.random.default_rng([options.seed, first])
        shape = (count, options.size, options.size // 2)
        left = rng.integers(1, 1 + options.letters, shape, dtype=np.int8)
        answers = np.concatenate((left, left[:, :, ::-1]), axis=2)
        questions = answers.copy()
        questions[:, :, options.size // 2 :] = 0
        return questions, answers

    def verify_grid(self, question, answer):
        given = question > 0
        if (answer[given] != question[given]).any():
            return "a given cell was changed"
        return None if (answer == answer[:, ::-1]).all() else "the sides differ"


class EarlierMirror(Mirror):
    """With the name that the rules had in earlier task files."""

    def judge_grid(self, question, answer):
        return "never right"


TASK = Mirror()


def quiet(what, done, total):
    pass


def read(text):
    return TASK.read(text.encode(), FOUR).tokens


def test_a_user_task_can_be_trained_typed_and_drawn(tmp_path):
    assert isinstance(TASK, Interactive)
    assert isinstance(TASK, Drawable)
    options = {"size": 4, "train": 100, "test": 20, "letters": 2}
    TASK.build(options, tmp_path / "set", quiet)
    train, test = (open_split(tmp_path / "set", name) for name in ("train", "test"))
    assert TASK.complete(train.spec) == TASK.spec(options) == DataSpec(16, 4, 4, layout=GridLayout(4, 4))
    assert (len(train), len(test)) == (100, 20)
    assert not {row.tobytes() for row in train.inputs} & {row.tobytes() for row in test.inputs}
    assert (train.difficulties() == 8).all()
    scorer = TASK.scorer(test)
    batch = test.batch(np.arange(20))
    scorer.add(batch, answers_of(batch.labels))
    assert scorer.metrics().scalars[TASK.primary_metric] == 1.0


def test_a_question_is_read_verified_and_shown():
    question, answer = read(QUESTION), read(ANSWER)
    assert TASK.text(question) == QUESTION
    assert TASK.verify(question, answer) is None
    assert TASK.verify(question, read(ANSWER[:-1] + "a")) == "the sides differ"
    assert TASK.show(question, answer, question, color=False).splitlines()[0] == "a b b*a*"
    assert "\033[32mb\033[0m" in TASK.show(question, answer, question, color=True)
    assert TASK.legend("a b b*a*", changes=True, color=False) == "changes are starred"
    assert TASK.solution(question) is None


def test_a_task_without_symmetries_is_not_augmented():
    batch = batch_of([read(QUESTION)], [read(ANSWER)])
    augmented = TASK.augment(batch, np.zeros((1, 0)))
    np.testing.assert_array_equal(augmented.inputs, batch.inputs)
    np.testing.assert_array_equal(augmented.labels, batch.labels)


def test_the_earlier_name_of_the_rules_is_accepted():
    assert EarlierMirror().verify(read(QUESTION), read(ANSWER)) == "never right"


def test_a_class_without_rules_is_not_a_task():
    class Unfinished(GridTask):
        def symbols(self, size):
            return "ab"

        def generate(self, options, count, first):
            raise NotImplementedError

    with pytest.raises(TypeError, match="verify_grid"):
        Unfinished()


@pytest.mark.parametrize("several_answers", [False, True])
def test_a_task_without_a_solver_reads_a_file_that_states_the_answers(tmp_path, several_answers):
    task = Mirror()
    task.several_answers = several_answers
    file = tmp_path / "pictures.csv"
    other = ANSWER.translate(str.maketrans("ab", "ba"))
    file.write_text(f"question,answer\n{QUESTION},{ANSWER}\n{other.replace('b', '.')},{other}\n")
    task.build({"size": 4, "from": str(file), "test": 1}, tmp_path / "set", quiet)
    labels = {TASK.text(open_split(tmp_path / "set", name).labels[0]) for name in ("train", "test")}
    assert labels == {ANSWER, other}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "line 2: the answer is missing, and the task mirror has no solver"),
        (ANSWER[:-1] + "a", "line 2: the stated answer is wrong: the sides differ"),
        (ANSWER[:-1], "line 2: A 4x4 puzzle has 16 cells; this one has 15"),
    ],
)
def test_a_missing_or_wrong_answer_is_reported_where_there_is_no_solver(tmp_path, answer, message):
    file = tmp_path / "pictures.csv"
    file.write_text(f"question,answer\n{QUESTION},{answer}\n{ANSWER},{ANSWER}\n")
    with pytest.raises(DataError, match=message):
        TASK.build({"size": 4, "from": str(file), "test": 1}, tmp_path / "set", quiet)
    assert not (tmp_path / "set").exists()


def test_all_problems_of_a_file_are_counted_and_the_first_are_shown(tmp_path):
    file = tmp_path / "pictures.csv"
    file.write_text("question,answer,rating\n" + f"{QUESTION},{ANSWER},x\n" * 8)
    with pytest.raises(DataError, match="line 2: the rating 'x' is not a number") as refused:
        TASK.build({"size": 4, "from": str(file), "test": 1}, tmp_path / "set", quiet)
    lines = str(refused.value).splitlines()
    assert len(lines) == 6
    assert lines[-1].strip() == "and 2 more"


def test_pictures_mark_wrong_cells_and_are_written_as_files(tmp_path):
    question, answer = read(QUESTION), read(ANSWER)
    wrong = answer.copy()
    wrong[3] = 3
    pictures = [TASK.picture(question, each, answer) for each in (question, wrong, answer)]
    marked = [[tile.wrong for row in picture.tiles for tile in row] for picture in pictures]
    assert [sum(marks) for marks in marked] == [8, 1, 0]
    assert pictures[0].box == (0, 0)
    write_png(OutputFile(tmp_path / "answer.png", PNG), pictures[-1])
    write_gif(OutputFile(tmp_path / "answer.gif", GIF), pictures)
    assert (tmp_path / "answer.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "answer.gif").read_bytes()[:3] == b"GIF"
    with pytest.raises(DataError, match="cannot be written"):
        write_png(OutputFile(tmp_path / "none" / "answer.png", PNG), pictures[-1])
