"""Starts a case as its launcher would, in forks of this process, which has imported everything.

The real code of `accelerate launch` reads the YAML and decides. Only where it would start
processes, ranks are forked instead, and watched as torchrun watches: if one fails, all end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NoReturn

from launch.host.processes import free_port
from launch.host.signals import end_with_parent
from tests.campaigns.legality import rank
from tests.campaigns.legality.case import Case, flags, launch
from tests.campaigns.resuming import moment

_GRACE = 10  # seconds, for the ranks of a run that is watched


def forked(work: Callable[[], int | None], environment: Mapping[str, str] | None = None) -> int:
    """The process id of a fork that does `work`, and ends with its exit code."""
    sys.stdout.flush()
    return os.fork() or _end_with(work, environment)


def _end_with(work: Callable[[], int | None], environment: Mapping[str, str] | None) -> NoReturn:
    code = 1
    try:
        end_with_parent()
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        code = work() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(case: Case) -> int:
    """Run the case in the current folder to its end. Returns the launcher's exit code."""
    words = flags(case)
    if case.launcher == "python":
        return rank.main(words)
    if case.launcher == "torchrun":
        return _ranks(case.processes or 1, os.environ, words)
    return _accelerate([*launch(case)[2:], *words])


def _accelerate(words: list[str]) -> int:
    import torch.distributed.run as torchrun
    from accelerate.commands import launch as launcher

    codes: list[int] = []

    def start_ranks(args) -> None:
        config, _, _ = torchrun.config_from_args(args)
        codes.append(_ranks(config.nproc_per_node, os.environ, args.training_script_args))
        if codes[-1]:
            raise SystemExit(codes[-1])

    class Started:
        def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
            self.pid = forked(lambda: rank.main(command[2:]), env)

        def wait(self) -> None:
            code = _exit_code(os.waitpid(self.pid, 0)[1])
            if code:
                raise SystemExit(code)
            self.returncode = 0

    torchrun.run = start_ranks
    launcher.subprocess = SimpleNamespace(Popen=Started, CalledProcessError=subprocess.CalledProcessError)
    launcher.launch_command(launcher.launch_command_parser().parse_args(words))
    return 0


def _ranks(count: int, environment: Mapping[str, str], words: list[str]) -> int:
    """Fork the ranks of one machine. Returns 0, or the exit code of the first that failed."""
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    running = set()
    for number in range(count):
        own = {"OMP_NUM_THREADS": 1, **world, "RANK": number, "LOCAL_RANK": number}
        running.add(forked(lambda: rank.main(words), {**environment, **{name: str(own[name]) for name in own}}))
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            _end(running, _GRACE if moment.VARIABLE in environment else 0)
            return _exit_code(status)
    return 0


def _end(ranks: set[int], grace: float) -> None:
    """As torchrun: SIGTERM to those that one rank has left alone, and after a while SIGKILL."""
    deadline = time.monotonic() + grace
    for pid in ranks:
        os.kill(pid, signal.SIGTERM if grace else signal.SIGKILL)
    while ranks and time.monotonic() < deadline:
        ranks.discard(os.waitpid(-1, os.WNOHANG)[0])
        time.sleep(0.02)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)


def _exit_code(status: int) -> int:
    return os.waitstatus_to_exitcode(status)
