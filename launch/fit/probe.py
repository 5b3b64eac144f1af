"""One probe of `--fit`, in a process of its own: two optimizer steps of the real run on its longest example.

The second step is the first with optimizer state in memory. `launch/fit.py` starts one on every rank, and reads the
verdict that each leaves in its folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script, as train.py is
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.host.signals import end_with_parent
from launch.host.world import World, launched, on_launched_engine, prepare_environment, process_group
from launch.output import record
from recipes.errors import UserError
from recipes.quiet import quiet_libraries, quiet_progress_bars
from recipes.run import RunSpec, resolve
from recipes.run.batch import Batch

REQUEST, VERDICT = "request.json", "verdict.json"
STEPS = 2

# Nothing is kept of a probe, and nobody is told of it.
_ALONE = {
    "max_steps": STEPS, "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no", "report_to": "none",
    "load_best_model_at_end": False, "early_stopping_patience": None, "resume_from_checkpoint": None,
    "push_to_hub": False, "fresh": False, "fit": False, "disable_tqdm": True,
}  # fmt: skip


def main(folder: Path) -> int:
    end_with_parent()
    request = json.loads((folder / REQUEST).read_text())
    if os.getppid() != request["parent"]:  # it died before this process could ask to be told
        return 1
    world = launched()
    try:
        run = _requested(request, world, folder)
        quiet_libraries(run["verbose"])
        prepare_environment(run)
        verdict = probe(run, world, request["limit_bytes"], folder)
    except UserError as error:
        verdict = {"kind": "mistake", "problems": [vars(run.with_source(problem)) for problem in error.problems]}
    record.write(folder, verdict, VERDICT)
    return int(verdict["kind"] != "fits")


def _requested(request: dict[str, Any], world: World, folder: Path) -> RunSpec:
    settings = {**_ALONE, "output_dir": str(folder)}
    run = resolve(request["argv"], settings=settings, world_size=world.size, local_world_size=world.local_size)
    batch = Batch(request["micro_batch"], request["accumulation"], world.size, "a probe of --fit")
    return on_launched_engine(run).at_batch(batch, "--fit")


def probe(run: RunSpec, world: World, limit_bytes: int, folder: Path) -> dict[str, Any]:
    """That the run fits into the limit on this rank, and the most it has taken. Any failure but that is raised.

    Where memory runs out the process ends here: leaving the world would wait for ranks that wait for this one.
    """
    from launch.host import memory
    from launch.training.build import build_arguments
    from launch.training.out_of_memory import shortage_in_words

    cuda = run.hardware.cuda
    args = build_arguments(run)
    with process_group(run, world, args):
        try:
            _train(run, args, limit_bytes)
        except Exception as error:
            if not memory.ran_out(error):
                raise
            words = shortage_in_words(memory.shortage(error))
            record.write(folder, {"kind": "out_of_memory", "peak_bytes": memory.peak(cuda), "words": words}, VERDICT)
            os._exit(1)
    return {"kind": "fits", "peak_bytes": memory.peak(cuda), "words": ""}


def _train(run: RunSpec, args: Any, limit_bytes: int) -> None:
    from launch.host import memory
    from launch.terminal import console
    from launch.training.build import build_trainer
    from launch.training.callbacks import StopOnNotANumber
    from launch.training.data import load_data, repeated_longest
    from launch.training.model import known_classes, limited_to_model, load_model, load_tokenizer

    quiet_progress_bars(run["verbose"])
    tokenizer = load_tokenizer(run)
    run = limited_to_model(run, tokenizer)
    data = load_data(run, tokenizer, known_classes(run, tokenizer))
    memory.limit(limit_bytes, run.hardware.cuda)
    model = load_model(run, tokenizer, data)
    data.train = repeated_longest(data.train, STEPS * run.batch.total)
    trainer = build_trainer(run, args, model, tokenizer, data, console(is_main=False))
    trainer.remove_callback(StopOnNotANumber)  # the same example over and over: what it learns does not matter
    trainer.train()
    if trainer.state.global_step != STEPS:
        raise RuntimeError(f"a probe ended after {trainer.state.global_step} steps of {STEPS}")
    trainer.accelerator.free_memory()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
