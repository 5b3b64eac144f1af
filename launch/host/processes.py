"""Start processes on this machine, end them, and read their logs.

`ask` starts this file as a script, which calls `main` of one of our modules. The script first makes
our packages importable, because they may not be installed.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_ROOT = Path(__file__).resolve().parents[2]  # the folder that holds launch/ and recipes/
_REQUEST, _ANSWER, _LOG = "request.json", "answer.json", "log"
_KILL_SECONDS = 5  # a process inside a hanging driver survives even SIGKILL: wait no longer than this


def start(argv: list[str], log: IO[bytes], environment: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """Start a command as the leader of its own process group, which Ctrl-C does not reach.

    The command has no input, and its output goes to `log`.
    """
    return subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def group() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Yield a list, to which the block adds the processes that it starts as group leaders.

    When the block ends, also with an error, the process groups of these processes are killed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)


@dataclass(frozen=True)
class Child:
    """A process that was sent a request. `folder` holds the request, the answer and the log."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def answer(self) -> Any:
        """The answer of the process; None if the process has not answered yet."""
        file = self.folder / _ANSWER
        return json.loads(file.read_text()) if file.exists() else None

    def end(self, lines: int = 1) -> str:
        """Return the last lines of the log and, after the process has ended, how it ended."""
        code = self.process.poll()
        return "\n".join([*last_lines(self.folder / _LOG, lines), *([] if code is None else [how_it_ended(code)])])


@contextlib.contextmanager
def ask(module: str, requests: Sequence[Any], environment: Mapping[str, str] = os.environ) -> Iterator[list[Child]]:
    """For each request, start a new Python that calls `main(request, folder)` of `module`; `main`
    stores its result with `answer(folder, result)`. Requests and results are JSON. All run at once.
    The new processes run the same copy of our packages as this process, with the user's PYTHONPATH,
    and die with this process. At the end of the block they are killed, and their folders removed.
    """
    with tempfile.TemporaryDirectory(prefix="recipes-", ignore_cleanup_errors=True) as scratch, group() as started:
        children = []
        for number, content in enumerate(requests):
            folder = Path(scratch, str(number))
            folder.mkdir()
            (folder / _REQUEST).write_text(json.dumps(content))
            words = [sys.executable, "-P", __file__, str(os.getpid()), module, str(folder)]
            with (folder / _LOG).open("wb") as log:
                started.append(start(words, log, environment))
            children.append(Child(started[-1], folder))
        yield children


def answer(folder: str, content: object) -> None:
    """Store the answer atomically, so that a process that polls the file never reads half of it."""
    written = Path(folder, f"{_ANSWER}.part")
    written.write_text(json.dumps(content))
    written.replace(Path(folder, _ANSWER))


def watch(children: Sequence[Child]) -> Iterator[list[int | None]]:
    """Yield all exit codes 20 times a second until all processes have ended; None means running."""
    while None in (codes := [child.process.poll() for child in children]):
        yield codes
        time.sleep(0.05)


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last `count` lines of a log, without empty lines at its end."""
    return log.read_text(errors="replace").rstrip().splitlines()[-count:]


def how_it_ended(code: int) -> str:
    """Describe an exit code: "killed by SIGTERM", "exit code 3"."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def free_port() -> int:
    """Return a TCP port that is free at this moment on every interface."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def import_own_packages() -> None:
    """Import our packages, whose folder is first on sys.path. Move the folder behind PYTHONPATH.

    Another package `launch` on PYTHONPATH (ROS 2 has one) must not hide our package. But a library
    that the user has put on PYTHONPATH must hide an installed library.
    """
    for name in ("recipes", "launch"):
        importlib.import_module(name)
    del sys.path[0]
    if str(_ROOT) not in sys.path:  # a clone that is not installed
        sys.path.append(str(_ROOT))


def _run_module(parent: str, module: str, folder: str) -> int | None:
    sys.path.insert(0, str(_ROOT))
    import_own_packages()
    from launch.host.signals import end_with_parent

    end_with_parent()
    if os.getppid() != int(parent):  # the parent died before this process asked for the signal
        return 1
    return importlib.import_module(module).main(json.loads(Path(folder, _REQUEST).read_text()), folder)


if __name__ == "__main__":
    sys.exit(_run_module(*sys.argv[1:]))
