"""No `trm email` command opens a network connection.

Real commands run behind two guards. The kernel kills every process, parsers included, that creates a socket
of another family than AF_UNIX, whichever library asks for it (seccomp, Linux). And an audit hook of the
interpreter writes down every such attempt and every lookup of a name, so that one in a parser, which the
command would survive, is found as well. The first test shows that both guards work.
"""

import ctypes
import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager

import pytest
from tiny import TRM

from trm.cli.email import email

# (audit architecture, number of the system call `socket`), from linux/audit.h and asm/unistd.h
MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
ALLOW, KILL = 0x7FFF0000, 0x80000000  # SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
IO_URING_SETUP = 425  # the same everywhere; it could create sockets without the call
NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2

HOOK = """
import os, sys

def watch(event, arguments):
    is_socket = event == "socket.__new__" and arguments[1] != 1  # AF_UNIX
    is_lookup = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
    if is_socket or is_lookup:
        with open(os.environ["TRM_TEST_NETWORK_LOG"], "a") as log:
            log.write(f"{event} {arguments[1:]} {sys.argv}\\n")

sys.addaudithook(watch)
"""


def install_filter():
    """Let the kernel kill this process and its children when they create a socket for a network."""
    architecture, number = MACHINES[platform.machine()]
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (EQUAL, 4, 0, IO_URING_SETUP),
        (EQUAL, 0, 2, number),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (EQUAL, 0, 1, socket.AF_UNIX),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, KILL),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    description = ctypes.create_string_buffer(struct.pack("HL", len(program), ctypes.addressof(buffer)))
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    address = ctypes.addressof(description)
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, FILTER, address, 0, 0)):
        if library.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def can_filter():
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    return subprocess.run(["true"], preexec_fn=install_filter, check=False).returncode == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Return a function that starts a command behind the guards, and the log of attempts."""
    try:
        is_available = can_filter()
    except (OSError, subprocess.SubprocessError):
        is_available = False
    if not is_available:
        pytest.skip("the proof needs seccomp filters (Linux on x86-64 or ARM64)")
    directory = tmp_path_factory.mktemp("guard")
    (directory / "sitecustomize.py").write_text(HOOK)
    log = directory / "log"
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRM_TEST_NETWORK_LOG": str(log)}

    def start(*command, **keywords):
        return subprocess.Popen(
            list(map(str, command)), env=environment, preexec_fn=install_filter, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **keywords,
        )  # fmt: skip

    return start, log


CONTROLS = {
    "python": "import socket; socket.socket(socket.AF_INET)",
    "IPv6": "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "native code": "import ctypes; ctypes.CDLL(None).socket(2, 1, 0)",
    "lookup": "import socket; socket.getaddrinfo('example.org', 80)",
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("where", ["command", "worker"])
def test_the_guards_notice_a_connection(guarded, control, where):
    """Also one in a process that the command starts; that one the interpreter has to write down."""
    start, log = guarded
    log.unlink(missing_ok=True)
    code = CONTROLS[control]
    if where == "worker":
        call = f"subprocess.call([sys.executable, '-c', {code!r}])"
        code = f"import subprocess, sys; sys.exit({call} != {-signal.SIGSYS})"
    process = start(sys.executable, "-c", code)
    process.communicate(timeout=60)
    if control != "lookup":  # a lookup may end before a socket is needed, without a resolver
        assert process.returncode == (-signal.SIGSYS if where == "command" else 0)
    assert log.exists() == (control != "native code")
    log.unlink(missing_ok=True)


def test_the_guards_allow_what_is_no_network(guarded):
    start, log = guarded
    code = "import socket; socket.socketpair(); socket.socket(socket.AF_UNIX); print('fine')"
    process = start(sys.executable, "-c", code)
    assert process.communicate(timeout=60)[0] == b"fine\n"
    assert (process.returncode, log.exists()) == (0, False)


@contextmanager
def serving(start, directory):
    server = start(TRM, "email", "serve", "run", "--socket", "s", "--jobs", "1", "--json", cwd=directory)
    try:
        assert server.stdout.readline().startswith(b"{")
        yield server
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=60)
    finally:
        server.kill()
    assert (server.returncode, errors) == (0, b"")
    assert json.loads(output)["answered"] == 2


@pytest.mark.slow
def test_no_mail_command_opens_a_network_connection(guarded, tmp_path):
    start, log = guarded
    used = set()

    def trm(*arguments, given=b""):
        used.add(arguments[0])
        process = start(TRM, "email", *arguments, cwd=tmp_path)
        output, errors = process.communicate(given, timeout=300)
        assert process.returncode == 0, f"{arguments}: {process.returncode} {errors.decode()}"
        assert b"worker process" not in errors + output  # a parser that was killed
        return output

    letter = "mail/work/001.eml"
    trm("samples", "mail")
    trm("train", "mail", "--run", "run", "--jobs", "2")
    assert b'"parsed"' in trm("classify", "run", letter, "--json")
    raw = (tmp_path / letter).read_bytes()
    assert trm("filter", "run", given=raw).endswith(raw)
    trm("explain", "run", letter, "--html", "reasons.html")
    trm("mapping", "mail", "--out", "mapping.yaml")
    trm("export", "run", "exported")
    trm("learn", "run", "spam", letter)
    trm("corrections", "run")
    trm("forget", "run", letter)
    trm("eval", "run", "mail", "--html", "eval.html")
    trm("sort", "run", "mail", "--out", "sorted")
    trm("sort", "run", "sorted", "--max-error", "50%")
    trm("sort", "--undo", "sorted")
    with serving(start, tmp_path):
        used.add("serve")
        assert b'"parsed"' in trm("classify", "--socket", "s", letter, "--json")
        assert trm("filter", "--socket", "s", given=raw).endswith(raw)
    assert not log.exists(), log.read_text()
    assert used == set(email.commands), "a command is missing here"
