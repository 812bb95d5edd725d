"""A display in another process."""

from tiny import Recorder

from trm.display import PROGRESS_SECONDS, Forwarded, show_forwarded


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def test_everything_arrives_but_progress_that_follows_too_soon():
    sent = []
    clock = Clock()
    display = Forwarded(sent.append, clock)
    display.status("Starting", plain=True)
    display.message("Hello")
    for done in range(10):
        display.update("training", done, 10, f"loss {done}")
        clock.seconds += PROGRESS_SECONDS / 2 + 0.001
    display.update("training", 10, 10)
    shown = [row[2] for row in sent if row[0] == "update"]
    assert sent[:2] == [["status", "Starting", True], ["message", "Hello"]]
    assert shown == [0, 2, 4, 6, 8, 10]


def test_work_that_was_never_shown_need_not_end():
    sent = []
    display = Forwarded(sent.append)
    display.update("this step", 4, 4)
    assert sent == []


def test_the_other_process_shows_what_was_sent():
    seen = []
    recorder = Recorder(lambda facts, done: seen.append((facts, done)))
    display = Forwarded(lambda row: show_forwarded(recorder, row))
    display.update("training", 1, 2, "loss 1", "2 samples/s")
    display.status("x")
    display.message("done")
    assert seen == [("loss 1  2 samples/s", 1)]
    assert recorder.messages == ["done"]


def test_work_continues_when_the_other_process_has_gone():
    def broken(row):
        raise BrokenPipeError

    display = Forwarded(broken)
    display.message("hello")
    display.update("training", 1, 2)
