"""`trm` commands and Python scripts in processes of their own that start in milliseconds.

Importing the product takes most of the time of a short command. A server process imports it once, and every
command is forked from that: it still has its own streams, directory, signals and exit code. Tests of what
comes before `main`, such as streams that are closed, start the installed script instead.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

PRELOADED = [
    "numpy", "psutil", "pydantic", "rich.console", "rich.progress", "torch", "yaml",
    "trm.api", "trm.cli", "trm.reports.watching", "trm.training.supervisor",
]  # fmt: skip
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOADED)


def run(arguments, cwd, stdin="", env=None, timeout=120):
    """Run a command to its end; return what `subprocess.run` would with captured text."""
    return _run(_main, list(map(str, arguments)), cwd, stdin, env, timeout)


def run_script(code, cwd, timeout=120):
    """Run Python code as `python -c` would."""
    return _run(_script, [code], cwd, "", None, timeout)


def _run(target, words, cwd, stdin, env, timeout):
    with tempfile.TemporaryDirectory(prefix="trm-command-") as directory:
        streams = [Path(directory) / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin)
        process = CONTEXT.Process(target=target, args=(words, str(cwd), list(map(str, streams)), env))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        output, errors = (path.read_text(errors="replace") for path in streams[1:])
    return subprocess.CompletedProcess(words, process.exitcode, output, errors)


def _main(words, *surroundings):
    _enter(*surroundings)
    sys.argv = ["trm", *words]
    from trm.cli import main

    main()


def _script(words, *surroundings):
    _enter(*surroundings)
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(words[0], "<string>", "exec"), main.__dict__)


def _enter(cwd, streams, env):
    flags = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT)
    for descriptor, (path, how) in enumerate(zip(streams, flags, strict=True)):
        opened = os.open(path, how, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    os.chdir(cwd)
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
