"""What is learned: files become token arrays, and answers become something a person reads."""

from trm.tasks.base import Task


def load_task(name: str) -> Task:
    from trm.tasks import sudoku

    return {sudoku.TASK.name: sudoku.TASK}[name]
