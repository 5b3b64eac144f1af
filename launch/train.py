"""Train a model with a recipe: `accelerate launch launch/train.py --recipe fast [flags]`.

Its steps, in order: resolve, check, join the process group, load, train, record.
Without a model and data it trains a small byte-level decoder on Python's own source.
"""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

# Run as a script: import the packages beside launch/, not the files inside it.
if __package__ in (None, ""):
    # Until they are handled (launch.host.signals.PASSED_ON): an import ends in a traceback.
    waiting = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.host.own_packages import import_own_packages

    import_own_packages()

from launch.fit.search import fit
from launch.host.orphan import end_with_launcher
from launch.host.signals import Preempted, StopRequest
from launch.host.world import alone_by_mistake, launched, prepare_environment, process_group, resolve_launched
from launch.output.record import kept_record
from launch.terminal import console, print_any_text, print_note, print_problems
from launch.training import banner, failure
from launch.training.help import train_help
from launch.training.out_of_memory import TrainingProgress, catch_out_of_memory
from recipes.quiet import quiet_imported, quiet_libraries
from recipes.rules.check import require_legal
from recipes.run import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, TrainingArguments


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 finished, 1 failed, 2 a mistake, 75 stopped by a signal, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(train_help())
        return 0
    print_any_text()
    progress = TrainingProgress(argv)
    try:
        fit_and_train(progress)
    except (KeyboardInterrupt, Preempted, Exception) as error:
        return failure.report(error, progress)
    return 0


def fit_and_train(progress: TrainingProgress) -> None:
    """Resolve and check the run, which takes a fraction of a second; then fit and train it."""
    stop = StopRequest()
    stop.listen()
    end_with_launcher(stop, progress)
    world = progress.world = launched()
    run = progress.run = resolve_launched(progress.argv, world)
    quiet_libraries(run["verbose"])
    print_problems([*require_legal(run), *alone_by_mistake(world)], console(world.is_main))
    if run["fit"] or run["fit_only"]:
        run = progress.run = fit(run, progress.argv, world, again=run["fit_only"])
    if not run["fit_only"]:
        train(run, progress, stop)


def train(run: RunSpec, progress: TrainingProgress, stop: StopRequest) -> None:
    """Join the process group and train in it."""
    prepare_environment(run)
    # torch and transformers take seconds to import, so a mistake is reported before that.
    from launch.output.resume import output_folder
    from launch.training.build import build_arguments
    from launch.training.model import load_tokenizer, with_model

    quiet_imported(run["verbose"], run.engine.kind == "deepspeed")
    tokenizer = load_tokenizer(run)
    run, advice = with_model(run, tokenizer)
    progress.run = run
    print_problems(advice, console(progress.world.is_main))
    args = build_arguments(run)  # before the model: ZeRO-3 looks for them while weights load
    with (
        process_group(run, progress.world, args),
        output_folder(run, progress.world),
        catch_out_of_memory(progress),
    ):
        finished = train_in_group(run, progress, stop, args, tokenizer)
    if finished and run.demonstration:
        banner.show_sample(run, progress.world)


def train_in_group(
    run: RunSpec,
    progress: TrainingProgress,
    stop: StopRequest,
    args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
) -> bool:
    """Data, model, Trainer, train, record. False if an earlier run has left nothing to train."""
    from launch.host import memory
    from launch.output.other_world import AnyWorld
    from launch.output.resume import find_earlier_run, make_room
    from launch.training.build import build_trainer
    from launch.training.callbacks import StopWhenRequested
    from launch.training.data import load_data
    from launch.training.model import known_classes, load_model
    from launch.training.results import checkpoint_bytes, model_bytes, results
    from launch.training.trainer import require_finite

    world, out = progress.world, console(progress.world.is_main)
    earlier = world.decide(lambda: find_earlier_run(run, world))
    banner.print_earlier(earlier, run, out)
    if earlier.finished:
        return False

    data = load_data(run, tokenizer, known_classes(run, tokenizer))
    earlier.require_same_training()  # only now: a mistake in the data matters more
    if run["memory_limit"]:  # after loading data: libraries handle MemoryError unpredictably there
        memory.limit(round(run["memory_limit"] * 1e9), run.hardware.cuda)
    model = load_model(run, tokenizer, data)
    world.decide(lambda: make_room(run, checkpoint_bytes(model, run), model_bytes(model), data.steps(run)))
    trainer = progress.trainer = build_trainer(run, args, model, tokenizer, data, out)
    trainer.add_callback(StopWhenRequested(stop, world, trainer.finish_saving))
    banner.banner(run, model, data, out)
    if run.engine.kind == "deepspeed":
        trainer.any_world = AnyWorld(
            Path(run["output_dir"]), world, run.data_parallel_size, partial(print_note, out=out)
        )
        trainer.any_world.prepare(earlier.checkpoint)

    stop.defer()  # from here on a signal waits for the end of a step
    with kept_record(run, world, data.commit) as record:
        trained = trainer.train(resume_from_checkpoint=earlier.checkpoint)
        require_finite(trainer)
        trainer.save_model()  # before an evaluation in 16 bits, which casts the model itself
        trainer.flush_model()
        if data.eval is not None:
            trained.metrics.update(trainer.final_metrics())
        record.results = results(run, trainer, trained.metrics)
    banner.show_results(record.results, run, world, trainer, progress.argv)
    return True


if __name__ == "__main__":
    sys.exit(main())
