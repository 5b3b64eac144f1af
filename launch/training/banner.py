"""The texts that train.py prints: --help, the banner before the first step, and the results.

This module imports nothing heavy, so that `train.py --help` answers at once.
"""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch.host.world import World
from launch.output.record import has_risen
from launch.terminal import console, duration, memory_size, plural, print_note, print_problems, schedule
from launch.training.failure import only_noted
from recipes import legal
from recipes.catalog import RECIPES
from recipes.rules.facts import advice, mixed_precision
from recipes.run import FIT, Json, RunSpec, shown
from recipes.run.metrics import METRICS

if TYPE_CHECKING:
    import torch

    from launch.data.load import Data
    from launch.output.record import Earlier
    from launch.training.trainer import RecipeTrainer


USAGE = """\
usage: recipes train [--num_processes N] [--recipe NAME|FILE] [--config FILE] [model and data flags] [Trainer flags]
       accelerate launch [--config_file YAML] [--num_processes N] train.py [the same flags]

Without a model and data, the run trains a small byte-level decoder on the source of Python's standard library.
Precedence: command line > --config file > recipe > library default.
During the training, SIGTERM, SIGUSR1 or SIGHUP to `recipes train` or any rank saves a checkpoint and stops the run.
"""
_OWN = """\
  mine.yaml     your own recipe: `base: fast`, a `purpose`, and `changes` with lines such as
                learning_rate: [5.0e-5, "the reason"]; `engine` and `micro_batch_cap` are optional
  mine.py:name  a function in your own file that returns a recipes.catalog.Recipe"""


def settings_help() -> str:
    """Describe every recipe, and every setting that the check accepts."""
    fill = partial(textwrap.fill, width=110, break_on_hyphens=False)
    own = []
    for field in legal.run_flags().values():
        choices = f" ({', '.join(field.choices)})" if field.choices else ""
        default = f" [{field.default}]" if field.default not in (None, False) else ""
        flag = f"  --{field.name:<26} "
        own.append(fill(f"{field.help}{choices}{default}", initial_indent=flag, subsequent_indent=" " * 31))
    of_trainer = ", ".join(f"--{name}" for name in legal.trainer_fields())
    return "\n".join(
        [
            "Recipes (recipes show NAME explains one):",
            *(f"  {name:<14}{recipe().purpose}" for name, recipe in RECIPES.items()),
            f"{_OWN}\n\nRun, model and data:",
            *own,
            f"\nEvery field of TrainingArguments (transformers {legal.version('transformers')}):",
            fill(of_trainer, initial_indent="  ", subsequent_indent="  ") + "\n",
        ]
    )


# --- Before the first step ------------------------------------------------------------------------


def banner(run: RunSpec, model: torch.nn.Module, tokenizer, data: Data, out: Console) -> None:
    """Print the settings of the run, the loaded model and data, the first example (with learned
    tokens between « and »), and advice on an epoch that is too short and on GPUs that are not used.
    """
    from launch.data.load import shortened, shown_examples
    from launch.training.model import parameter_count

    example = "" if run.demonstration else next(shown_examples(data, tokenizer, 1), "")
    total, trainable = parameter_count(model), parameter_count(model, trained_only=True)
    share = "" if trainable == total else f", {trainable:,} of them trained ({trainable / total:.2%})"
    name = run["model_name_or_path"] or "byte-level decoder"
    from_scratch = " from scratch" if run["from_scratch"] or run["model_name_or_path"] is None else ""
    lines = {
        "recipe": f"{run.recipe.name}: {run.recipe.purpose}",
        "model": f"{name}{from_scratch}, {total:,} parameters{share}",
        "data": data.description,
        "example": shortened(example) + "  (the model learns the text in « »)" * ("«" in example),
        "engine": f"{run.engine.title}, {plural(run.world_size, 'process')} on {run.hardware}",
        "batch": batch(run),
        "schedule": schedule(run),
        "precision": precision(run),
        "output": run["output_dir"],
        "changed": "\n".join(_changed(run)),
    }
    out.print(_table({name: line for name, line in lines.items() if line}))
    rows = sys.maxsize if run["dataset_streaming"] else len(data.train)  # type: ignore[arg-type]
    if rows < run.batch.total * (10 if run["packing"] else 1):  # a packed row holds many examples
        kind, is_joined = "sequence" if run["packing"] else "example", run["packing_strategy"] == "wrapped"
        fix = "lower --global_batch_size" + ", or --packing false" * (run["packing"] and not is_joined)
        steps = plural(-(-rows // run.batch.total), "step")
        what = f"is {run.batch.total}, so an epoch of {plural(rows, kind)} has only {steps}"
        print_problems([advice("global_batch_size", what, fix)], out)
    if run.local_world_size < len(run.hardware.gpus):
        what = f"uses only {run.local_world_size} of {plural(len(run.hardware.gpus), 'visible GPU')}"
        fix = f"--num_processes {len(run.hardware.gpus) * run.world_size // run.local_world_size}"
        print_problems([advice("num_processes", what, fix)], out)


_SHOWN_APART = {"recipe", "config", "output_dir"}


def _changed(run: RunSpec) -> Iterable[str]:
    """Yield a line for each setting that the user wrote, or that the model or data changed. A line
    with their source stands before the settings of each source.
    """
    changed = {**run.limits, **run.given}
    names = sorted(changed.keys() - _SHOWN_APART)
    for source in sorted({changed[name].source for name in names}):
        yield f"{source}:"
        for name in (name for name in names if changed[name].source == source):
            value = shown(name, changed[name].value)
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # `--save_steps 2` is read as 2.0
            yield f"  {name} = {value}" + (f": {changed[name].reason}" if name in run.limits else "")


def batch(run: RunSpec) -> str:
    """Describe the split of the global batch over processes, or over groups that share examples."""
    split, sharing = run.batch, run.engine.parallelism.sharing
    over = "world" if sharing == 1 else "data-parallel"
    words = f"micro {split.micro} x accumulation {split.accumulation} x {over} {split.data_parallel}"
    words += f" = global {split.total}"
    if sharing > 1:
        words += f" (world {run.world_size}: the {sharing} processes of a group share their examples)"
    return words + (f", {split.reason}" if run.batch.source == FIT else "")


def precision(run: RunSpec) -> str:
    """Describe the precision of compute and weights, and the reason for the compute precision."""
    mixed = mixed_precision(run)
    name = "fp32" if mixed == "no" else mixed
    reason = run.setting("fp16" if run["fp16"] else "bf16").reason
    weights = f"{name} weights, fp32 master copy" if run.engine.kind == "deepspeed" else f"{run['dtype']} weights"
    return f"{name} compute, {weights}" + (", tf32" if run["tf32"] else "") + (f" ({reason})" if reason else "")


def print_earlier(earlier: Earlier, run: RunSpec, out: Console) -> None:
    """Print notes on an earlier run in the output folder, and the checkpoint to resume from."""
    for note in earlier.notes:
        print_note(note, out)
    if earlier.finished:
        where = f"{run['output_dir']} holds a finished run of {earlier.step} steps: nothing to train"
        out.print(f"{escape(where)}. --fresh starts over, a larger --max_steps or --num_train_epochs trains longer.")
    elif earlier.checkpoint:
        out.print(f"resuming from {escape(str(earlier.checkpoint))}, step {earlier.step}", highlight=False)


# --- At the end -----------------------------------------------------------------------------------


def show_results(results: Json, run: RunSpec, world: World, trainer: RecipeTrainer) -> None:
    """Add a row to the file of `--measure`, print the summary, write the model card, push run.json,
    then free DDP or DeepSpeed. All ranks call this after the end of a run. Errors are only printed.
    """
    out, timings = console(world.is_main), {}
    with only_noted(world):
        if run["measure"]:
            from launch.training.timing import add_timings_row

            added = add_timings_row(run, world, trainer, results)
            result = "added the timings of this run" if added else "no step was measured, so nothing was added"
            timings = {"timings": f"{run['measure']}: {result}"}
    with only_noted(world):
        out.print()
        lines = dict(_summary(results, run, trainer)) | timings | {"written to": run["output_dir"]}
        out.print(_table({**lines, "next": "\n".join(_next_commands(results, run))}))
        if world.is_main:
            trainer.complete_card()
        if world.is_main and run["push_to_hub"]:
            trainer.push_record()
    trainer.accelerator.free_memory()  # before the process group ends, or gloo aborts


def _table(lines: Mapping[str, object]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines.items():
        table.add_row(name, escape(str(value)))
    return table


def _summary(results: Json, run: RunSpec, trainer: RecipeTrainer) -> Iterable[tuple[str, str]]:
    """Yield the lines of the summary at the end of a run. `results` are also in run.json."""
    steps, trained, planned = results["global_step"], trainer.timing.steps_trained, trainer.state.max_steps
    words = f" of {planned:,}, stopped early" if steps < planned else ""
    words += f", {trained:,} of them since the resume" if trained < steps else ""
    yield "steps", f"{steps:,}{words}, in {duration(results['train_runtime'])}"
    if results.get("first_loss") is not None:
        risen = ": it has risen" * has_risen(results)
        yield "loss", f"{results['first_loss']:.3f} at the start, {results['final_loss']:.3f} at the end{risen}"
    if run["load_best_model_at_end"]:
        yield "model", _which_model(results, run)
    metrics = dict.fromkeys(metric for names in METRICS.values() for metric in names)
    for name in ("eval_loss", *(f"eval_{metric}" for metric in metrics)):
        if results.get(name) is not None:
            yield name, f"{results[name]:.4f}"
    if results.get("step_time"):
        speed = f"{results['samples_per_second']:.1f} samples/s"
        if results.get("tokens_per_second"):
            speed += f", {results['tokens_per_second']:,.0f} tokens/s"
        yield "speed", f"{speed}, {duration(results['step_time'])} per step (after warm-up)"
    if results.get("mfu") is not None:
        yield "MFU", f"{results['mfu']:.1%} of the bf16 peak"
    yield "peak memory", f"{memory_size(results['peak_memory_bytes'])} {results['peak_memory_of']}"


def _next_commands(results: Json, run: RunSpec) -> Iterable[str]:
    """Yield the commands that a user may want to run once the model is trained."""
    if has_risen(results):
        yield "start again with --fresh, and a lower --learning_rate"
        return
    folder = shlex.quote(run["output_dir"])
    if run["task"] == "causal_lm":
        yield f'recipes generate {folder} "PROMPT"'
    if not run.demonstration:
        yield f"recipes evaluate {folder} --dataset_name OTHER_DATA"
    if run["use_peft"]:
        yield f"recipes merge {folder}"
    if run["task"] == "sequence_classification":
        model = f"{run['output_dir']}/merged" if run["use_peft"] else run["output_dir"]
        yield f'in Python: transformers.pipeline("text-classification", {model!r})("TEXT")'


def _which_model(results: Json, run: RunSpec) -> str:
    """Describe the step that the saved weights come from, and the reason for this step."""
    step, best = results["model_step"], results["best_step"]
    metric = "eval_" + (run["metric_for_best_model"] or "loss").removeprefix("eval_")
    if best == step:
        return f"of step {step:,}, the best by {metric}"
    return f"of step {step:,}" + (f": the checkpoint of the best step ({best:,}) was not loaded" if best else "")
