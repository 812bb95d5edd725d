"""The supervisor of a host: listens for other machines, and keeps the size of the last group.

The socket stays open while trainers come and go, so that guests find the host at the same place. It is bound
to one address, and without it nothing listens.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from macbook_optimization.errors import ConfigError
from macbook_optimization.input_files import read_input
from trm.backends.world import CLOSED_PORTS, Address
from trm.runs.directory import JOIN_TOKEN, Run, make_run_directory
from trm.runs.events import MachineLost
from trm.training.log import RunLog
from trm.training.machines import GUESTS, LOST, Seat

DEFAULT_PORT = 29400
REUNION_SECONDS = 6.0  # to wait for the guests of the last world
BACKLOG = 64
TOKEN_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # without those that look alike
TOKEN_LENGTH = 5


@dataclass
class Hosting:
    """A supervisor's record of the machines of its run."""

    address: Address
    descriptor: int  # of the listening socket
    timeout_seconds: float
    guests: int = 0  # of the last world, and those who arrived since
    slots_per_second: float | None = None
    token: str = ""  # of the run

    @property
    def place(self) -> str:
        """The address to pass to `trm join`: ADDR:PORT/TOKEN."""
        return f"{self.address}/{self.token}"

    def seat(self) -> Seat:
        return Seat(
            address=self.address,
            name=socket.gethostname(),
            timeout_seconds=self.timeout_seconds,
            descriptor=self.descriptor,
            guests=self.guests,
            wait_seconds=REUNION_SECONDS,
            slots_per_second=self.slots_per_second,
            token=self.token,
        )

    def receive(self, row: list[Any], log: RunLog) -> bool:
        """Record what a trainer reports about machines; return whether the row was such a report."""
        kind, *values = row
        if kind == GUESTS:
            self.guests = values[0]
        elif kind == LOST:
            names, cause = values
            log.event(MachineLost(names, cause))
            log.message(
                f"Lost {', '.join(names) or 'a machine'} ({cause}). Continuing with the remaining machines."
            )
        return kind in (GUESTS, LOST)

    def not_formed(self, log: RunLog) -> None:
        """Record that machines did not connect in time, and do not wait for them the next time."""
        self.receive([GUESTS, 0], log)
        self.receive([LOST, [], CLOSED_PORTS], log)


@contextmanager
def listening(where: str, timeout_seconds: float, *, allow_public: bool) -> Iterator[Hosting]:
    """Listen at an address that other machines of a trusted network can reach."""
    address = parse_address(where, allow_public=allow_public)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen at {address}: {error.strerror}",
            hint="Use an address of this machine and, with ADDR:PORT, a port that is free.",
        ) from error
    with listener:
        port = listener.getsockname()[1]
        yield Hosting(Address(address.host, port), listener.fileno(), timeout_seconds)


def token_of(run: Run) -> str:
    """Return the token of a run, which is drawn when the run first listens and is the same from then on.

    It prevents joining the wrong run by mistake. It is not a secret: whoever connects can read it.
    """
    letters = f"[{TOKEN_LETTERS}]{{{TOKEN_LENGTH}}}"
    file = run.path / JOIN_TOKEN
    with suppress(OSError):
        token = read_input(file, 100).decode(errors="replace").strip()
        if re.fullmatch(letters, token):
            return token
    token = "".join(secrets.choice(TOKEN_LETTERS) for _ in range(TOKEN_LENGTH))
    make_run_directory(run)
    run.write(JOIN_TOKEN, f"{token}\n")
    return token


def split_token(place: str) -> tuple[str, str]:
    """Divide ADDR:PORT/TOKEN into address and token; without a token, any run may be joined."""
    address, _, token = place.partition("/")
    return address, token


def parse_address(text: str, *, allow_public: bool, default_port: int = DEFAULT_PORT) -> Address:
    """Read ADDR or ADDR:PORT. A name is resolved; public addresses are refused unless they are allowed."""
    host, port = _host_and_port(text, default_port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        address = ipaddress.ip_address(found)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{host!r} is not an address: {error}", hint="For example 192.168.2.1 or 192.168.2.1:29400."
        ) from error
    if address.is_unspecified:
        raise ConfigError(
            f"{host} stands for every interface of this machine",
            hint="Name the address of the one that leads to the other machines.",
        )
    if address.is_global and not allow_public:
        raise ConfigError(
            f"{address} is a public address; whoever reaches it could take part in the training",
            hint="Use a cable between the machines, or a tunnel (WireGuard, ssh -w); --allow-public insists.",
        )
    return Address(str(found), port)


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.endswith("]")):
        return text.strip("[]"), default_port  # an IPv6 address has colons of its own
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{port!r} is not a port", hint="For example 192.168.2.1:29400.")
    return host.strip("[]"), int(port)
