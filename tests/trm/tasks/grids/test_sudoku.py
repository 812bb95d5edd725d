"""Sudoku as a task: symmetries, files, datasets, and grids as text."""

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from example_batches import batch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from macbook_optimization.errors import ConfigError, DataError
from trm.tasks.base import DataSpec, Drawable, GridLayout, Interactive
from trm.tasks.dataset import open_split
from trm.tasks.grids import sudoku_puzzles as puzzles
from trm.tasks.grids.sudoku import TASK, draw_symmetry
from trm.tasks.metrics import ExactMatch

EASY = "..3.2.6..9..3.5..1..18.64....81.29..7.......8..67.82....26.95..8..2.3..9..5.1.3.."
SOLVED = "483921657967345821251876493548132976729564138136798245372689514814253769695417382"
OTHER = "4...3.......6..8..........1....5..9..8....6...7.2........1.27..5.3....4.9........"
NINE = DataSpec(81, 11, 11)
SHARED = Path(__file__).parents[4] / ".." / "shared" / "data" / "sudoku.csv.xz"


def quiet(what, done, total):
    pass


def build(directory, **options):
    TASK.build(options, directory, quiet)
    return directory


def read(text, spec=NINE):
    return TASK.read(text.encode(), spec).tokens


def test_a_sudoku_can_be_typed_and_drawn():
    assert isinstance(TASK, Interactive)
    assert isinstance(TASK, Drawable)


@pytest.mark.parametrize(("size", "box"), [(4, (2, 2)), (6, (2, 3)), (9, (3, 3))])
def test_the_layout_of_a_sudoku_has_boxes(size, box):
    spec = TASK.spec({"size": size})
    assert spec == DataSpec(size**2, size + 2, size + 2, layout=GridLayout(size, size, box))
    assert TASK.complete(DataSpec(size**2, size + 2, size + 2)) == spec


@pytest.mark.parametrize("wrong", [DataSpec(25, 7, 7), DataSpec(81, 12, 12), DataSpec(81, 11, 2)])
def test_a_dataset_of_another_task_is_refused(wrong):
    with pytest.raises(DataError):
        TASK.complete(wrong)


def test_a_sudoku_is_scored_by_exact_answers(sudoku_dataset, tmp_path):
    split = open_split(sudoku_dataset(tmp_path / "set"), "test")
    assert isinstance(TASK.scorer(split), ExactMatch)
    assert TASK.primary_metric == "exact_accuracy"


def test_a_question_without_a_solution_has_no_solution():
    np.testing.assert_array_equal(TASK.solution(read(EASY)), read(SOLVED))
    assert TASK.solution(read("5" + EASY[1:])) is None


def test_a_question_may_have_a_byte_order_mark_and_be_any_bytes():
    np.testing.assert_array_equal(TASK.read(b"\xef\xbb\xbf" + EASY.encode(), NINE).tokens, read(EASY))
    with pytest.raises(DataError, match="is not allowed"):
        TASK.read(EASY[:-1].encode() + b"\xff", NINE)


draw_rows = st.integers(0, 2**32).map(lambda seed: np.random.default_rng(seed).random((3, TASK.num_draws)))
sizes = st.sampled_from([4, 6, 9])


@given(size=sizes, draws=draw_rows)
def test_every_symmetry_has_an_inverse(size, draws):
    tokens = np.random.default_rng(0).integers(0, size + 2, (3, size, size))
    symmetry = draw_symmetry(size, draws)
    np.testing.assert_array_equal(symmetry.inverse().apply(symmetry.apply(tokens)), tokens)
    np.testing.assert_array_equal(symmetry.apply(symmetry.inverse().apply(tokens)), tokens)


@pytest.mark.slow
@settings(max_examples=12)
@given(size=sizes, draws=draw_rows)
def test_a_symmetric_copy_is_the_same_puzzle_with_the_moved_solution(size, draws):
    questions, answers = puzzles.generate(size, puzzles.BLANKS[size]["easy"], 3, seed=1)
    inputs, labels = ((grids.reshape(3, -1) + 1).astype(np.int64) for grids in (questions, answers))
    batch = TASK.augment(batch_of(inputs, labels), draws)
    moved, solved = batch.inputs, batch.labels
    for i in range(3):
        assert TASK.verify(moved[i], solved[i]) is None
    grids = (moved - 1).reshape(3, size, size).astype(np.uint8)
    found, counts = puzzles.solve(grids)
    assert (counts == 1).all()
    np.testing.assert_array_equal(found.reshape(3, -1), solved - 1)
    expected = puzzles.fingerprints(questions, answers)
    np.testing.assert_array_equal(puzzles.fingerprints(grids, found), expected)


def test_augmentation_reaches_transpositions_bands_and_digits():
    draws = np.random.default_rng(0).random((400, TASK.num_draws))
    symmetry = draw_symmetry(9, draws)
    assert 0.4 < symmetry.transpose.mean() < 0.6
    assert len({tuple(row) for row in symmetry.rows}) > 250  # of 1,296
    assert len({tuple(row) for row in symmetry.columns}) > 250
    assert len({tuple(row) for row in symmetry.digits}) > 390  # of 362,880
    assert not draw_symmetry(6, draws).transpose.any()  # boxes of 2 x 3 do not survive it


def test_ignored_labels_stay_ignored():
    labels = np.full((1, 16), -100)
    labels[0, 0] = 3
    draws = np.random.default_rng(0).random((1, 46))
    moved = TASK.augment(batch_of(np.ones((1, 16)), labels), draws)
    assert (moved.labels == -100).sum() == 15


@given(st.lists(st.sampled_from([True, False]), min_size=81, max_size=81), st.sampled_from(".0"))
def test_reading_and_writing_text_are_inverses(blank, sign):
    text = "".join(sign if hidden else digit for hidden, digit in zip(blank, SOLVED, strict=True))
    assert TASK.text(read(text)) == text.replace("0", ".")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EASY[:-1], "81 cells; this one has 80"),
        (EASY + ".", "this one has 82"),
        ("", "this one has 0"),
        (EASY[:-1] + "x", "'x' is not allowed"),
        ("33" + EASY[2:], "row 1 has two 3s"),
    ],
)
def test_a_wrong_puzzle_is_refused_with_its_reason(text, message):
    with pytest.raises(DataError, match=message):
        TASK.parse(text, 9)


def test_a_digit_beyond_the_size_is_refused():
    with pytest.raises(DataError, match="'7' is not allowed in a 6x6 puzzle"):
        TASK.parse("7" + "." * 35, 6)


def test_a_puzzle_may_be_typed_as_a_grid():
    grid = "\n".join(EASY[i : i + 9] for i in range(0, 81, 9))
    np.testing.assert_array_equal(TASK.parse(grid, 9), TASK.parse(EASY, 9))


def test_answers_are_shown_with_given_digits_and_changes_marked():
    question = read("1..." + "." * 12, DataSpec(16, 6, 6))
    answer = np.full(16, 3)
    answer[0] = 2
    before = answer.copy()
    before[1] = 4
    lines = TASK.show(question, answer, before, color=False).splitlines()
    assert lines[0] == "[1] 2* | 2  2 "
    assert lines[2] == "-------+-------"
    answer[0] = 3
    assert TASK.show(question, answer, None, color=False).startswith("!2  2 "), "a given digit was changed"
    answer[0] = 2
    assert "\033[1m1" in TASK.show(question, answer, before, color=True)


def test_the_legend_explains_what_is_shown():
    question = read("1..." + "." * 12, DataSpec(16, 6, 6))
    answer = np.full(16, 3)
    answer[0] = 2
    shown = TASK.show(question, answer, None, color=False)
    assert TASK.legend(shown, changes=False, color=False) == "given digits are in brackets"
    assert TASK.legend(shown, changes=True, color=True) == "given digits are bold; changes are green"
    answer[:2] = (3, 1)  # another digit instead of the given one, and an empty cell
    shown = TASK.show(question, answer, None, color=False)
    assert shown.startswith("!2  . ")
    assert TASK.legend(shown, changes=True, color=False) == (
        "given digits are in brackets; ! precedes a digit that replaces a given one; "
        ". is a cell that the answer leaves empty; changes are starred"
    )


def test_a_wrong_answer_is_distinguished_from_a_right_one():
    question, answer = read(EASY), read(SOLVED)
    assert TASK.verify(question, answer) is None
    wrong = answer.copy()
    wrong[2] = 2
    assert "given digit at row 1, column 3" in TASK.verify(question, wrong)
    wrong = answer.copy()
    wrong[0] = 10
    assert "two 9s" in TASK.verify(question, wrong)
    wrong[0] = 1
    assert "row 1, column 1 is empty" in TASK.verify(question, wrong)


@pytest.mark.parametrize(("size", "train", "test"), [(4, 300, 40), (6, 300, 60), (9, 100, 20)])
def test_train_and_test_share_no_puzzle_not_even_a_symmetric_copy(
    sudoku_dataset, tmp_path, size, train, test
):
    dataset = sudoku_dataset(tmp_path / "set", train, test, size)
    marks = {}
    for name, count in (("train", train), ("test", test)):
        split = open_split(dataset, name)
        assert len(split) == count
        assert len({row.tobytes() for row in split.inputs}) == count
        grids = (
            array.reshape(count, size, size).astype(np.uint8) - 1 for array in (split.inputs, split.labels)
        )
        marks[name] = puzzles.fingerprints(*grids)
    assert not set(marks["train"].tolist()) & set(marks["test"].tolist())


def canonical_4x4(puzzle):
    """The smallest of all 128 x 4! symmetric copies, one by one."""
    grid = np.array(puzzle).reshape(4, 4)
    orders = [
        [*first, *second]
        for bands in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])
        for first in (bands[0], bands[0][::-1])
        for second in (bands[1], bands[1][::-1])
    ]
    copies = []
    for base in (grid, grid.T):
        for rows in orders:
            for columns in orders:
                names = {0: 0}
                for digit in base[rows][:, columns].reshape(-1).tolist():
                    names.setdefault(digit, len(names))
                copies.append(tuple(names[d] for d in base[rows][:, columns].reshape(-1).tolist()))
    return min(copies)


def test_training_puzzles_may_have_another_number_of_blanks(tmp_path):
    build(tmp_path / "set", size=6, blanks=18, train_blanks=22, train=60, test=30)
    blanks = {name: (open_split(tmp_path / "set", name).inputs == 1).sum(1) for name in ("train", "test")}
    assert blanks["train"].tolist() == [22] * 60
    assert blanks["test"].tolist() == [18] * 30


def test_no_4x4_puzzle_is_in_both_splits_by_brute_force(sudoku_dataset, tmp_path):
    dataset = sudoku_dataset(tmp_path / "set", 60, 20)
    train, test = (
        {canonical_4x4(row - 1) for row in open_split(dataset, name).inputs.astype(int)}
        for name in ("train", "test")
    )
    assert len(train) > 20
    assert not train & test


def test_a_large_dataset_with_a_single_test_puzzle_is_built(tmp_path):
    for seed in range(5):
        dataset = build(tmp_path / str(seed), size=4, difficulty="easy", train=3000, test=1, seed=seed)
        assert len(open_split(dataset, "test")) == 1


def test_the_same_options_build_the_same_dataset(sudoku_dataset, tmp_path):
    first, second = (sudoku_dataset(tmp_path / name, 30, 8) for name in ("a", "b"))
    for path in sorted(first.rglob("*")):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes(), path


def test_a_dataset_has_the_layout_of_the_reference_implementation(sudoku_dataset, tmp_path):
    dataset = sudoku_dataset(tmp_path / "set", 10, 4)
    assert np.load(dataset / "train" / "all__inputs.npy").shape == (10, 16)
    assert np.load(dataset / "train" / "all__puzzle_indices.npy").tolist() == list(range(11))
    assert np.load(dataset / "test" / "all__puzzle_identifiers.npy").tolist() == [0] * 4
    assert {path.name for path in dataset.iterdir()} == {"train", "test", "identifiers.json", "build.json"}


@pytest.mark.slow
def test_more_puzzles_than_there_are_is_an_error(tmp_path):
    with pytest.raises(DataError, match="were requested"):
        build(tmp_path / "set", size=4, blanks=1, train=20_000_000, test=1)
    assert not (tmp_path / "set").exists()


def test_an_impossible_number_of_blanks_is_an_error(tmp_path):
    with pytest.raises(DataError, match="blanks"):
        build(tmp_path / "set", size=9, blanks=75, train=1, test=1)


def test_build_options_are_checked_like_a_recipe(tmp_path):
    with pytest.raises(ConfigError, match="did you mean blanks"):
        build(tmp_path / "set", blank=3)
    with pytest.raises(ConfigError, match="they need `from`"):
        build(tmp_path / "set", source="somewhere")


@pytest.mark.parametrize("form", ["csv", "csv of a spreadsheet", "csv without header", "lines", "gz", "xz"])
def test_puzzles_are_read_from_every_form_of_file(tmp_path, form):
    rows = [f"test,{EASY},{SOLVED},0", f"test,{OTHER},,124"]
    text = "source,question,answer,rating\n" + "\n".join(rows)
    if form == "csv of a spreadsheet":
        text = "\ufeff" + text
    if form == "csv without header":
        text = f"{EASY},{SOLVED}\n{OTHER}\n"
    if form == "lines":
        text = f"{EASY.replace('.', '0')}\n\n{OTHER}\n"
    path = tmp_path / {"gz": "p.csv.gz", "xz": "p.csv.xz"}.get(form, "p.csv")
    write = {"gz": gzip.open, "xz": lzma.open}.get(form, open)
    with write(path, "wt") as file:
        file.write(text)
    dataset = build(tmp_path / "set", **{"from": str(path)}, train=1, test=1)
    found = {TASK.text(open_split(dataset, name).inputs[0]) for name in ("train", "test")}
    assert found == {EASY, OTHER}
    answers = {TASK.text(open_split(dataset, name).labels[0]) for name in ("train", "test")}
    assert SOLVED in answers


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{EASY}\n{EASY[:-1]}\n", "line 2: A 9x9 puzzle has 81 cells; this one has 80"),
        (f"{EASY}\n33{EASY[2:]}\n", "line 2: This is not a valid sudoku: row 1 has two 3s"),
        (f"{EASY}\n{'.' * 81}\n", "line 2: the puzzle has more than one solution"),
        (f"{EASY}\n{'5' + EASY[1:]}\n", "line 2: the puzzle has no solution"),
        (f"{EASY},{SOLVED[1:]}4\n{OTHER}\n", "line 1: the stated answer is not the solution"),
        (
            f"{EASY},{SOLVED.translate(str.maketrans('12', '21'))}\n{OTHER}\n",
            "line 1: the stated answer is not",
        ),
        ("", "is empty"),
        (f"{EASY}\n", "has 1 puzzle; at least one for training and 1 for testing were requested"),
    ],
)
def test_a_file_with_a_wrong_puzzle_is_refused_by_line(tmp_path, content, message):
    path = tmp_path / "puzzles.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        build(tmp_path / "set", **{"from": str(path)}, test=1)
    assert not (tmp_path / "set").exists()


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="There is no puzzle file"):
        build(tmp_path / "set", **{"from": str(tmp_path / "nowhere.csv")})
    for name in ("p.csv", "p.csv.xz", "p.csv.gz"):
        path = tmp_path / name
        path.write_bytes(bytes(range(256)))
        with pytest.raises(DataError, match="cannot be read"):
            build(tmp_path / "set", **{"from": str(path)})


def test_a_symmetric_copy_of_a_training_puzzle_is_not_a_test_puzzle(tmp_path):
    copy = EASY.translate(str.maketrans("123456789", "912345678"))
    path = tmp_path / "p.csv"
    path.write_text(f"source,question\ntrain,{EASY}\ntest,{copy}\ntest,{OTHER}\n")
    options = {"from": str(path), "source": "train", "test_source": "test"}
    dataset = build(tmp_path / "set", **options, test=1)
    assert TASK.text(open_split(dataset, "test").inputs[0]) == OTHER
    with pytest.raises(DataError, match="Only 1 of the 2 test puzzles"):
        build(tmp_path / "other", **options, test=2)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="the real puzzles are not here (../shared/data)")
def test_the_real_sudoku_extreme_puzzles_are_read(tmp_path):
    options = {"source": "sudoku_extreme_train1k", "test_source": "forum_hardest_1905_11+"}
    dataset = build(tmp_path / "set", **options, **{"from": str(SHARED)}, train=1000, test=64)
    assert len(open_split(dataset, "train")) == 1000
    assert len(open_split(dataset, "test")) == 64
