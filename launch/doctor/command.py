"""`recipes doctor`: whether this machine and the links between its ranks can train.

Numbered checks, with their fixes.

`python launch doctor` does the same without installing this package: in a job, before the launcher.
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
from typing import TYPE_CHECKING, TextIO

from launch.flags import Commands, count, whole
from launch.terminal import plural
from recipes.errors import mistake
from recipes.run import hardware

if TYPE_CHECKING:
    from launch.doctor.check import Check, Request

TIMEOUT = 240  # seconds: on a cold disk torch alone takes a minute, and late nodes have half of it
_SIGNS = {"ok": "✓", "warning": "!", "error": "✗"}
_PLAIN_SIGNS = {"ok": "+", "warning": "!", "error": "x"}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        usage="recipes doctor [--num_processes N] [--timeout SECONDS] [--json] "
        "[--nodes N --machine_rank R --main_process_ip ADDRESS --main_process_port PORT]",
        description="For several nodes, run it on each of them at the same time.",
    )
    for name, kind, text in (
        ("num_processes", count, "processes in all, one per GPU [all GPUs; 2 on a CPU]"),
        ("nodes", count, "[those of srun, or 1]"),
        ("machine_rank", whole, "which of the nodes this is, from 0 [SLURM_NODEID or NODE_RANK]"),
        ("main_process_ip", str, "address of node 0 [MASTER_ADDR]"),
        ("main_process_port", count, "the first of 15 ports that are free there [MASTER_PORT]"),
    ):
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), type=kind, help=text)
    parser.add_argument("--timeout", type=count, default=TIMEOUT, metavar="SECONDS", help=f"for everything [{TIMEOUT}]")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=examine)


def examine(options: argparse.Namespace, rest: list[str]) -> int:
    """Returns 0, 1 if a check failed (warnings do not count), 130 if it was interrupted."""
    request = request_for(
        hardware.read(),
        os.environ,
        num_processes=options.num_processes,
        nodes=options.nodes,
        machine_rank=options.machine_rank,
        main_process_ip=options.main_process_ip,
        main_process_port=options.main_process_port,
        timeout=options.timeout,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as for Ctrl-C, no rank may stay behind
    checks, signs = [], signs_for(sys.stdout)
    try:
        for check in _checks(request):
            checks.append(check)
            if not options.json:
                print(line(len(checks), check, signs), flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    healthy = all(check.status != "error" for check in checks)
    if options.json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(_verdict(checks))
    return 0 if healthy else 1


def request_for(
    machine: hardware.Hardware,
    environment: Mapping[str, str],
    *,
    num_processes: int | None = None,
    nodes: int | None = None,
    machine_rank: int | None = None,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
    timeout: int = TIMEOUT,
) -> Request:
    """This machine in the requested world, None for what the environment or the GPUs decide.

    Raises `UserError` for a world that is not possible.
    """
    from launch.doctor.check import Request

    # Not SLURM_NNODES, which is also set in a shell of salloc, where no other node runs this
    # command.
    nodes = nodes or _number_in(environment, "SLURM_STEP_NUM_NODES", default=1)
    if machine_rank is None:
        machine_rank = _number_in(environment, "SLURM_NODEID", "NODE_RANK", default=0) if nodes > 1 else 0
    address = main_process_ip or environment.get("MASTER_ADDR", "")
    port = main_process_port or _number_in(environment, "MASTER_PORT", default=29400)
    if nodes > 1 and not address:
        raise mistake("main_process_ip", f"is missing, and {nodes} nodes must find each other", "that of node 0")
    if machine_rank >= nodes:
        what = f"{machine_rank} is not the rank of one of {nodes} nodes"
        raise mistake("machine_rank", what, f"a number from 0 to {nodes - 1}")
    processes = num_processes or nodes * (len(machine.gpus) or (2 if nodes == 1 else 1))
    if processes % nodes:
        what = f"{plural(processes, 'process')} cannot be divided among {nodes} nodes"
        raise mistake("num_processes", what, f"{nodes} times the processes of one node")
    return Request(machine, nodes, machine_rank, processes // nodes, address, port, timeout)


def _number_in(environment: Mapping[str, str], *names: str, default: int) -> int:
    """The number in the first of these variables that is set."""
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return default
    if not environment[name].isdigit():
        raise mistake(name, f"{environment[name]!r} is not a whole number", "give the flag instead", "environment")
    return int(environment[name])


def _checks(request: Request) -> Iterator[Check]:
    from launch.doctor import links, machine, meeting, reach  # no other command needs them
    from launch.doctor.check import Check

    failed = fatal = False
    for examine in (machine.examine, reach.examine):
        for check in () if fatal else examine(request):
            failed, fatal = failed or check.status == "error", fatal or check.fatal
            yield check
    nodes = meeting.Meeting(request)
    try:
        if request.nodes > 1:
            met = meeting.gathered(nodes, fatal)
            fatal = fatal or met.fatal
            yield met
        if not fatal:
            yield from links.examine(request, failed, nodes)
    except OSError as error:
        yield Check("error", "ranks", f"cannot be started: {error}", "free space in the folder of TMPDIR, and memory")
    finally:
        nodes.close()


def line(number: int, check: Check, signs: Mapping[str, str]) -> str:
    """A check as it is printed, with its fix in lines of its own below, ready to be copied."""
    fix = "".join(f"\n     {text}" for text in check.fix.splitlines())
    return f"{number:2} {signs[check.status]} {check.title}: {check.found}{fix}"


def signs_for(stream: TextIO) -> Mapping[str, str]:
    """Ticks and crosses, or letters if the terminal cannot print them.

    What that terminal cannot encode is printed as ?.
    """
    try:
        "".join(_SIGNS.values()).encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        return _PLAIN_SIGNS
    return _SIGNS


def _verdict(checks: list[Check]) -> str:
    errors, doubts = (sum(check.status == status for check in checks) for status in ("error", "warning"))
    warnings = f", {plural(doubts, 'warning')}" if doubts else ""
    if errors:
        return f"failed: {errors} of {len(checks)} checks{warnings}"
    return f"healthy: {len(checks)} checks{warnings}"
