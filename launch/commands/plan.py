"""`recipes plan`: print each recipe's memory per GPU, for any machine, and the best recipe."""

import argparse
import gc
from collections.abc import Sequence

from launch.commands.train import in_own_yaml
from launch.flags import Commands
from launch.terminal import console, duration, print_problems, print_progress, print_table
from recipes.planner.fits import MARGIN, Planned
from recipes.planner.memory import EVALUATION
from recipes.planner.plan import Plan, plan_memory

_GIB = 2**30
# The columns of the table, by component of the memory.
_HEADS = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ", "logits": "logits",
    "buffers": "buffers", "cached": "cached", "context": "context",
}  # fmt: skip
_EXPLANATION = f"""\
batch: examples in a micro-batch x micro-batches in a step, on each GPU
params: the weights, or this GPU's share of them, and the weights that are gathered at the same time
grads: gradients at the step's peak; 0 if the peak comes before the backward pass has made any
optim: the optimizer's state, such as Adam's two moments, or this GPU's share of it
activ: tensors that the forward pass keeps for the backward pass, and autocast's 16-bit weights
logits: tensors as wide as the vocabulary: the head's output, the loss, and their gradients
buffers: buckets of DDP and DeepSpeed, send buffers of FSDP, cuBLAS workspaces, the model's buffers
cached: memory that torch has reserved in pieces too small to use; 0 if the other columns alone do not fit
context: memory outside torch's allocator, for CUDA's driver and kernels and for NCCL
total: the sum of these columns at the moment of most memory, not the sum of each column's own peak. For the process,
nvidia-smi shows total; torch's memory_reserved is total - context, and memory_allocated is total - context - cached
fits: yes if total fits the GPU with {MARGIN:.0%} to spare, and host fits the RAM given by --host_memory
host: RAM of a node: the model during loading; later the offloaded states, and copies of the weights during a save
step: seconds of an optimizer step: compute + exposed communication + offload
not counted: memory of data loading; savings by torch.compile of a whole model
how sure: of 21 published values of reserved memory, one lies 3.5% above the plan, and no other more than 1.6%
above it (python -m tests.benchmarks.published); so a plan keeps {MARGIN:.0%} free. Of 28 plans for an H200, made when
the measured values were known, 25 were within 1.6%, two within 5%, a mixture of experts 8% below (python -m tests.gpu)
"""


_FLAGS = """
--gpu NAME                     name of the GPU: A100 80GB, H100, L4, ...
--gpu_memory GB                usable GB of the GPU, in place of --gpu
--host_memory GB               GB of RAM per node [no limit]
--num_processes N              number of GPUs [num_processes of your own Accelerate YAML, or 1]
--nodes N                      number of nodes that hold these GPUs [1]
--recipe NAME                  plan only this recipe: a name, or a file of your own
--accelerate_config FILE|NAME  Accelerate YAML in place of the recipe's own
--mfu SHARE                    share of the GPU's peak that a step reaches, such as 0.4 [published value, else 0.35]
--bandwidth GB/s               bandwidth between GPUs: busbw of nccl-tests [value of NVLink or PCIe, in one node]
--details                      explain the columns and the times, and print other splits of the batch
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("plan")
    model = ("--model", "--model_name_or_path")  # the second is the name of train.py's flag
    parser.add_argument(*model, required=True, help="a Hub id, a folder, a config.json, or a size: 7B")
    parser.takes(show_plan, _FLAGS, nodes=1)


def show_plan(options: argparse.Namespace, rest: Sequence[str]) -> int:
    processes = options.num_processes or in_own_yaml(options.accelerate_config) or 1
    asked = ("gpu", "gpu_memory", "host_memory", "nodes", "recipe", "accelerate_config", "mfu", "bandwidth")
    given = {name: getattr(options, name) for name in asked}
    print_progress(f"planning {options.model}, which takes some seconds", console(stderr=True))
    gc.disable()  # garbage collection would visit every object of torch and transformers again and again
    try:
        plan = plan_memory(options.model, num_processes=processes, argv=rest, **given)
    finally:
        gc.enable()
    _print(plan, processes, options.details)
    return 0


def _print(plan: Plan, processes: int, details: bool) -> None:
    """Print the recommendation and the table behind it; with `details` also the assumptions."""
    cards = plan.gpu if processes == 1 else f"{processes} x {plan.gpu}"
    trained = "" if plan.trained == plan.parameters else f" ({plan.trained:,} of them trained)"
    longest = "" if plan.length == plan.asked_length else f", the model's longest ({plan.asked_length:,} requested)"
    host = "" if plan.usable_host_bytes is None else f", {_gib(plan.usable_host_bytes)} GiB of RAM per node"
    if plan.recommended:
        _print_answers(plan)
    else:
        _print_next_steps(plan)
    if plan.advice:
        print_problems(plan.advice, console())
    print(f"\n{plan.model}, {plan.parameters:,} parameters{trained}, sequences of {plan.length:,} tokens{longest}")
    if plan.shape:
        print(plan.shape)
    print(f"{cards}, {_gib(plan.usable_bytes)} GiB usable{host}; a plan must leave {MARGIN:.0%} free")
    print("\nGiB on each GPU, and in the RAM of each node (host):")
    timed = plan.recipes[0].time.total is not None  # a time is known for all recipes or for none
    heads = ["recipe", "batch", *_HEADS.values(), "total", "fits", "host"] + ["step"] * timed
    print_table(heads, [_row(entry) for entry in plan.recipes], whole=True)
    _print_notes(plan)
    if details or not timed:
        _print_time(plan, processes, timed)
    if not details:
        print("add --details to see what each column means, how times are estimated, and other batch splits")
        return
    if plan.recommended:
        _print_splits(plan, processes)
    context, source = plan.context
    print(f"context: {context / 2**20:,.0f} MiB, {source}")
    print(_EXPLANATION)


def _print_answers(plan: Plan) -> None:
    """Print the recommended recipe, and changes that make offload unnecessary, fastest first."""
    best = next(entry for entry in plan.recipes if entry.name == plan.recommended)
    whole = [entry for entry in plan.recipes if entry.run.engine.offload_optimizer == "none"]
    if whole and not any(entry.fits for entry in whole):
        least = min(whole, key=lambda entry: entry.total_bytes)
        print(f"no recipe fits without offload: even {least.name} needs {_gib(least.total_bytes)} GiB")
    answers = [(best.time.total, f"take {best.name}, {_why(plan)}", best, plan.command)]
    for step in plan.next_steps:
        adapters = "train adapters, " if step.planned.run["use_peft"] and plan.trained == plan.parameters else ""
        answers.append((step.planned.time.total, f"{adapters}without offload", step.planned, step.words))
    answers.sort(key=lambda answer: answer[0] or 0)  # if no time is known, all are 0 and the order stays
    for number, (seconds, what, entry, command) in enumerate(answers):
        free = plan.usable_bytes - entry.total_bytes
        sizes = f"{_gib(entry.total_bytes)} of {_gib(plan.usable_bytes)} GiB, {_gib(free)} GiB free"
        sizes += f", {_gib(entry.host_bytes_per_node)} GiB of RAM on each node" if entry.time.host else ""
        time = "" if seconds is None else f", {duration(seconds)} a step"
        print(f"{'or ' * bool(number)}{what}: {sizes}{time}\n  {command}")


def _print_time(plan: Plan, processes: int, timed: bool) -> None:
    """Print the parts and assumptions of a step's time, or the reason that the time is unknown."""
    if not timed:
        ignored = "; --mfu has no effect" if plan.mfu_source == "--mfu" else ""
        print(f"the time of a step is unknown: {plan.unknown_compute}{ignored}")
        return
    parts = [f"step: compute at {plan.mfu:.0%} of the GPU's peak ({plan.mfu_source})"]
    if processes > 1:
        link = "left out: --bandwidth GB/s adds it"
        link = f"at {plan.bandwidth / 1e9:g} GB/s, {plan.link}" if plan.bandwidth is not None else link
        parts.append(f"exposed communication ({link})")
    if any(entry.time.host for entry in plan.recipes):
        parts.append("offload, a lower bound (transfers at PCIe's data-sheet rate, Adam at its published speed)")
    print(" + ".join(parts) + "; data, evaluation and saves are left out")


def _print_notes(plan: Plan) -> None:
    """Print notes on individual recipes, and then the recipes that are refused."""
    for entry in plan.recipes:
        if entry.moment == EVALUATION:
            print(f"{entry.name}: evaluations set the peak; a smaller --per_device_eval_batch_size lowers it")
    for note in dict.fromkeys(note for entry in plan.recipes for note in entry.notes):
        print(f"{', '.join(entry.name for entry in plan.recipes if note in entry.notes)}: {note}")
    for name, why in plan.refused.items():
        print(f"{name}: not legal with these flags: {why}")
    print()


def _why(plan: Plan) -> str:
    """Return the reason to prefer the recommended recipe among the recipes that fit."""
    if sum(entry.fits for entry in plan.recipes) == 1:
        return "which fits"
    return "which fits with the least communication and offload" if plan.unknown_compute else "the fastest that fits"


def _print_splits(plan: Plan, processes: int) -> None:
    """Print the ways to split the global batch, with memory, and time per step if known."""
    rows = []
    for split in plan.choices():
        step = "unknown" if split.time.total is None else duration(split.time.total)
        batch = f"{split.micro_batch} x {split.accumulation} x {processes}"
        rows.append([batch, _gib(split.total_bytes), _fits(split), step])
    if len(rows) > 1:
        print(f"{plan.recommended} with the same global batch, as micro-batch x accumulation x GPUs:")
        print_table(["batch", "GiB", "fits", "step"], rows)
        print()


def _print_next_steps(plan: Plan) -> None:
    """Print the changes to try if nothing fits on the GPU or in the RAM of a node."""
    enough = "more RAM" if plan.short_of_ram else "more GPUs with --recipe sharded or memory_zero3"
    short = "nothing fits as requested"
    if plan.short_of_ram:
        needed = min(entry.host_bytes_per_node for entry in plan.recipes if entry.fits_gpu) * (1 + MARGIN)
        short = f"only the RAM of each node is too small: {_gib(round(needed))} GiB are needed"
    if not plan.next_steps:
        print(f"{short}, and no known change of settings needs less: use {enough}, or a smaller model")
        return
    print(f"{short}. Try these changes, in this order, at the same global batch:")
    rows = []
    for number, step in enumerate(plan.next_steps, 1):
        entry = step.planned
        sizes = (entry.total_bytes, step.saves_bytes, entry.host_bytes_per_node, step.saves_host_bytes)
        rows.append([str(number), *map(_gib, sizes), _fits(entry), step.slowdown])
    print_table(["", "GiB", "saves", "host", "saves", "fits", "slowdown"], rows)
    for number, step in enumerate(plan.next_steps, 1):
        print(f"{number}: {step.words}")
    if not any(step.planned.fits for step in plan.next_steps):
        print(f"none of these changes is enough: use {enough}, or a smaller model")


def _row(entry: Planned) -> list[str]:
    parts = [_gib(getattr(entry.components, name)) for name in _HEADS]
    batch, seconds = f"{entry.micro_batch} x {entry.accumulation}", entry.time.total
    row = [entry.name, batch, *parts, _gib(entry.total_bytes), _fits(entry), _gib(entry.host_bytes_per_node)]
    return row if seconds is None else [*row, duration(seconds)]


def _fits(entry: Planned) -> str:
    return "yes" if entry.fits else "no (host)" if entry.fits_gpu else "no"


def _gib(size: int) -> str:
    return f"{round(size / _GIB, 1) + 0:,.1f}"  # + 0, or a small negative size would be -0.0
