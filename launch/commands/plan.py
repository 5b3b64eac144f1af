"""`recipes plan`: the memory of each recipe on a GPU that need not be here, and which to take."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from launch import plots
from launch.flags import Commands, count
from launch.terminal import print_table
from recipes.errors import mistake
from recipes.planner.fits import CLOSED_FORM_MARGIN, MARGIN, BatchSplit, Planned
from recipes.planner.plan import Plan, plan_memory
from recipes.planner.speed import ASSUMED_MFU, StepTime
from recipes.run import Json, with_flags

_GIB = 2**30
_COLOURS = (plots.BLUE, plots.SKY, plots.GREEN, plots.ORANGE, plots.YELLOW, plots.PURPLE, plots.GREY)
_HEADS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logits",
    "buffers": "buffers",
    "context": "context",
}


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        usage="recipes plan --model ID|FOLDER|config.json|SIZE [--gpu NAME | --gpu_memory GB] [--host_memory GB] "
        "[--num_processes N] [--nodes N] [--recipe NAME] [--accelerate_config FILE|NAME] [--mfu SHARE] "
        "[--bandwidth GB/s] [--plot FILE] [--json] [any train.py flags]",
    )
    parser.add_argument("--model", required=True, help="a Hub id, a folder, a config.json, or a size: 7B")
    parser.add_argument("--gpu", metavar="NAME", help="a card: A100 80GB, H100, L4, ...")
    parser.add_argument("--gpu_memory", "--gpu-memory", metavar="GB", type=_size, help="usable GB of another card")
    ram = "GB of RAM per node [any is enough]"
    parser.add_argument("--host_memory", "--host-memory", metavar="GB", type=_size, help=ram)
    parser.add_argument("--num_processes", "--num-processes", type=count, default=1, help="number of GPUs [1]")
    parser.add_argument("--nodes", type=count, default=1, help="nodes that these GPUs are on [1]")
    parser.add_argument("--recipe", metavar="NAME", help="plan only this recipe, or a file of your own")
    parser.add_argument(
        "--accelerate_config",
        "--accelerate-config",
        metavar="FILE|NAME",
        help="instead of the recipe's own YAML",
    )
    share = f"share of the GPU's peak that a step reaches [{ASSUMED_MFU}]"
    parser.add_argument("--mfu", metavar="SHARE", type=_share, default=ASSUMED_MFU, help=share)
    parser.add_argument("--bandwidth", metavar="GB/s", type=_size, help="between GPUs: busbw of nccl-tests")
    parser.add_argument("--plot", metavar="FILE", help="draw the recipes' memory as .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, and whole milliseconds")
    parser.set_defaults(run=show_plan)


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return size


def _share(text: str) -> float:
    size = _size(text)
    if size > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1")
    return size


def show_plan(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if options.plot is not None and Path(options.plot).suffix not in (".png", ".svg", ".pdf"):
        raise mistake("plot", f"{options.plot!r} is not a picture file", "a name that ends in .png, .svg or .pdf")
    plan = plan_memory(
        options.model,
        gpu=options.gpu,
        gpu_memory=options.gpu_memory,
        num_processes=options.num_processes,
        nodes=options.nodes,
        recipe=options.recipe,
        argv=rest,
        accelerate_config=options.accelerate_config,
        mfu=options.mfu,
        bandwidth=options.bandwidth,
        host_memory=options.host_memory,
    )
    if options.plot:
        plot(plan, options.plot)
    print(json.dumps(as_json(plan), indent=2)) if options.json else _print(plan, options.num_processes)
    return 0


def as_json(plan: Plan) -> Json:
    """The plan as `--json` prints it: sizes in bytes, times in whole ms, None if unknown."""
    return {
        "model": {"name": plan.model, "parameters": plan.parameters},
        "gpu": {"name": plan.gpu, "usable_bytes": plan.usable_bytes},
        "recommended": plan.recommended,
        "command": plan.command,
        "recipes": [
            {**asdict(entry), "total_bytes": entry.total_bytes, **_time_as_json(plan.times[entry.name])}
            for entry in plan.recipes
        ],
        "choices": [
            {
                **{name: value for name, value in vars(split).items() if name != "time"},
                **_time_as_json(split.time),
            }
            for split in plan.choices
        ],
        "refused": plan.refused,
        "next_steps": [
            {
                **{name: value for name, value in vars(step).items() if name != "seconds"},
                "step_ms": _milliseconds(step.seconds),
            }
            for step in plan.next_steps
        ],
    }


def _time_as_json(time: StepTime) -> Json:
    return {
        "sent_bytes": time.sent_bytes,
        "compute_ms": _milliseconds(time.compute),
        "communication_ms": _milliseconds(time.communication),
        "host_ms": _milliseconds(time.host),
    }


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _print(plan: Plan, processes: int) -> None:
    cards = plan.gpu if processes == 1 else f"{processes} x {plan.gpu}"
    trained = "" if plan.trained == plan.parameters else f" ({plan.trained:,} of them trained)"
    longest = "" if plan.length == plan.asked_length else f", the model's longest ({plan.asked_length:,} requested)"
    host = "" if plan.usable_host_bytes is None else f", {_gib(plan.usable_host_bytes)} GiB of RAM per node"
    print(f"{plan.model}, {plan.parameters:,} parameters{trained}, sequences of {plan.length:,} tokens{longest}")
    print(f"{cards}, {_gib(plan.usable_bytes)} GiB usable{host}; a plan fits with {MARGIN:.0%} to spare\n")
    print("GiB on each GPU, and in the RAM of each node (host):")
    timed = plan.times[plan.recipes[0].name].total is not None  # what is known for one is known for all
    heads = ["recipe", "batch", *_HEADS.values(), "total", "fits", "host"] + ["step"] * timed
    print_table(heads, [_row(entry, plan.times[entry.name].total) for entry in plan.recipes])
    if timed:
        speed = "if --bandwidth says how fast" if plan.bandwidth is None else f"at {plan.bandwidth / 1e9:g} GB/s"
        print(f"step: compute at {plan.mfu:.0%} of the GPU's peak (--mfu), sending {speed}, and at least what")
        print("offload adds: PCIe, and Adam on the host. In truth these overlap in part.")
    for entry in plan.recipes:
        if entry.flags:
            print(f"{entry.name}: with {shlex.join(with_flags([], entry.flags))}; without it, no micro-batch fits")
    for name, why in plan.refused.items():
        print(f"{name}: not legal with these flags: {why}")
    print()
    if not all(entry.traced for entry in plan.recipes):
        print(
            f"this model cannot be traced: memory is estimated from its shape, with {CLOSED_FORM_MARGIN:.0%} to spare\n"
        )
    best = next((entry for entry in plan.recipes if entry.name == plan.recommended), None)
    if best is None:
        _print_next_steps(plan)
        return
    _print_splits(plan, best.name, processes)
    print(f"take {best.name}, {_why(plan.times[best.name])}: {plan.command}")
    for step in plan.next_steps:
        time = "" if step.seconds is None else f" and {_seconds(step.seconds)} a step"
        print(f"or train adapters, without offload, in {_gib(step.total_bytes)} GiB{time}: {step.words}")


def _why(time: StepTime) -> str:
    """What the recommended recipe is among those that fit."""
    if time.total is not None:
        return "the fastest that fits"
    return "the fastest that fits, apart from compute, which is unknown" if time.known else "the first that fits"


def _print_splits(plan: Plan, name: str, processes: int) -> None:
    """The ways to split the global batch: memory, and time per step where it is known."""
    time = plan.choices[0].time  # what is known for one split is known for all
    if len(plan.choices) == 1 or (time.compute is None and processes == 1):
        return
    print(f"{name} at the same global batch, micro-batch x accumulation x GPUs, per step:")
    heads = ["batch", "GiB", "fits"] + ["compute"] * (time.compute is not None)
    heads += ["sent by each GPU"] * (processes > 1) + ["sending", "of compute"] * (time.communication is not None)
    print_table(heads, [_split_row(split, processes, len(heads)) for split in plan.choices])
    if time.compute is not None:
        print("compute: a small micro-batch reaches a smaller share of the peak")
    if processes > 1:
        speed = "--bandwidth GB/s adds its time" if plan.bandwidth is None else f"at {plan.bandwidth / 1e9:g} GB/s"
        print(f"sending: {speed}; part of it overlaps with compute")
    print()


def _split_row(split: BatchSplit, processes: int, columns: int) -> list[str]:
    time = split.time
    row = [f"{split.micro_batch} x {split.accumulation} x {processes}", _gib(split.total_bytes)]
    row.append("yes" if split.fits else "no")
    if time.compute is not None:
        row.append(_seconds(time.compute))
    if processes > 1:
        row.append(f"{time.sent_bytes / 1e9:,.2f} GB")
    if time.communication is not None:
        row.append(_seconds(time.communication))
        row.append(f"{time.communication / time.compute:.0%}" if time.compute else "")
    return row[:columns]


def _print_next_steps(plan: Plan) -> None:
    print("nothing fits. What to try, in this order, each at micro-batch 1:")
    rows = [
        [str(number), _gib(step.total_bytes), _gib(step.saves_bytes), "yes" if step.fits else "no", step.slowdown]
        for number, step in enumerate(plan.next_steps, 1)
    ]
    print_table(["", "GiB", "saves", "fits", "slowdown"], rows)
    for number, step in enumerate(plan.next_steps, 1):
        print(f"{number}: {step.words}")
    if not any(step.fits for step in plan.next_steps):
        print("none of these is enough: use more GPUs with sharded or memory_zero3, or a smaller model")


def plot(plan: Plan, file: str) -> None:
    """Draw each recipe as a stacked bar, with a line at the usable memory. Raises `UserError`."""
    figure = plots.new_figure(8, 1.6 + 0.6 * len(plan.recipes))
    axes = figure.subplots()
    names = [f"{entry.name}\n{entry.micro_batch} x {entry.accumulation}" for entry in plan.recipes]
    left = [0.0] * len(names)
    for part, colour in zip(_HEADS, _COLOURS, strict=True):
        sizes = [getattr(entry.components, part) / _GIB for entry in plan.recipes]
        axes.barh(names, sizes, left=left, label=part, color=colour)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(plan.usable_bytes / _GIB, color="black", linestyle="--", label="usable")
    axes.invert_yaxis()
    axes.set_xlabel("GiB on each GPU")
    axes.set_title(f"{plan.model}, sequences of {plan.length:,} tokens, {plan.gpu}", loc="left")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise mistake("plot", f"{file} cannot be written: {error}", "choose a writable folder") from None


def _row(entry: Planned, seconds: float | None) -> list[str]:
    parts = [_gib(getattr(entry.components, name)) for name in _HEADS]
    batch = f"{entry.micro_batch} x {entry.accumulation}"
    fits = "yes" if entry.fits else "no (host)" if entry.fits_gpu else "no"
    row = [entry.name, batch, *parts, _gib(entry.total_bytes), fits, _gib(entry.host_bytes_per_node)]
    return row if seconds is None else [*row, _seconds(seconds)]


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
