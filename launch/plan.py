"""`recipes plan`: what each recipe would keep in memory on a GPU that need not be here, and the one to take."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recipes.errors import mistake
from recipes.plan import CLOSED_FORM_MARGIN, MARGIN, Plan, Planned, plan_memory

_GIB = 2**30
_HEADS = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "activ",
    "logits": "logits",
    "buffers": "buffers",
    "context": "context",
}


def add_parser(commands: Any, count: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="say which recipe fits a GPU, before anything runs",
        allow_abbrev=False,
        usage="recipes plan --model ID|FOLDER|config.json|SIZE [--gpu NAME | --gpu_memory GB] [--num_processes N] "
        "[--nodes N] [--recipe NAME] [--json] [any train.py flags]",
    )
    parser.add_argument("--model", required=True, help="a Hub id, a folder, a config.json, or a size: 7B")
    parser.add_argument("--gpu", metavar="NAME", help="a card: A100 80GB, H100, L4, ...")
    parser.add_argument("--gpu_memory", "--gpu-memory", metavar="GB", type=_size, help="usable GB of another card")
    parser.add_argument("--num_processes", "--num-processes", type=count, default=1, help="GPUs in all [1]")
    parser.add_argument("--nodes", type=count, default=1, help="[1]")
    parser.add_argument("--recipe", metavar="NAME", help="only this one")
    parser.add_argument("--json", action="store_true", help="bytes and whole numbers")
    parser.set_defaults(run=show_plan)


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GB")
    return size


def show_plan(options: argparse.Namespace, rest: Sequence[str]) -> int:
    if (options.gpu is None) == (options.gpu_memory is None):
        raise mistake("gpu", "one card is planned for", "--gpu NAME, or --gpu_memory GB")
    plan = plan_memory(
        options.model,
        gpu=options.gpu,
        gpu_memory=options.gpu_memory,
        num_processes=options.num_processes,
        nodes=options.nodes,
        recipe=options.recipe,
        argv=rest,
    )
    print(json.dumps(as_json(plan), indent=2)) if options.json else _print(plan, options.num_processes)
    return 0


def as_json(plan: Plan) -> dict[str, Any]:
    """Bytes and whole numbers only."""
    return {
        "model": {"name": plan.model, "parameters": plan.parameters},
        "gpu": {"name": plan.gpu, "usable_bytes": plan.usable_bytes},
        "recommended": plan.recommended,
        "recipes": [
            {**{name: value for name, value in asdict(entry).items()}, "total_bytes": entry.total_bytes}
            for entry in plan.recipes
        ],
    }


def _print(plan: Plan, processes: int) -> None:
    from launch.report import print_table

    cards = plan.gpu if processes == 1 else f"{processes} x {plan.gpu}"
    print(f"{plan.model}, {plan.parameters:,} parameters, sequences of {plan.length:,} tokens")
    print(f"{cards}, {_gib(plan.usable_bytes)} GiB usable; a plan fits with {MARGIN:.0%} to spare\n")
    print("GiB on each GPU, and in the RAM of each node (host):")
    print_table(["recipe", "batch", *_HEADS.values(), "total", "fits", "host"], [_row(entry) for entry in plan.recipes])
    print()
    if not all(entry.traced for entry in plan.recipes):
        print(
            f"this model cannot be traced: estimated from its shape, with {CLOSED_FORM_MARGIN:.0%} to spare instead\n"
        )
    best = next((entry for entry in plan.recipes if entry.name == plan.recommended), None)
    if best is None:
        print("nothing fits: --gradient_checkpointing true, --optim adamw_bnb_8bit, a shorter --max_length, more GPUs")
        print("with --recipe memory_zero3, or a larger --gpu")
        return
    micro = f"--per_device_train_batch_size {best.micro_batch}"
    print(f"take {best.name}, the fastest that fits: --recipe {best.name} {micro}")


def _row(entry: Planned) -> list[str]:
    parts = [_gib(getattr(entry.components, name)) for name in _HEADS]
    batch = f"{entry.micro_batch} x {entry.accumulation}"
    fits = "yes" if entry.fits else "no"
    return [entry.name, batch, *parts, _gib(entry.total_bytes), fits, _gib(entry.host_bytes_per_node)]


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f}"
