"""One probe of `--fit`, a process of its own: two steps of the real run on its longest example.

The second step shows the memory with optimizer state. If the run evaluates, a batch of that
follows, of the same example. `launch/fit/search.py` starts a probe on
every rank and reads the verdict that it leaves in its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.doctor.measured import keep_own_context
from launch.host.world import World, launched, prepare_process, process_group, resolve_launched
from launch.output import record
from launch.terminal import memory_size
from recipes.errors import Problem, UserError, mistake
from recipes.quiet import quiet_libraries
from recipes.run import Json, RunSpec
from recipes.run.batch import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from launch.data.load import Data

REQUEST, VERDICT = "request.json", "verdict.json"
STEPS = 2

# A probe saves and reports nothing, and its schedule needs no evaluation.
_SETTINGS = {
    "max_steps": STEPS, "save_strategy": "no", "eval_strategy": "no", "eval_on_start": False,
    "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}, "logging_strategy": "no", "report_to": "none",
    "load_best_model_at_end": False, "early_stopping_patience": None, "resume_from_checkpoint": None,
    "push_to_hub": False, "fresh": False, "fit": False, "disable_tqdm": True,
}  # fmt: skip


def main(path: str) -> int:
    """Run the probe that the request in this folder describes. Returns 0 if it fits."""
    folder = Path(path)
    request = json.loads((folder / REQUEST).read_text())
    world = launched()
    run = _requested(request, world, folder)
    try:
        quiet_libraries(run["verbose"])
        prepare_process(run)
        verdict = probe(run, world, request["limit_bytes"], folder, request["evaluates"])
    except UserError as error:
        verdict = {"kind": "mistake", "problems": [vars(run.with_source(problem)) for problem in error.problems]}
    record.write(folder, verdict, VERDICT)
    return int(verdict["kind"] != "fits")


def _requested(request: Json, world: World, folder: Path) -> RunSpec:
    settings = {**_SETTINGS, "output_dir": str(folder)}
    run = resolve_launched(request["argv"], world, settings)
    batch = Batch(request["micro_batch"], request["accumulation"], run.data_parallel_size, "a probe of --fit", "--fit")
    return replace(run, batch=batch)


class _EvaluationTooLarge(Exception):
    """Memory ran out in the evaluation, after two steps that fit."""


def probe(run: RunSpec, world: World, limit_bytes: int, folder: Path, evaluates: bool = False) -> Json:
    """The verdict that the run fits into the limit on this rank, with its peak.

    Raises all that is not about memory. An evaluation that does not fit is a mistake in its own
    batch: no micro-batch makes it smaller.

    When memory runs out, the process writes its verdict and exits here: leaving the process group
    would wait for ranks that wait for this one.
    """
    from launch.data.load import load_data
    from launch.host import memory
    from launch.training.model import known_classes, load_tokenizer, with_model
    from launch.training.out_of_memory import shortage_in_words

    cuda = run.hardware.cuda
    tokenizer = load_tokenizer(run)
    known, _ = with_model(run, tokenizer)
    data = load_data(known, tokenizer, known_classes(known, tokenizer))
    with process_group(run, world):
        try:
            _train_on_longest(known, world, tokenizer, data, limit_bytes, evaluates)
        except _EvaluationTooLarge:
            record.write(folder, {"kind": "mistake", "problems": [vars(_too_large(run, limit_bytes))]}, VERDICT)
            os._exit(1)
        except Exception as error:
            if not memory.ran_out(error):
                raise
            words = shortage_in_words(memory.shortage(error))
            record.write(folder, {"kind": "out_of_memory", "peak_bytes": memory.peak(cuda), "words": words}, VERDICT)
            os._exit(1)
        if cuda and world.is_local_main:
            with contextlib.suppress(Exception):  # only the next plan would gain by it
                keep_own_context(run.hardware.gpus[0].name, world.size > 1)
    return {"kind": "fits", "peak_bytes": memory.peak(cuda), "words": ""}


def _too_large(run: RunSpec, limit_bytes: int) -> Problem:
    batch = run["per_device_eval_batch_size"]
    what = f"{batch} examples do not fit in {memory_size(limit_bytes)}, after steps that do"
    fix = f"--per_device_eval_batch_size {batch // 2}" if batch > 1 else "--eval_strategy no"
    return run.with_source(mistake("per_device_eval_batch_size", what, fix).problems[0])


def _train_on_longest(
    run: RunSpec,
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    limit_bytes: int,
    evaluates: bool,
) -> None:
    """Two steps, and a batch of an evaluation, on the longest example alone."""
    from launch.data.load import repeated_longest
    from launch.host import memory
    from launch.terminal import console
    from launch.training.build import build_arguments, build_trainer
    from launch.training.callbacks import StopOnNotANumber
    from launch.training.model import load_model

    args = build_arguments(run)  # before the model: ZeRO-3 looks for them while weights load
    memory.limit(limit_bytes, run.hardware.cuda)
    model = load_model(run, tokenizer, data)
    rows, data.train = data.train, repeated_longest(data.train, STEPS * run.batch.total)
    trainer = build_trainer(run, world, args, model, tokenizer, data, console(is_main=False))
    trainer.remove_callback(StopOnNotANumber)  # the same example over and over: its loss means nothing
    trainer.train()
    if trainer.state.global_step != STEPS:
        raise RuntimeError(f"the probe ended after {trainer.state.global_step} of {STEPS} steps")
    if evaluates:
        try:
            trainer.evaluate(repeated_longest(rows, args.eval_batch_size * run.data_parallel_size))
        except Exception as error:
            if not memory.ran_out(error):
                raise
            raise _EvaluationTooLarge from None
    trainer.accelerator.free_memory()
