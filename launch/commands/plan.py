"""`recipes plan`: the memory of each recipe on a GPU that need not be here, and which to take."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from launch.commands import plan_picture
from launch.commands.train import in_own_yaml
from launch.flags import Commands, count, spellings
from launch.terminal import console, duration, print_problems, print_table
from recipes.planner.fits import CLOSED_FORM_MARGIN, MARGIN, Planned
from recipes.planner.plan import Plan, plan_memory
from recipes.planner.shapes import EVALUATION, Components
from recipes.planner.speed import StepTime
from recipes.run import Json

_GIB = 2**30
_SILENT_SECONDS = 2
# The columns of the table, and what each holds.
_COLUMNS = {
    "parameters": ("params", "the weights, as this GPU keeps them or its share, and what is gathered of them at once"),
    "gradients": ("grads", "gradients at the fullest moment of a step; 0 if they are made while activations go"),
    "optimizer": ("optim", "the optimizer's state, such as Adam's two moments, or this GPU's share of it"),
    "activations": ("activ", "what the forward pass keeps for the backward pass, and autocast's 16-bit weights"),
    "logits": ("logits", "tensors as wide as the vocabulary: the head's output, its loss, their gradients"),
    "buffers": ("buffers", "what is neither weight nor gradient: DDP's and DeepSpeed's buckets, the model's buffers"),
    "cached": ("cached", "what torch has reserved in pieces that nothing fits into; it may shrink as the rest grows"),
    "context": ("context", "what CUDA takes for itself before the first tensor: driver and kernels"),
}
_HEADS = {part: head for part, (head, _) in _COLUMNS.items()}
_OTHER_COLUMNS = {
    "batch": "examples in a micro-batch x micro-batches in a step, on each GPU",
    "total": "the sum of these, at the moment of a step or evaluation that needs most; not each part's own peak",
    "fits": f"whether total fits the GPU with {MARGIN:.0%} to spare, and host the RAM that --host_memory says",
    "host": "RAM of a node: the model while it is loaded; later what is offloaded, and copies of it for a save",
    "step": "seconds of an optimizer step: compute, what it does not hide of sending, and offload",
}
_ASKED = ("gpu", "gpu_memory", "host_memory", "nodes", "recipe", "accelerate_config", "mfu", "bandwidth")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        usage="recipes plan --model ID|FOLDER|config.json|SIZE [--gpu NAME | --gpu_memory GB] [--host_memory GB] "
        "[--num_processes N] [--nodes N] [--recipe NAME] [--accelerate_config FILE|NAME] [--mfu SHARE] "
        "[--bandwidth GB/s] [--plot FILE] [--explain] [--json] [any train.py flags]",
    )
    parser.add_argument("--model", required=True, help="a Hub id, a folder, a config.json, or a size: 7B")
    parser.add_argument("--gpu", metavar="NAME", help="a card: A100 80GB, H100, L4, ...")
    parser.add_argument(*spellings("gpu_memory"), metavar="GB", type=_size, help="usable GB of another card")
    ram = "GB of RAM per node [any is enough]"
    parser.add_argument(*spellings("host_memory"), metavar="GB", type=_size, help=ram)
    gpus = "number of GPUs [num_processes of an Accelerate YAML of your own, or 1]"
    parser.add_argument(*spellings("num_processes"), type=count, help=gpus)
    parser.add_argument("--nodes", type=count, default=1, help="nodes that these GPUs are on [1]")
    parser.add_argument("--recipe", metavar="NAME", help="plan only this recipe, or a file of your own")
    yaml = "instead of the recipe's own YAML"
    parser.add_argument(*spellings("accelerate_config"), metavar="FILE|NAME", help=yaml)
    share = "share of the GPU's peak that a step reaches [as published for the card]"
    parser.add_argument("--mfu", metavar="SHARE", type=_share, help=share)
    busbw = "between GPUs: busbw of nccl-tests [NVLink's or PCIe's, in one node]"
    parser.add_argument("--bandwidth", metavar="GB/s", type=_size, help=busbw)
    parser.add_argument("--plot", metavar="FILE", help="draw the recipes' memory as .png, .svg or .pdf")
    parser.add_argument("--explain", action="store_true", help="say what each column holds, and what is not counted")
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
    if options.plot is not None:
        plan_picture.require_writable(options.plot)
    processes = options.num_processes or in_own_yaml(options.accelerate_config) or 1
    asked = {name: getattr(options, name) for name in _ASKED}
    with _note_if_slow(options.model):
        plan = plan_memory(options.model, num_processes=processes, argv=rest, **asked)
    if options.plot:
        plan_picture.draw(plan, _HEADS, options.plot)
    print(json.dumps(as_json(plan), indent=2)) if options.json else _print(plan, processes, options.explain)
    return 0


@contextlib.contextmanager
def _note_if_slow(model: str) -> Iterator[None]:
    """A line on stderr if the plan takes a while: each micro-batch that it tries runs the model."""
    words = f"planning {model}: up to a minute for a large model, or where little fits"
    timer = threading.Timer(_SILENT_SECONDS, print, (words,), {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def as_json(plan: Plan) -> Json:
    """The plan as `--json` prints it: sizes in bytes, times in whole ms, None if unknown.

    `margin` is the share of the total that must stay free beside it.
    """
    return {
        "model": {"name": plan.model, "parameters": plan.parameters, "trained": plan.trained, "shape": plan.shape},
        "length": plan.length,
        "asked_length": plan.asked_length,
        "margin": _margin(plan),
        "context": asdict(plan.context),
        "gpu": {"name": plan.gpu, "usable_bytes": plan.usable_bytes},
        "assumed": {
            "mfu": plan.mfu,
            "mfu_source": plan.mfu_source,
            "unknown_compute": plan.unknown_compute,
            "bytes_per_second": plan.bandwidth,
            "link": plan.link,
            "host_source": plan.host_source,
        },
        "recommended": plan.recommended,
        "command": plan.command,
        "advice": [vars(problem) for problem in plan.advice],
        "recipes": [
            asdict(entry) | _totals(entry.components) | _time_as_json(plan.times[entry.name]) for entry in plan.recipes
        ],
        "choices": [_without(split, "time") | _time_as_json(split.time) for split in plan.choices],
        "refused": plan.refused,
        "next_steps": [
            _without(step, "seconds") | {"step_ms": _milliseconds(step.seconds)} for step in plan.next_steps
        ],
    }


def _without(entry: object, left_out: str) -> Json:
    return {name: value for name, value in vars(entry).items() if name != left_out}


def _totals(components: Components) -> Json:
    """The sums by the names of what reads them on a GPU; `total_bytes` is that of nvidia-smi."""
    return {
        "memory_allocated": components.allocated,
        "memory_reserved": components.reserved,
        "total_bytes": components.total,
    }


def _time_as_json(time: StepTime) -> Json:
    parts = {"compute": time.compute, "communication": time.communication, "host": time.host}
    return {"sent_bytes": time.sent_bytes} | {f"{name}_ms": _milliseconds(part) for name, part in parts.items()}


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)


def _print(plan: Plan, processes: int, explain: bool) -> None:
    cards = plan.gpu if processes == 1 else f"{processes} x {plan.gpu}"
    trained = "" if plan.trained == plan.parameters else f" ({plan.trained:,} of them trained)"
    longest = "" if plan.length == plan.asked_length else f", the model's longest ({plan.asked_length:,} requested)"
    host = "" if plan.usable_host_bytes is None else f", {_gib(plan.usable_host_bytes)} GiB of RAM per node"
    print(f"{plan.model}, {plan.parameters:,} parameters{trained}, sequences of {plan.length:,} tokens{longest}")
    if plan.shape:
        print(plan.shape)
    print(f"{cards}, {_gib(plan.usable_bytes)} GiB usable{host}; a plan fits with {MARGIN:.0%} to spare\n")
    print("GiB on each GPU, and in the RAM of each node (host):")
    timed = plan.times[plan.recipes[0].name].total is not None  # what is known for one is known for all
    heads = ["recipe", "batch", *_HEADS.values(), "total", "fits", "host"] + ["step"] * timed
    print_table(heads, [_row(entry, plan.times[entry.name].total) for entry in plan.recipes], whole=True)
    print("total: as nvidia-smi shows the process. Without context it is torch's memory_reserved, without")
    print("cached (reserved in pieces that nothing fits into) too, its memory_allocated.")
    print(f"context: {plan.context.bytes / 2**20:,.0f} MiB, {plan.context.source}")
    if timed:
        sending = ""
        if processes > 1:
            sending = f", what that does not hide of sending {_link(plan, '(left out: --bandwidth GB/s adds it)')}"
        print(f"step: compute at {plan.mfu:.0%} of the GPU's peak ({plan.mfu_source}){sending}")
        if any(time.host for time in plan.times.values()):
            print(f"and at least what offload adds: PCIe, and Adam on the host ({plan.host_source})")
        print("Data, evaluation and saves are left out.")
    else:
        ignored = "; --mfu has no effect" if plan.mfu_source == "--mfu" else ""
        print(f"the time of a step is unknown: {plan.unknown_compute}{ignored}")
    for entry in plan.recipes:
        if entry.moment == EVALUATION:
            print(f"{entry.name}: {_evaluation(entry)}")
    if varied := [entry for entry in plan.recipes if entry.varied_bytes > entry.total_bytes * (1 + MARGIN)]:
        kept = ", ".join(f"{_gib(entry.varied_bytes)} GiB ({entry.name})" for entry in varied)
        print(f"lengths vary, so torch may come to keep {kept}, in pieces of all sizes;")
        print("with PYTORCH_ALLOC_CONF=expandable_segments:True it keeps about the total")
    for note in dict.fromkeys(note for entry in plan.recipes for note in entry.notes):
        print(f"{', '.join(entry.name for entry in plan.recipes if note in entry.notes)}: {note}")
    for name, why in plan.refused.items():
        print(f"{name}: not legal with these flags: {why}")
    print()
    if not all(entry.traced for entry in plan.recipes):
        print(
            f"this model cannot be traced: memory is estimated from its shape, with {CLOSED_FORM_MARGIN:.0%} to spare\n"
        )
    if explain:
        _print_explanation(plan)
    if plan.advice:
        print_problems(plan.advice, console())
        print()
    best = next((entry for entry in plan.recipes if entry.name == plan.recommended), None)
    if best is None:
        _print_next_steps(plan)
        return
    _print_splits(plan, best.name, processes)
    if processes > 1 and best.micro_batch * best.accumulation == 1:
        print(f"micro-batch 1: of a global batch of {processes} each GPU has one; --global_batch_size asks for more")
    print(f"take {best.name}, {_why(plan)}: {plan.command}")
    for step in plan.next_steps:
        time = "" if step.seconds is None else f" and {duration(step.seconds)} a step"
        adapters = "train adapters, " if step.adapters and plan.trained == plan.parameters else ""
        how = "without offload" if plan.times[best.name].host else "with a smaller micro-batch, not checkpointed"
        install = f" after pip install {step.install}" if step.install else ""
        print(f"or {adapters}{how}, in {_gib(step.total_bytes)} GiB{time}{install}: {step.words}")


def _evaluation(entry: Planned) -> str:
    """A line for evaluations that need most, with the flag that makes them fit."""
    words = "evaluations need most, not steps"
    if entry.fits:
        return f"{words}: --per_device_eval_batch_size sets their memory"
    if entry.evaluation_batch is None:
        return words
    return f"{words}; with --per_device_eval_batch_size {entry.evaluation_batch} they fit"


def _print_explanation(plan: Plan) -> None:
    """A line for each column, then what is not counted, and how sure the rest is."""
    parts = {head: words for head, words in _COLUMNS.values()}
    for head, words in {"batch": _OTHER_COLUMNS["batch"], **parts, **_OTHER_COLUMNS}.items():
        print(f"{head}: {words}")
    for reading in plan.context.readings:
        print(f"context of {reading}")
    print("not counted: memory of data loading; kernels of torch.compile")
    print("how sure: of 21 public readings of reserved memory two lie 3.5% and 7.8% above the plan, the others at most")
    print(f"1% (python -m tests.benchmarks.reserved); here {_margin(plan):.0%} is kept free\n")


def _margin(plan: Plan) -> float:
    return MARGIN if all(entry.traced for entry in plan.recipes) else CLOSED_FORM_MARGIN


def _why(plan: Plan) -> str:
    """The reason to take the recommended recipe of those that fit."""
    fitting = [plan.times[entry.name] for entry in plan.recipes if entry.fits]
    if len(fitting) == 1:
        return "the only one that fits" if len(plan.recipes) > 1 else "which fits"
    if not plan.unknown_compute:
        return "the fastest that fits"
    if len({time.known for time in fitting}) > 1:
        parts = "sending and offload take" if plan.bandwidth else "offload takes"
        return f"whose {parts} least time of those that fit"
    return "the first that fits"


def _print_splits(plan: Plan, name: str, processes: int) -> None:
    """The ways to split the global batch: memory, and time per step where it is known."""
    time = plan.choices[0].time  # what is known for one split is known for all
    if len(plan.choices) == 1 or (time.compute is None and processes == 1):
        return
    print(f"{name} at the same global batch, micro-batch x accumulation x GPUs, per step:")
    columns = {
        "batch": [f"{split.micro_batch} x {split.accumulation} x {processes}" for split in plan.choices],
        "GiB": [_gib(split.total_bytes) for split in plan.choices],
        "fits": ["yes" if split.fits else "no" for split in plan.choices],
    }
    times = [split.time for split in plan.choices]
    if time.compute is not None:
        columns["compute"] = [duration(each.compute or 0) for each in times]
    if processes > 1:
        columns["sent by each GPU"] = [f"{each.sent_bytes / 1e9:,.2f} GB" for each in times]
    if time.communication is not None:
        columns["sending"] = [duration(each.communication or 0) for each in times]
        columns["of compute"] = [
            f"{(each.communication or 0) / each.compute:.0%}" if each.compute else "" for each in times
        ]
    print_table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)])
    if time.compute is not None:
        print("compute: a small micro-batch reaches a smaller share of the peak")
    if processes > 1:
        print(f"sending: {_link(plan, '--bandwidth GB/s adds its time')}; computing hides part of it")
    print()


def _link(plan: Plan, otherwise: str) -> str:
    return otherwise if plan.bandwidth is None else f"at {plan.bandwidth / 1e9:g} GB/s ({plan.link})"


def _print_next_steps(plan: Plan) -> None:
    host = plan.short_of_ram
    enough = "more RAM" if host else "more GPUs with sharded or memory_zero3"
    if host:
        needed = min(entry.host_bytes_per_node for entry in plan.recipes if entry.fits_gpu) * (1 + MARGIN)
        print(f"only the RAM of each node is too small: {_gib(round(needed))} GiB are needed", end="")
    else:
        print("nothing fits as asked", end="")
    if not plan.next_steps:
        print(f", and no change of settings is known that needs less: use {enough}, or a smaller model")
        return
    print(". What needs less of it:" if host else ". What to try, in this order, at the same global batch:")
    rows = [
        [
            str(number),
            _gib(step.host_bytes_per_node if host else step.total_bytes),
            "" if step.card else _gib(step.saves_host_bytes if host else step.saves_bytes),
            "yes" if step.fits else "no (host)" if step.fits_gpu and not host else "no",
            step.slowdown,
        ]
        for number, step in enumerate(plan.next_steps, 1)
    ]
    print_table(["", "GiB of RAM" if host else "GiB", "saves", "fits", "slowdown"], rows)
    for number, step in enumerate(plan.next_steps, 1):
        print(f"{number}: {step.words}")
    if not any(step.fits for step in plan.next_steps):
        print(f"none of these is enough: use {enough}, or a smaller model")
    if not host and len(plan.next_steps) > 1 and not any(step.card for step in plan.next_steps):
        print("no known card of this kind has the memory for standard as it is")


def _row(entry: Planned, seconds: float | None) -> list[str]:
    parts = [_gib(getattr(entry.components, name)) for name in _HEADS]
    batch = f"{entry.micro_batch} x {entry.accumulation}"
    fits = "yes" if entry.fits else "no (host)" if entry.fits_gpu else "no"
    row = [entry.name, batch, *parts, _gib(entry.total_bytes), fits, _gib(entry.host_bytes_per_node)]
    return row if seconds is None else [*row, duration(seconds)]


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f}"
