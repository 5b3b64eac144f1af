"""`recipes explain`: what accumulation and mixed precision do, measured and explained here."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launch.explain.goals import goals
from launch.explain.reasons import notes_on, reason_for, size_of
from launch.explain.topics import BOTH, MEASURED, RANKS, SEQUENCES, STEPS, TOPICS, Measured, Row, Topic, Variant
from launch.flags import Commands
from launch.host import processes
from launch.host.parent import THREADS, threads_per_process
from launch.terminal import print_table
from recipes.errors import Failure
from recipes.run import Json
from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware

_EXPERIMENTS = "launch.explain.experiments"


class RankFailed(Failure):
    """A rank ended before it had measured everything."""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("explain", allow_abbrev=False)
    topics = "; ".join(f"{name}: {topic.what}" for name, topic in TOPICS.items())
    parser.add_argument("topic", nargs="?", choices=TOPICS, help=topics)
    parser.add_argument("--json", action="store_true", help="print bytes, seconds and reasons as JSON")
    parser.set_defaults(run=explain, print_help=parser.print_help)


def explain(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Returns 0, 1 if a rank failed, 130 if it was interrupted."""
    if options.topic is None:
        options.print_help()
        return 0
    topic, hardware = TOPICS[options.topic], read_hardware()
    device = "cuda" if len(hardware.gpus) >= RANKS else "cpu"
    if not options.json:
        print(f"{options.topic}: {topic.what}\n{_where(hardware, device)}: {RANKS} processes measure", flush=True)
    try:
        measured = _measure(options.topic, device, hardware)
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: both ranks have been ended", file=sys.stderr)
        return 130
    reasons = [reason_for(options.topic, variant, row, measured) for variant, row in _pairs(topic, measured)]
    if options.json:
        print(json.dumps(_as_json(options.topic, device, hardware, measured, reasons), indent=2))
        return 0
    _print(topic, measured, reasons)
    return 0


def _where(hardware: Hardware, device: str) -> str:
    if device == "cuda" or not hardware.gpus:
        return str(hardware)
    return f"CPU, {hardware.cores} cores (NCCL needs a GPU for each rank, and there is one)"


# --- The two ranks --------------------------------------------------------------------------------


def _measure(topic: str, device: str, hardware: Hardware) -> Measured:
    """Run the topic on both ranks. Raises `RankFailed`. No rank is left, however it ends."""
    environment = {**os.environ, THREADS: str(threads_per_process(hardware.cores, RANKS))}
    with tempfile.TemporaryDirectory(prefix="recipes-explain-") as name:
        folder = Path(name)
        logs = [folder / f"rank-{rank}.log" for rank in range(RANKS)]
        with processes.group() as ranks:
            for rank, log in enumerate(logs):
                arguments = (folder, topic, device, rank)
                ranks.append(processes.start_module(_EXPERIMENTS, *arguments, log=log, environment=environment))
            for codes in processes.watch(ranks):
                if any(codes):
                    break
            failed = [
                _failure(rank, process.returncode, log)
                for rank, (process, log) in enumerate(zip(ranks, logs, strict=True))
                if process.returncode
            ]
        if failed:
            raise RankFailed("\n".join(failed))
        content = json.loads((folder / MEASURED).read_text())
    return Measured(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})


def _failure(rank: int, code: int, log: Path) -> str:
    if code < 0:
        return f"rank {rank} was {processes.how_it_ended(code)}"
    return f"rank {rank} failed: {''.join(processes.last_lines(log, 1)) or processes.how_it_ended(code)}"


# --- Showing --------------------------------------------------------------------------------------


def _pairs(topic: Topic, measured: Measured) -> list[tuple[Variant, Row]]:
    return list(zip(topic.variants, measured.rows, strict=True))


def _as_json(topic: str, device: str, hardware: Hardware, measured: Measured, reasons: list[str]) -> Json:
    rows = [
        {**asdict(variant), **asdict(row), "reason": reason}
        for (variant, row), reason in zip(_pairs(TOPICS[topic], measured), reasons, strict=True)
    ]
    return {
        "topic": topic,
        "hardware": str(hardware),
        "device": device,
        "ranks": RANKS,
        "sequences_of_each_rank": SEQUENCES,
        "steps": STEPS,
        **asdict(measured),
        "rows": rows,
        "notes": notes_on(TOPICS[topic], measured),
    }


def _print(topic: Topic, measured: Measured, reasons: list[str]) -> None:
    batch = f"{RANKS} ranks x {SEQUENCES} sequences of {measured.tokens} tokens"
    print(f"{measured.backend}, a decoder of {measured.parameters:,} parameters, {batch} per optimizer step\n")
    heads = ["", "memory", "samples/s", "speed", "syncs", "sent", "loss", "gradient", "off"]
    heads += ["zeroed"] * bool(topic.gradients_of)
    cells = [_cells(variant, row, measured.rows[0]) for variant, row in _pairs(topic, measured)]
    print_table(heads, [row[: len(heads)] for row in cells])
    print()
    for variant, reason in zip(topic.variants, reasons, strict=True):
        print(f"{variant.name}: {reason}")
    print()
    if topic is BOTH:
        print_table(*goals(measured), whole=True)
        print()
    for note in notes_on(topic, measured):
        print(note)
    print("the loop that ran: gradient() and update() in launch/explain/experiments.py")


def _cells(variant: Variant, row: Row, first: Row) -> list[str]:
    return [
        variant.name,
        f"{row.peak_bytes / 1e6:.1f} MB",
        f"{RANKS * SEQUENCES / row.seconds:.1f}",
        f"x {first.seconds / row.seconds:.2f}",
        f"{row.synchronisations:g}",
        f"{row.sent_bytes / 1e6:.1f} MB",
        "not finite" if row.loss is None else f"{row.loss:.2f}",
        f"x {row.gradient / first.gradient:.3g}",
        "" if row is first else size_of(row.difference),
        f"{row.lost:.2%}",
    ]
