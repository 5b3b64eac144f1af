"""Train a model with a recipe: `accelerate launch launch/train.py --recipe fast [--config FILE] [flags]`.

Reads from top to bottom as what it does: resolve, check, join the world, load, train, record.
Without a model and data it trains a small byte-level decoder on Python's own source.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: import the packages beside launch/, not the files inside it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.fit.search import fit
from launch.host.signals import Preempted, StopRequest
from launch.host.world import World, joined, launched, on_launched_engine, prepare_environment
from launch.output.record import kept_record
from launch.terminal import console, print_problems
from launch.training import banner, failure
from launch.training.help import train_help
from launch.training.out_of_memory import Watch, noticed
from recipes.errors import UserError
from recipes.quiet import quiet_libraries, quiet_progress_bars
from recipes.rules.check import require_legal
from recipes.run import RunSpec, resolve
from recipes.scaling.timings import require_room

if TYPE_CHECKING:
    from transformers import TrainingArguments


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 finished, 1 a failure, 2 a mistake to mend, 75 told to stop, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(train_help())
        return 0
    world, stop = World(), StopRequest()
    run = None
    try:
        stop.listen()
        world = launched()
        run = on_launched_engine(resolve(argv, world_size=world.size, local_world_size=world.local_size))
        print_problems(require_legal(run), console(world.is_main))
        if run["fit"] or run["fit_only"]:
            run = fit(run, argv, world, again=run["fit_only"])
        if not run["fit_only"]:
            train(run, world, stop, argv)
    except UserError as error:
        problems = [run.with_source(problem) for problem in error.problems] if run else error.problems
        print_problems(problems, console(world.is_local_main, stderr=True))
        return 2
    except (KeyboardInterrupt, Preempted, Exception) as error:
        words = failure.explain_failure(error, run)
        if words is None:
            raise
        failure.print_failure(words, error, world)
        return failure.exit_code(error)
    return 0


def train(run: RunSpec, world: World, stop: StopRequest, argv: list[str]) -> None:
    """One run in the world that was launched."""
    quiet_libraries(run["verbose"])
    prepare_environment(run)
    from launch.output.resume import output_folder
    from launch.training.build import build_arguments  # torch and transformers take seconds: only for a legal run

    args = build_arguments(run)  # before the model: ZeRO-3 looks for them while weights load
    with joined(run, world, args), output_folder(run, world), noticed(run, world, argv) as watch:
        train_joined(run, world, args, stop, watch, argv)


def train_joined(
    run: RunSpec, world: World, args: TrainingArguments, stop: StopRequest, watch: Watch, argv: list[str]
) -> None:
    """Data, model, Trainer, train, record."""
    from launch.host import memory
    from launch.output.resume import (
        find_earlier_run,
        move_older_run_aside,
        require_disk_space,
        require_one_batch,
    )
    from launch.training.build import build_trainer
    from launch.training.data import load_data
    from launch.training.model import known_classes, load_model, load_tokenizer, longest_sequence, saved_sample
    from launch.training.results import checkpoint_bytes, results
    from launch.training.timing import add_timing
    from launch.training.trainer import StopWhenTold, require_finite

    quiet_progress_bars(run["verbose"])
    out = console(world.is_main)
    require_one_batch(run, world)
    if run["measure"]:
        world.decide(lambda: require_room(run["measure"]))
    tokenizer = load_tokenizer(run)
    longest = longest_sequence(run, tokenizer)
    run = run.limited("max_length", longest, "the longest sequence of this model")
    earlier = world.decide(lambda: find_earlier_run(run, world))
    banner.print_earlier(earlier, run, out)
    if earlier.finished:
        banner.timing(None, run, out)
        return

    data = load_data(run, tokenizer, longest, known_classes(run, tokenizer))
    if run["memory_limit"]:  # what a library that reads data makes of a lack of memory is anybody's guess
        memory.limit(round(run["memory_limit"] * 1e9), run.hardware.cuda)
    model = load_model(run, tokenizer, data)
    world.decide(lambda: require_disk_space(run, checkpoint_bytes(model, run["save_strategy"] != "no")))
    world.decide(lambda: move_older_run_aside(run))
    trainer = watch.trainer = build_trainer(run, args, model, tokenizer, data, out)
    trainer.add_callback(StopWhenTold(stop, world))
    banner.banner(run, model, data, out)

    stop.defer()  # from here on a signal waits for the end of a step
    with kept_record(run, world) as record:
        trained = trainer.train(resume_from_checkpoint=earlier.checkpoint)
        require_finite(trainer)
        if data.eval is not None:
            trained.metrics.update(trainer.evaluate())
        trainer.save_model()
        record.results = results(run, trainer, trained.metrics)
    banner.summary(record.results, run, out)
    if run["measure"]:
        banner.timing(add_timing(run, world, trainer, record.results, argv), run, out)
    if run.demonstration and world.is_main:
        banner.sample(saved_sample(run), out)
    trainer.accelerator.free_memory()  # DDP's buckets and DeepSpeed's engine go before the process group does


if __name__ == "__main__":
    sys.exit(main())
