"""`recipes doctor`: whether this machine, and the links between its ranks, are fit to train. Numbered, with the fixes.

`python launch doctor` is the same where this package is not installed: in a job, before the launcher.
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
from typing import TYPE_CHECKING, Any

from launch.flags import count, whole
from recipes.errors import mistake
from recipes.run import hardware

if TYPE_CHECKING:
    from launch.doctor.machine import Check, Patient

_SIGNS = {"ok": "✓", "warning": "!", "error": "✗"}
_PLAIN_SIGNS = {"ok": "+", "warning": "!", "error": "x"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        usage="recipes doctor [--num_processes N] [--timeout SECONDS] [--json] "
        "[--nodes N --machine_rank R --main_process_ip ADDRESS --main_process_port PORT]",
        description="Over several nodes every one of them runs it, at the same time.",
    )
    for name, kind, words in (
        ("num_processes", count, "processes in all, one a GPU [all GPUs; 2 on a CPU]"),
        ("nodes", count, "[those of srun, or 1]"),
        ("machine_rank", whole, "which of the nodes this is, from 0 [SLURM_NODEID or NODE_RANK]"),
        ("main_process_ip", str, "address of node 0 [MASTER_ADDR]"),
        ("main_process_port", count, "a port that is free there, with the 10 after it [MASTER_PORT]"),
    ):
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), type=kind, help=words)
    parser.add_argument("--timeout", type=count, default=20, metavar="SECONDS", help="for a collective [20]")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=examine)


def examine(options: argparse.Namespace, rest: list[str]) -> int:
    """The exit code is 1 where anything is wrong, else 0: warnings stop nobody."""
    patient = patient_of(options, hardware.read(), os.environ)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends it, none of its ranks stays
    checks, signs = [], signs_for(sys.stdout)
    try:
        for check in _checks(patient):
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


def patient_of(options: argparse.Namespace, found: hardware.Hardware, environment: Mapping[str, str]) -> Patient:
    """This machine in the world that is asked for. Raises `UserError` for one that cannot be."""
    from launch.doctor.machine import Patient

    # SLURM_NNODES is set in a shell of salloc's too, where nobody else would come.
    nodes = options.nodes or _said(environment, "SLURM_STEP_NUM_NODES", default=1)
    rank = options.machine_rank
    if rank is None:
        rank = _said(environment, "SLURM_NODEID", "NODE_RANK", default=0) if nodes > 1 else 0
    address = options.main_process_ip or environment.get("MASTER_ADDR", "")
    port = options.main_process_port or _said(environment, "MASTER_PORT", default=29400)
    if nodes > 1 and not address:
        raise mistake("main_process_ip", f"is not given, and {nodes} nodes must find each other", "that of node 0")
    if rank >= nodes:
        raise mistake("machine_rank", f"{rank} is not among {nodes} nodes, which count from 0", f"0 to {nodes - 1}")
    processes = options.num_processes or nodes * (len(found.gpus) or (2 if nodes == 1 else 1))
    if processes % nodes:
        what = f"{processes} processes cannot be shared by {nodes} nodes"
        raise mistake("num_processes", what, f"{nodes} times the processes of one")
    return Patient(found, nodes, rank, processes // nodes, address, port, options.timeout)


def _said(environment: Mapping[str, str], *names: str, default: int) -> int:
    """The number in the first of these variables that is set."""
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return default
    if not environment[name].isdigit():
        raise mistake(name, f"{environment[name]!r} is not a whole number", "the flag in its stead", "environment")
    return int(environment[name])


def _checks(patient: Patient) -> Iterator[Check]:
    from launch.doctor import links, machine  # every other command starts without them
    from launch.doctor.machine import Check

    sick = False
    for check in machine.examine(patient):
        sick = sick or check.status == "error"
        yield check
    try:
        yield from links.examine(patient, sick)
    except OSError as error:
        yield Check("error", "ranks", f"cannot be started: {error}", "room in the folder that TMPDIR names, and memory")


def line(number: int, check: Check, signs: Mapping[str, str]) -> str:
    """A check as it is printed; its fix stands below it, ready to be copied."""
    fix = "".join(f"\n     {words}" for words in check.fix.splitlines())
    return f"{number:2} {signs[check.status]} {check.title}: {check.found}{fix}"


def signs_for(stream: Any) -> Mapping[str, str]:
    """Ticks and crosses, or letters where the terminal has none; there no other word may fail to print either."""
    try:
        "".join(_SIGNS.values()).encode(stream.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        return _PLAIN_SIGNS
    return _SIGNS


def _verdict(checks: list[Check]) -> str:
    wrong, doubtful = (sum(check.status == status for check in checks) for status in ("error", "warning"))
    warnings = f", {doubtful} warning{'s' * (doubtful > 1)}" if doubtful else ""
    if wrong:
        return f"sick: {wrong} of {len(checks)} checks failed{warnings}"
    return f"healthy: {len(checks)} checks{warnings}"
