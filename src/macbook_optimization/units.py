"""Units: 1 MiB is 2**20 bytes. Sizes are bytes inside the program and MiB or GiB only when printed."""

KIB = 2**10
MIB = 2**20
GIB = 2**30


def counted(number: int, noun: str) -> str:
    """Return "1 step", "2 steps" or "1,000 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
