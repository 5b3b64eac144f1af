"""`recipes doctor`: check whether this machine and the links between its ranks can train.

`python launch doctor` runs the same checks if the package is not installed, for example in a job
before the launcher starts.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from launch.flags import Commands, whole
from launch.terminal import plural
from recipes.errors import mistake
from recipes.run import hardware

if TYPE_CHECKING:
    from launch.doctor.machine import Check, Request

TIMEOUT = 240  # seconds: importing torch from a cold disk takes a minute; half of the time is left for late nodes
_SIGNS = {"ok": "✓", "warning": "!", "error": "✗"}


_FLAGS = f"""
--num_processes N       processes in all, one per GPU [all GPUs; without GPUs: 2, or one per node on several nodes]
--nodes N               number of nodes [SLURM_STEP_NUM_NODES, or 1]
--main_process_ip NAME  address of node 0 [MASTER_ADDR]
--main_process_port N   a free port on node 0 [MASTER_PORT, or 29400]
--timeout N             seconds for all checks together [{TIMEOUT}]
--json                  print JSON, for scripts
"""


def add_parser(commands: Commands) -> None:
    description = "Check whether this machine can train. For several nodes, run it on all of them at the same time."
    parser = commands.add_parser("doctor", description=description)
    parser.takes(examine, _FLAGS, timeout=TIMEOUT)
    parser.add_argument("--machine_rank", type=whole, help="number of this node, from 0 [SLURM_NODEID or NODE_RANK]")


def examine(options: argparse.Namespace, rest: list[str]) -> int:
    """Print all checks. Return 1 if a check failed, else 0. A warning is not a failure."""
    request = request_for(hardware.read(), os.environ, options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM, like Ctrl-C, leaves no rank behind
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal prints UTF-8
    checks: list[Check] = []
    for check in _checks(request, checks):
        checks.append(check)
        if not options.json:
            fix = "".join(f"\n     {text}" for text in check.fix.splitlines())  # ready to copy
            print(f"{len(checks):2} {_SIGNS[check.status]} {check.title}: {check.found}{fix}", flush=True)
    errors, doubts = (sum(check.status == status for check in checks) for status in ("error", "warning"))
    if options.json:
        print(json.dumps({"healthy": not errors, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        warnings = f", {plural(doubts, 'warning')}" if doubts else ""
        print(f"{f'failed: {errors} of' if errors else 'healthy:'} {len(checks)} checks{warnings}")
    return 1 if errors else 0


def request_for(machine: hardware.Hardware, environment: Mapping[str, str], options: argparse.Namespace) -> Request:
    """Return the doctor's `Request`. Missing flags get values from environment variables or GPUs.
    Raises `UserError` for an illegal number, or for several nodes without the address of node 0.
    """
    from launch.doctor.machine import Request

    # Do not read SLURM_NNODES: in a shell of salloc it counts all nodes, but only this node runs
    # the command.
    nodes = options.nodes or _number_in(environment, "SLURM_STEP_NUM_NODES", default=1)
    rank = options.machine_rank
    if rank is None:
        rank = _number_in(environment, "SLURM_NODEID", "NODE_RANK", default=0) if nodes > 1 else 0
    address = options.main_process_ip or environment.get("MASTER_ADDR", "")
    port = options.main_process_port or _number_in(environment, "MASTER_PORT", default=29400)
    if nodes > 1 and not address:
        raise mistake("main_process_ip", f"is missing, and {nodes} nodes must find each other", "give node 0's address")
    if rank >= nodes:
        raise mistake("machine_rank", f"{rank} is too large for {nodes} nodes", f"use 0 to {nodes - 1}")
    processes = options.num_processes or nodes * (len(machine.gpus) or (2 if nodes == 1 else 1))
    if processes % nodes:
        what = f"{plural(processes, 'process')} cannot be divided among {nodes} nodes"
        raise mistake("num_processes", what, f"use a multiple of {nodes}")
    return Request(machine, nodes, rank, processes // nodes, address, port, options.timeout)


def _number_in(environment: Mapping[str, str], *names: str, default: int) -> int:
    """Read the first of `names` that is set, or `default`. Raises `UserError` for a non-number."""
    name = next((name for name in names if environment.get(name)), "")
    if name and not environment[name].isdigit():
        what = f"{environment[name]!r} is not a whole number"
        raise mistake(name, what, "set a whole number, or give the flag that replaces it (--help)", "environment")
    return int(environment[name]) if name else default


def _checks(request: Request, earlier: list[Check]) -> Iterator[Check]:
    """Yield all checks. The caller adds each check to `earlier`, which later checks read."""
    from launch.doctor import machine, network, remedy  # no other command needs these modules
    from launch.doctor.machine import Check

    nodes = network.Meeting(request)
    try:
        yield from machine.examine(request)
        yield from network.examine(nodes, earlier)
        yield from remedy.examine(nodes, earlier)
    except OSError as error:
        yield Check("error", "doctor", f"cannot continue: {error}", "make room in memory and in the folder of TMPDIR")
