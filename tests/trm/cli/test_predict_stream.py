"""`trm predict RUN -`: good lines are answered as they arrive, bad ones are reported by their number."""

import json
import subprocess
from pathlib import Path

import pytest
from tiny import TRM

RUN = Path(__file__).parents[2] / "fixtures" / "earlier" / "candidates"
PUZZLE = "1.....3..4.....2"


def predict(given, *options):
    command = [TRM, "predict", RUN, "-", *options]
    return subprocess.run(command, input=given, capture_output=True, timeout=60)


@pytest.mark.slow
def test_bad_lines_are_reported_by_number_in_the_input():
    done = predict(b"12\n\n\xff\x00\x1b[31m\n" + b"1" * (3 << 20) + b"\n")
    assert done.returncode == 1
    assert done.stdout == b""
    first, second, third, error = done.stderr.decode().splitlines()
    assert first == "line 1: A 4x4 puzzle has 16 cells; this one has 2"
    assert second.startswith("line 3: ")
    assert third == "line 4: It is longer than 1,048,576 bytes"
    assert error == "error: 3 of 3 puzzles could not be read"


@pytest.mark.slow
@pytest.mark.parametrize("given", [b"", b"\n \n"])
def test_an_empty_input_is_an_error(given):
    done = predict(given, "--json")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"error: There was no puzzle on standard input\n"


@pytest.mark.slow
def test_an_argument_that_is_not_text_is_refused():
    done = subprocess.run([TRM, "predict", RUN, b"\xff" * 16], capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"is not allowed in a 4x4 puzzle" in done.stderr


@pytest.mark.slow
def test_a_line_is_answered_before_the_next_one_is_written():
    command = [TRM, "predict", RUN, "-", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:

        def ask(*lines):
            process.stdin.write("".join(f"{line}\n" for line in lines))
            process.stdin.flush()
            return [json.loads(process.stdout.readline()) for line in lines if line]

        (first,) = ask(PUZZLE)
        bad, good = ask("", "12", "." * 16)
        process.stdin.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == "error: 1 of 3 puzzles could not be read\n"
    assert (first["line"], first["question"]) == (1, PUZZLE)
    assert first["valid"] == (first["problem"] is None)
    assert bad == {"line": 3, "error": "A 4x4 puzzle has 16 cells; this one has 2"}
    assert (good["line"], len(good["answer"])) == (4, 16)


@pytest.mark.slow
def test_the_good_lines_of_a_file_are_answered_and_the_bad_ones_counted():
    done = predict(b"\n".join([PUZZLE.encode()] * 70 + [b"bad"] + [PUZZLE.encode()]))
    assert done.returncode == 1
    assert done.stdout.count(b"given digits are in brackets") == 71
    assert done.stderr.decode().splitlines()[0].startswith("line 71: ")
    assert b"error: 1 of 72 puzzles could not be read" in done.stderr
