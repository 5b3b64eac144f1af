"""`recipes explain`: what accumulation and mixed precision do, measured on this machine, with a reason for each row."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware

RANKS = 2
SEQUENCES = 8  # of each rank, in each optimizer step
STEPS = 5
MEASURED = "measured.json"
_SCRIPT = Path(__file__).with_name("experiments.py")


@dataclass(frozen=True)
class Variant:
    """One way to take the same optimizer step. `clip`: the gradient's norm is limited, after unscaling or before."""

    name: str
    micro_batches: int = 1
    dtype: str = "fp32"
    no_sync: bool = True
    divide: bool = True
    scale: bool = False
    clip: str = ""


@dataclass(frozen=True)
class Topic:
    """Variants to compare with the first. `gradients_of`: gradients are as small as with a mean over so many tokens."""

    what: str
    variants: tuple[Variant, ...]
    gradients_of: int = 0


TOPICS = {
    "accumulation": Topic(
        "the same batch at once or in parts, with and without no_sync",
        (
            Variant("1 micro-batch of 8"),
            Variant("8 of 1, synchronised each time", 8, no_sync=False),
            Variant("8 of 1, no_sync", 8),
            Variant("8 of 1, no_sync, loss not divided", 8, divide=False),
        ),
    ),
    "amp": Topic(
        "fp32, bf16, and fp16 with and without a gradient scaler",
        (
            Variant("fp32"),
            Variant("bf16", dtype="bf16"),
            Variant("fp16", dtype="fp16"),
            Variant("fp16, scaler", dtype="fp16", scale=True),
        ),
        gradients_of=2**20,  # a large batch: with the few tokens that are really in this one nearly nothing underflows
    ),
    "both": Topic(
        "accumulation and 16 bits together: where to scale, unscale, clip and step",
        (
            Variant("fp32, 1 micro-batch of 8", clip="unscaled"),
            Variant("fp32, 4 of 2, no_sync", 4, clip="unscaled"),
            Variant("bf16, 4 of 2, no_sync", 4, "bf16", clip="unscaled"),
            Variant("fp16, scaler, 4 of 2, no_sync", 4, "fp16", scale=True, clip="unscaled"),
            Variant("the same, clipped while scaled", 4, "fp16", scale=True, clip="scaled"),
        ),
    ),
}


@dataclass(frozen=True)
class Row:
    """What rank 0 measured of a variant.

    `seconds` of an optimizer step, the median; `synchronisations` and the bytes `sent` (given to the all-reduce by
    each rank) in one; `gradient` of the first step as the optimizer gets it, its norm and, against the first row's,
    the relative `difference` and the share of values `lost`: zero here and not there. `loss` is None where it is no
    finite number any more.
    """

    seconds: float
    peak_bytes: int
    synchronisations: float
    sent_bytes: float
    loss: float | None
    gradient: float
    difference: float
    lost: float
    skipped_steps: int


@dataclass(frozen=True)
class Measured:
    """`loss_before` the first step, of all rows; `tokens` in a sequence; `memory_of` says what `peak_bytes` counts."""

    backend: str
    parameters: int
    tokens: int
    loss_before: float
    memory_of: str
    rows: tuple[Row, ...]


class RankFailed(Exception):
    """A rank ended before it had measured everything."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain", help="measure here what accumulation and mixed precision do", allow_abbrev=False
    )
    topics = "; ".join(f"{name}: {topic.what}" for name, topic in TOPICS.items())
    parser.add_argument("topic", nargs="?", choices=TOPICS, help=topics)
    parser.add_argument("--json", action="store_true", help="bytes, seconds and the reasons")
    parser.set_defaults(run=explain, print_help=parser.print_help)


def explain(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Returns 0, 1 where a rank failed, 130 where it was interrupted."""
    if options.topic is None:
        options.print_help()
        return 0
    topic, hardware = TOPICS[options.topic], read_hardware()
    device = "cuda" if len(hardware.gpus) >= RANKS else "cpu"
    if not options.json:
        print(f"{options.topic}: {topic.what}\n{_where(hardware, device)}: {RANKS} processes are measuring", flush=True)
    try:
        measured = _measure(options.topic, device, hardware)
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: both ranks are ended", file=sys.stderr)
        return 130
    reasons = [reason(options.topic, variant, row, measured) for variant, row in _pairs(topic, measured)]
    if options.json:
        print(json.dumps(_as_json(options.topic, device, hardware, measured, reasons), indent=2))
        return 0
    _print(topic, measured, reasons)
    return 0


def _where(hardware: Hardware, device: str) -> str:
    if device == "cuda" or not hardware.gpus:
        return str(hardware)
    return f"CPU, {hardware.cores} cores (NCCL wants a GPU for each rank, and here is one)"


# --- The two ranks --------------------------------------------------------------------------------


def _measure(topic: str, device: str, hardware: Hardware) -> Measured:
    """Run the topic on both ranks. Raises `RankFailed`; however it ends, no rank is left."""
    with tempfile.TemporaryDirectory(prefix="recipes-explain-") as name:
        folder = Path(name)
        threads = str(max(1, hardware.cores // RANKS))
        ranks = [_start(folder, topic, device, rank, threads) for rank in range(RANKS)]
        try:
            _wait(ranks, folder)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        content = json.loads((folder / MEASURED).read_text())
    return Measured(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})


def _start(folder: Path, topic: str, device: str, rank: int, threads: str) -> subprocess.Popen:
    words = [sys.executable, str(_SCRIPT), str(folder), topic, device, str(rank)]
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": threads},
            start_new_session=True,  # Ctrl-C comes here alone, and ends them from here
        )


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _wait(ranks: list[subprocess.Popen], folder: Path) -> None:
    while None in (codes := [process.poll() for process in ranks]) and not any(codes):
        time.sleep(0.05)
    failed = [_last_words(rank, process, folder) for rank, process in enumerate(ranks) if process.returncode]
    if failed:
        raise RankFailed("\n".join(failed))


def _last_words(rank: int, process: subprocess.Popen, folder: Path) -> str:
    if process.returncode < 0:
        return f"rank {rank} was ended by {signal.Signals(-process.returncode).name}"
    lines = _log(folder, rank).read_text(errors="replace").strip().splitlines()
    return f"rank {rank} failed: {lines[-1] if lines else f'exit code {process.returncode}'}"


# --- One line of reason for each row, in words that follow from its numbers -----------------------


def _accumulation(variant: Variant, row: Row, measured: Measured) -> str:
    first, at_each = measured.rows[:2]
    if row is first:
        return "the reference: one backward, one synchronisation, the activations of all 8 in memory at once"
    if not variant.divide:
        times = f"{row.gradient / first.gradient:.2f} times"
        return (
            f"{variant.micro_batches} means are added up: {times} the gradient, as if the learning rate were {times} "
            f"as high; {_instead(row, first)}"
        )
    if not variant.no_sync:
        return (
            f"DDP averages after every backward, {row.synchronisations:g} times where once is enough, and sends "
            f"{row.sent_bytes / first.sent_bytes:g} times the bytes; {_gradient(row)}"
        )
    return (
        f"gradients stay on their rank until the last backward; {_gradient(row)}; against all 8 at once "
        f"{_memory(row, first)}, {_speed(row, first)}; against synchronising each time {_speed(row, at_each)}"
    )


def _amp(variant: Variant, row: Row, measured: Measured) -> str:
    first = measured.rows[0]
    if row is first:
        return "the reference: 24 significant bits, down to 1e-38"
    if variant.dtype == "bf16":
        return (
            f"8 significant bits with fp32's range: nothing to scale; {_gradient(row)}; {_cost(variant, row, measured)}"
        )
    if not variant.scale:
        return (
            f"11 significant bits, but nothing below 6e-8: {row.lost:.0%} of the gradient's values became zero; "
            f"{_gradient(row)}; {_instead(row, first)}"
        )
    skipped = f", {row.skipped_steps} steps skipped to find the scale" if row.skipped_steps else ""
    return (
        f"the loss is multiplied before backward and the gradient divided after, {row.lost:.1%} became zero{skipped}; "
        f"{_gradient(row)}; {_cost(variant, row, measured)}"
    )


def _both(variant: Variant, row: Row, measured: Measured) -> str:
    first = measured.rows[0]
    if row is first:
        return "the reference: the whole batch in fp32, its gradient clipped to a norm of 1"
    if variant.clip == "scaled":
        return (
            f"the scaled gradient was cut to a norm of 1, and unscale_ then left {_size(row.gradient)} of it; "
            f"{_instead(row, first)}"
        )
    found = f"{_gradient(row)}; {_cost(variant, row, measured)}"
    if variant.scale:
        return f"scale each loss, then once an optimizer step unscale_, clip, step, update; {found}"
    if variant.dtype == "bf16":
        return f"autocast inside no_sync, nothing to scale; {found}"
    return f"each loss divided by {variant.micro_batches}, one synchronisation; {found}"


_REASONS: dict[str, Callable[[Variant, Row, Measured], str]] = {
    "accumulation": _accumulation,
    "amp": _amp,
    "both": _both,
}


def reason(topic: str, variant: Variant, row: Row, measured: Measured) -> str:
    """What a row shows, said of its own numbers."""
    return _REASONS[topic](variant, row, measured)


def _notes(topic: Topic, measured: Measured) -> list[str]:
    notes = [
        f"memory: {measured.memory_of}",
        "speed: medians of steps taken in turns; syncs and sent: of a step on each rank, counted by a hook in DDP",
        f"loss: of the same examples after {STEPS} steps of SGD, {measured.loss_before:.2f} before",
        "gradient: the first step's norm, as SGD gets it, against the first row's; off: the norm of the difference",
    ]
    if topic.gradients_of:
        notes += [
            "zeroed: values of the gradient that are zero, and are not in the first row",
            f"the loss is divided, and the learning rate multiplied, so that gradients are as small as where a mean "
            f"is over {topic.gradients_of:,} tokens instead of {SEQUENCES * measured.tokens:,}",
            "autocast keeps weights and gradients in fp32 and sends these; --ddp_comm_hook sends 16 bits",
        ]
    if any(not variant.divide for variant in topic.variants):
        quicker, slower = sorted(row.seconds for row in measured.rows[-2:])
        notes.append(
            f"the last two rows do the same work: where one took {slower / quicker:.2f} times as long, that was this "
            "machine's noise"
        )
        notes.append(
            "Adam divides by the gradient's own size, which hides a loss that was not divided; clipping then cuts 8 "
            "times as early all the same, and weight decay that is added to the gradient weighs 8 times less"
        )
    return notes


# --- Words and numbers ----------------------------------------------------------------------------


def _gradient(row: Row) -> str:
    if row.difference < 1e-5:  # what fp32 rounds off
        return f"the same gradient (to {_size(row.difference)})"
    return f"the gradient is {row.difference:.1%} off"


def _instead(row: Row, other: Row) -> str:
    """The losses of both."""
    words = ["no number" if loss is None else f"{loss:.2f}" for loss in (row.loss, other.loss)]
    return f"loss {words[0]} as well" if words[0] == words[1] else f"loss {words[0]} instead of {words[1]}"


def _cost(variant: Variant, row: Row, measured: Measured) -> str:
    """Memory and time against the first row."""
    first = measured.rows[0]
    return f"{_memory(row, first)}, {_speed(row, first)}{_no_units(variant, row, measured)}"


def _memory(row: Row, other: Row) -> str:
    share = row.peak_bytes / other.peak_bytes
    return "as much memory" if 0.98 < share < 1.02 else f"{abs(1 - share):.0%} {'less' if share < 1 else 'more'} memory"


def _speed(row: Row, other: Row) -> str:
    ratio = other.seconds / row.seconds
    if 0.95 < ratio < 1.05:  # the median of a few steps knows it no better
        return "as fast here"
    return f"{ratio:.1f} times as fast here" if ratio > 1 else f"takes {1 / ratio:.1f} times as long here"


def _no_units(variant: Variant, row: Row, measured: Measured) -> str:
    """Why 16 bits were slower, where that is known."""
    slower = row.seconds > 1.05 * measured.rows[0].seconds
    if variant.dtype == "fp32" or not slower or measured.backend != "gloo":
        return ""
    return (
        f" (this CPU has no {variant.dtype} arithmetic)"
        if cpu_computes_in(variant.dtype, _cpu_flags()) is False
        else ""
    )


def cpu_computes_in(dtype: str, flags: frozenset[str]) -> bool | None:
    """Whether an x86 CPU with these flags of /proc/cpuinfo computes in "bf16" or "fp16"; None where there are none."""
    return bool(flags & {f"avx512_{dtype}", f"amx_{dtype}"}) if flags else None  # asm/cpufeatures.h of Linux


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))


def _size(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


# --- Showing --------------------------------------------------------------------------------------


def _pairs(topic: Topic, measured: Measured) -> list[tuple[Variant, Row]]:
    return list(zip(topic.variants, measured.rows, strict=True))


def _as_json(topic: str, device: str, hardware: Hardware, measured: Measured, reasons: list[str]) -> dict[str, Any]:
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
        "notes": _notes(TOPICS[topic], measured),
    }


def _print(topic: Topic, measured: Measured, reasons: list[str]) -> None:
    from launch.terminal import print_table

    batch = f"{RANKS} ranks x {SEQUENCES} sequences of {measured.tokens} tokens"
    print(f"{measured.backend}, a decoder of {measured.parameters:,} parameters, {batch} an optimizer step\n")
    heads = ["", "memory", "samples/s", "speed", "syncs", "sent", "loss", "gradient", "off"]
    heads += ["zeroed"] * bool(topic.gradients_of)
    print_table(
        heads, [_cells(variant, row, measured.rows[0])[: len(heads)] for variant, row in _pairs(topic, measured)]
    )
    print()
    for variant, reason in zip(topic.variants, reasons, strict=True):
        print(f"{variant.name}: {reason}")
    print()
    for note in _notes(topic, measured):
        print(note)
    print(f"the loop that ran: gradient() and update() in launch/{_SCRIPT.name}")


def _cells(variant: Variant, row: Row, first: Row) -> list[str]:
    return [
        variant.name,
        f"{row.peak_bytes / 1e6:.1f} MB",
        f"{RANKS * SEQUENCES / row.seconds:.1f}",
        f"x {first.seconds / row.seconds:.2f}",
        f"{row.synchronisations:g}",
        f"{row.sent_bytes / 1e6:.1f} MB",
        "no number" if row.loss is None else f"{row.loss:.2f}",
        f"x {row.gradient / first.gradient:.3g}",
        "" if row is first else _size(row.difference),
        f"{row.lost:.2%}",
    ]
