"""A resident classifier: the model is loaded once, and messages arrive through a Unix socket.

Every client has a thread, and there are at most a few of them; others wait to be accepted. A thread receives
one message within limits of bytes and time, takes a parser from those that are free, and answers. Parsers are
processes with limits of their own, so a hostile message costs one of them at most seconds. Whatever a client
does, it can only delay itself.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Literal

from macbook_optimization.errors import LaptopError
from macbook_optimization.json_types import JsonObject
from trm.mail import corrections
from trm.mail.answers import answer_of
from trm.mail.deciding import Classifier
from trm.mail.reading import Features, features_of
from trm.mail.sockets import TooManyBytesError, discard, is_trusted_peer, receive
from trm.tasks.documents.mailboxes import Message
from trm.tasks.documents.mime import MAX_MESSAGE_BYTES
from trm.tasks.documents.parse_pool import ParsePool

_KEY = "-"  # of a message without a path; clients replace it
_WARM_UP = b"Subject: warm-up\n\nThis starts the parser.\n"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    clients: int = 8  # at the same time; each may hold a message of the largest size
    message_bytes: int = MAX_MESSAGE_BYTES
    receive_seconds: float = 10.0
    send_seconds: float = 5.0
    stop_seconds: float = 10.0  # for answers that are under way when the server is stopped
    idle_seconds: float | None = None  # without a request, after which the server ends


@dataclass(slots=True)
class Counts:
    answered: int = 0
    refused: int = 0  # too large, too slow, or of another user
    lost: int = 0  # the client was gone


class CurrentModel:
    """The model with the corrections that are on disk now."""

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier
        self._path = classifier.directory / corrections.FILE_NAME
        self._seen: tuple[int, int, int] | None = (-1, -1, -1)  # the first request loads what is there
        self._lock = threading.Lock()

    def get(self) -> Classifier:
        """Return the classifier; load the corrections again if `learn` or `forget` replaced them."""
        with self._lock:
            found = self._signature()
            if found != self._seen:
                fitted = self._classifier.fitted
                columns = len(fitted.vocabulary.idf)
                loaded = corrections.load_corrections(self._classifier.directory, columns)
                model = corrections.apply_corrections(fitted, loaded)
                self._classifier = replace(self._classifier, corrections=loaded, model=model)
                self._seen = found
            return self._classifier

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            facts = os.stat(self._path)
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_size, facts.st_mtime_ns


class Server:
    """Answers requests until `stop` is called. Open one with `open_server`."""

    def __init__(
        self, model: CurrentModel, pools: list[ParsePool[Features]], max_error: float, limits: ServerLimits
    ) -> None:
        self.counts = Counts()
        self._model = model
        self._max_error = max_error
        self._limits = limits
        self._free: SimpleQueue[ParsePool[Features]] = SimpleQueue()
        for pool in pools:
            self._free.put(pool)
        self._clients: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()  # of the clients and the counts
        self._is_stopped = False
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)

    def close(self) -> None:
        self._woken.close()
        self._waker.close()

    def stop(self) -> None:
        """Let `run` return. This may be called in a signal handler."""
        self._is_stopped = True
        self._wake()

    def run(self, listener: socket.socket) -> None:
        """Accept connections until the server is stopped or idle, then wait for requests under way."""
        listener.setblocking(False)
        last_request = time.monotonic()
        while not self._is_stopped:
            is_full = len(self._clients) >= self._limits.clients
            watched = [self._woken] if is_full else [self._woken, listener]
            ready, _, _ = select.select(watched, [], [], self._seconds_left(last_request))
            if not ready:
                return
            if self._woken in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            if listener in ready:
                self._accept(listener)
            last_request = time.monotonic()
        self._end_clients()

    def _seconds_left(self, last_request: float) -> float | None:
        """Return how long to wait for the next event; None without a limit."""
        if self._limits.idle_seconds is None or self._clients:
            return None
        return max(0.0, last_request + self._limits.idle_seconds - time.monotonic())

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):  # the client is gone
            return
        thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
        with self._lock:
            self._clients[thread] = connection
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one client, in a thread of its own."""
        try:
            with connection:
                facts = self._facts(connection)
                connection.settimeout(self._limits.send_seconds)
                connection.sendall(json.dumps(facts).encode() + b"\n")
                discard(connection)
                self._count("refused" if "error" in facts else "answered")
        except (ConnectionError, TimeoutError):  # the client is gone, or does not take the answer
            self._count("lost")
        finally:
            with self._lock:
                del self._clients[threading.current_thread()]
            self._wake()

    def _facts(self, connection: socket.socket) -> JsonObject:
        """Receive a message and return the answer, or why there is none."""
        limits = self._limits
        if not is_trusted_peer(connection):
            return {"error": "This socket belongs to another user"}
        try:
            raw = receive(connection, limits.message_bytes, limits.receive_seconds)
        except TooManyBytesError:
            return {"error": f"The message is larger than {limits.message_bytes // 2**20} MiB"}
        except TimeoutError:
            return {"error": f"The message did not arrive within {limits.receive_seconds:g} s"}
        if self._is_stopped:  # what arrived may have been cut short
            return {"error": "The server is stopping"}
        return self._decide(raw)

    def _count(self, name: Literal["answered", "refused", "lost"]) -> None:
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + 1)

    def _decide(self, raw: bytes) -> JsonObject:
        pool = self._free.get()
        try:
            classifier = replace(self._model.get(), pool=pool)
            ((read, decision),) = classifier.decide([Message(_KEY, raw)], self._max_error)
            return answer_of(read, decision).to_json()
        except LaptopError as error:  # the corrections cannot be read, or a parser does not start
            return {"error": str(error), "hint": error.hint}
        finally:
            self._free.put(pool)

    def _wake(self) -> None:
        with suppress(OSError):  # it will wake up anyway, or has ended
            self._waker.send(b"\0")

    def _end_clients(self) -> None:
        """Refuse messages that have not arrived completely, and wait for the other answers."""
        with self._lock:
            clients = dict(self._clients)
        for connection in clients.values():
            with suppress(OSError):  # it has just been closed
                connection.shutdown(socket.SHUT_RD)
        end = time.monotonic() + self._limits.stop_seconds
        for thread in clients:
            thread.join(max(0.0, end - time.monotonic()))


@contextmanager
def open_server(
    classifier: Classifier, jobs: int, max_error: float, limits: ServerLimits
) -> Iterator[Server]:
    """Start the parsers, so that the first request does not wait for them."""
    with ExitStack() as stack:
        parse = partial(features_of, num_tokens=classifier.model.num_tokens)
        pools = [stack.enter_context(ParsePool(parse, 1)) for _ in range(jobs)]
        for pool in pools:
            list(pool.map([Message(_KEY, _WARM_UP)]))
        server = Server(CurrentModel(classifier), pools, max_error, limits)
        try:
            yield server
        finally:
            server.close()
