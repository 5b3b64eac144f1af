"""`recipes explain`: accumulation and mixed precision, measured on two ranks, with explanations.

Each variant explains its result; the numbers in the table are measured on this machine. The
optimizer steps are in launch/explain/steps.py.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from launch.flags import Commands
from launch.host import processes
from launch.host.launcher import THREADS, threads_per_process
from launch.terminal import print_table
from recipes.errors import Failure
from recipes.run import Json
from recipes.run.hardware import read as read_hardware

RANKS = 2
SEQUENCES = 8  # per rank and optimizer step
STEPS = 11


@dataclass(frozen=True)
class Variant:
    """One way to take the same optimizer step, and the reason for its result.

    `clip` names the gradient to clip: "unscaled" (right), "scaled" (wrong), or "" for no clipping.
    `goal` is its heading in the table that `goals` makes; a variant without `goal` has no column.
    """

    name: str
    reason: str
    micro_batches: int = 1
    dtype: str = "fp32"
    no_sync: bool = True
    divide: bool = True
    scale: bool = False
    clip: str = ""
    goal: str = ""


@dataclass(frozen=True)
class Topic:
    """Variants to compare with the first variant.

    `gradients_of`: make gradients as small as in a mean over this many tokens; 0 changes nothing.
    """

    what: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...]
    gradients_of: int = 0


_NOTES = (
    "memory: peak bytes of live tensors in a step: weights, gradients, DDP's buckets and activations",
    "speed: from the median step time, ± its estimated error; the variants take turns, step by step",
    "syncs and sent: synchronisations and bytes per step and rank, counted by a DDP communication hook",
    "loss: on the first step's examples after {STEPS} steps of SGD; it was {loss_before:.2f} before",
    "gradient: |g| / |g1|, where SGD's first gradient is g here and g1 in row 1; off: |g - g1| / |g1|",
    "zeroed: the share of the first row's nonzero gradient values that are zero here",
)
_LARGE_BATCH = 2**20  # tokens; with the few tokens of this training, almost no gradient underflows in fp16
_OF_16_BITS = (
    "autocast keeps weights and gradients in fp32, so DDP sends fp32; --ddp_comm_hook sends 16 bits",
    "tensor cores compute 16 bits faster than fp32 (NVIDIA's data sheet of the A100: 312 TFLOPS in bf16 and fp16, 156 "
    "in TF32, 19.5 in fp32); a CPU without 16-bit arithmetic (AVX512-BF16, AMX) shows the reverse",
)
_AT_ONCE = "the reference: one backward, one synchronisation, the activations of all 8 sequences in memory at once"
_AT_EACH = "DDP averages after each backward, 8 times instead of once, and sends 8 times the bytes"
_NO_SYNC = "gradients stay on their rank until the last backward; same gradient, activations of 1 sequence in memory"
_UNDIVIDED = "the sum of 8 mean losses gives 8 times the gradient, as if the learning rate were 8 times as high"
_DIVIDED = "each loss is divided by 4; one synchronisation"
_AUTOCAST = "autocast alone; bf16 needs no scaler"
_BOTH = "autocast inside no_sync; bf16 needs no scaler"
_IN_ORDER = "scale each loss; then, once per optimizer step: unscale_, clip, step, update"
_CLIPPED_SCALED = "the scaled gradient was clipped to a norm of 1, and unscale_ then divided it to almost nothing"
_SCALED = "the loss is multiplied before backward and the gradient divided afterwards, so small gradients survive"
TOPICS = {
    "accumulation": Topic(
        "the same batch at once or in parts, with and without no_sync",
        (
            Variant("1 micro-batch of size 8", _AT_ONCE),
            Variant("8 of size 1, synchronised each time", _AT_EACH, 8, no_sync=False),
            Variant("8 of size 1, no_sync", _NO_SYNC, 8),
            Variant("8 of size 1, no_sync, loss not divided", _UNDIVIDED, 8, divide=False),
        ),
        (
            "the last two rows do the same work: the difference between their speeds is noise",
            "Adam rescales the gradient, which hides a loss that is not divided by 8; but clipping then starts at an "
            "eighth of the intended norm, and weight decay added to the gradient has an eighth of its effect",
        ),
    ),
    "amp": Topic(
        "fp32, bf16, and fp16 with and without a gradient scaler",
        (
            Variant("fp32", "the reference: 24 significant bits, down to 1e-38"),
            Variant("bf16", "8 significant bits with fp32's range: no scaler is needed", dtype="bf16"),
            Variant("fp16", "11 significant bits, but nothing below 6e-8: small gradients become zero", dtype="fp16"),
            Variant("fp16, scaler", _SCALED, dtype="fp16", scale=True),
        ),
        (
            "the loss is divided by a factor, and the learning rate multiplied by it: gradients are as small as in a "
            f"mean over {_LARGE_BATCH:,} tokens; the scaler may skip the first steps while it searches for its scale",
            *_OF_16_BITS,
        ),
        _LARGE_BATCH,
    ),
    "both": Topic(
        "accumulation and 16 bits: what each is for, and when to scale, unscale, clip and step if you use both",
        (
            Variant("fp32, 1 micro-batch of 8", "the reference: the whole batch in fp32", clip="unscaled"),
            Variant("fp32, 4 of 2, no_sync", _DIVIDED, 4, clip="unscaled", goal="accumulation"),
            Variant("bf16, 1 micro-batch of 8", _AUTOCAST, 1, "bf16", clip="unscaled", goal="mixed precision (bf16)"),
            Variant("bf16, 4 of 2, no_sync", _BOTH, 4, "bf16", clip="unscaled", goal="both"),
            Variant("fp16, scaler, 4 of 2, no_sync", _IN_ORDER, 4, "fp16", scale=True, clip="unscaled"),
            Variant("the same, clipped before unscaling", _CLIPPED_SCALED, 4, "fp16", scale=True, clip="scaled"),
        ),
        ("every gradient is clipped to a norm of 1", *_OF_16_BITS),
    ),
}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("explain")
    topics = "; ".join(f"{name}: {topic.what}" for name, topic in TOPICS.items())
    parser.add_argument("topic", choices=TOPICS, help=topics)
    parser.takes(explain, "")


def explain(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Measure and print the table of a topic. Raise `Failure` if a rank failed."""
    topic, hardware = TOPICS[options.topic], read_hardware()
    device = "cuda" if len(hardware.gpus) >= RANKS else "cpu"
    print(f"{options.topic}: {topic.what}\n{hardware}: {RANKS} processes measure on {device}", flush=True)
    _print(topic, measured(options.topic, device, hardware.cores))
    return 0


def measured(topic: str, device: str, cores: int) -> Json:
    """Run `steps.measure` on all ranks, return rank 0's result. Raise `Failure` if a rank fails."""
    requests = [{"topic": topic, "device": device, "rank": rank} for rank in range(RANKS)]
    environment = {**os.environ, THREADS: str(threads_per_process(cores, RANKS))}
    with processes.ask("launch.explain.steps", requests, environment) as ranks:
        for codes in processes.watch(ranks):
            if any(codes):
                break
        if failed := [f"rank {at} failed: {rank.end()}" for at, rank in enumerate(ranks) if rank.process.poll()]:
            raise Failure("\n".join(failed))
        return ranks[0].answer


# --- Printing -------------------------------------------------------------------------------------


def _print(topic: Topic, found: Json) -> None:
    rows = [{**vars(variant), **row} for variant, row in zip(topic.variants, found["rows"], strict=True)]
    batch = f"{RANKS} ranks x {SEQUENCES} sequences of {found['tokens'] + 1} tokens"
    print(f"{found['backend']}: a decoder of {found['parameters']:,} parameters, {batch} per optimizer step\n")
    cells = [_cells(row, rows[0]) for row in rows]
    print_table([*cells[0]], [[*row.values()] for row in cells])
    print("\n".join(["", *(f"{variant.name}: {variant.reason}" for variant in topic.variants), ""]))
    if any(variant.goal for variant in topic.variants):
        print_table(*goals(rows), whole=True)
        print()
    print("\n".join([*_NOTES, *topic.notes]).format(STEPS=STEPS, **found))
    print("the code of these steps: gradient() and update() in launch/explain/steps.py")


def _cells(row: Json, first: Json) -> dict[str, str]:
    return {
        "": row["name"],
        "memory": f"{row['peak_bytes'] / 1e6:.1f} MB",
        "samples/s": f"{RANKS * SEQUENCES / row['seconds']:.1f}",
        "speed": _speed(row, first),
        "syncs": f"{row['synchronisations']:g}",
        "sent": f"{row['sent_bytes'] / 1e6:.1f} MB",
        "loss": "not finite" if row["loss"] is None else f"{row['loss']:.2f}",
        "gradient": f"x {row['gradient'] / first['gradient']:.3g}",
        "off": "" if row is first else f"{row['difference']:.1g}",
        "zeroed": "" if row is first else f"{row['lost']:.2%}",
    }


def _speed(row: Json, first: Json) -> str:
    """Format the speed relative to the first row, with its error."""
    ratio = first["seconds"] / row["seconds"]
    return "x 1" if row is first else f"x {ratio:.2f} ± {ratio * (row['off'] + first['off']):.2f}"


def goals(rows: list[Json]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table with columns for accumulation, for AMP and for both."""
    first, shown = rows[0], [row for row in rows if row["goal"]]
    return ["", *(row["goal"] for row in shown)], [
        ["is for", "batches too large for memory", "faster arithmetic, smaller activations", "large batches, fast"],
        ["memory", *(f"x {row['peak_bytes'] / first['peak_bytes']:.2f}" for row in shown)],
        ["speed", *(_speed(row, first) for row in shown)],
        ["gradient is off by", *(f"{row['difference']:.1g}" for row in shown)],
        ["syncs per step", *(f"{row['synchronisations']:g}" for row in shown)],
        ["can be combined", "yes: average micro-batch losses", "yes: unscale_ fp16 before clipping", "combined here"],
    ]
