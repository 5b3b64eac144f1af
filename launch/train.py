"""Train a model with a recipe: `accelerate launch launch/train.py --recipe fast [flags]`.

Its steps, in order: resolve, check, look into the output folder, load the data, join the process
group, train, record.
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
from launch.host.caches import compile_safely
from launch.host.files import print_without_reader
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

    from launch.data.load import Data


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
    """Tell what can be told at once; load the data, which may take hours; then join and train."""
    prepare_environment(run)
    # torch and transformers take seconds to import, so a mistake is reported before that.
    from launch.data.load import load_data
    from launch.output.resume import look_ahead, output_folder
    from launch.training.build import build_arguments
    from launch.training.hub import require_hub
    from launch.training.model import known_classes, load_tokenizer, with_model

    quiet_imported(run["verbose"], run.engine.kind == "deepspeed")
    if run.engine.kind == "deepspeed":
        compile_safely(stop)
    tokenizer = load_tokenizer(run)
    run, advice = with_model(run, tokenizer)
    progress.run = run
    out = console(progress.world.is_main)
    print_problems(advice, out)
    for note in require_hub(run):
        print_note(note, out)
    foreseen = look_ahead(run)
    if foreseen.finished and progress.world.nodes == 1:  # each node may have its own folder
        banner.print_earlier(foreseen, run, out)
        return
    with catch_out_of_memory(progress), progress.world.meeting(run["ddp_timeout"]):
        data = load_data(run, tokenizer, known_classes(run, tokenizer))
    args = build_arguments(run)  # before the model: ZeRO-3 looks for them while weights load
    with (
        process_group(run, progress.world, args),
        output_folder(run, progress.world),
        catch_out_of_memory(progress),
    ):
        finished = train_in_group(run, progress, stop, args, tokenizer, data)
    if finished and run.demonstration:
        banner.show_sample(run, progress.world)


def train_in_group(
    run: RunSpec,
    progress: TrainingProgress,
    stop: StopRequest,
    args: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
) -> bool:
    """Model, Trainer, train, record. False if an earlier run has left nothing to train."""
    from launch.data.labels import recognised
    from launch.data.load import require_same_data
    from launch.host import memory
    from launch.output.other_world import AnyWorld
    from launch.output.resume import find_earlier_run, make_room
    from launch.training.build import build_trainer
    from launch.training.callbacks import StopWhenRequested
    from launch.training.model import load_model
    from launch.training.results import checkpoint_bytes, model_bytes, results
    from launch.training.trainer import require_finite

    world, out = progress.world, console(progress.world.is_main)
    require_same_data(data, world)
    earlier = world.decide(lambda: find_earlier_run(run, world))
    banner.print_earlier(earlier, run, out)
    if earlier.finished:
        return False

    earlier.require_same_training()
    run, advice = recognised(run, data.problem_type)
    progress.run = run
    print_problems(advice, out)
    if run["memory_limit"]:  # after loading data: libraries handle MemoryError unpredictably there
        memory.limit(round(run["memory_limit"] * 1e9), run.hardware.cuda)
    model = load_model(run, tokenizer, data)
    world.decide(lambda: make_room(run, checkpoint_bytes(model, run), model_bytes(model), data.steps(run)))
    trainer = progress.trainer = build_trainer(run, args, model, tokenizer, data, out)
    trainer.add_callback(StopWhenRequested(stop, world, trainer.finish_saving))
    trainer.identity = earlier.identity
    banner.banner(run, model, data, out)
    if run.engine.kind == "deepspeed":
        trainer.any_world = AnyWorld(
            Path(run["output_dir"]), world, run.data_parallel_size, partial(print_note, out=out)
        )
        trainer.any_world.prepare(earlier.checkpoint)

    stop.defer()  # from here on a signal waits for the end of a step
    with kept_record(run, world, data.commit, earlier.kept, earlier.identity, data.labels) as record:
        trained = trainer.train(resume_from_checkpoint=earlier.checkpoint)
        require_finite(trainer)
        trainer.save_model()  # before an evaluation in 16 bits, which casts the model itself
        model_files = trainer.flush_model()
        if data.eval is not None:
            trained.metrics.update(trainer.final_metrics())
        record.results = {**results(run, trainer, trained.metrics), "model_files": model_files}
    banner.show_results(record.results, run, world, trainer)
    return True


if __name__ == "__main__":
    print_without_reader()
    sys.exit(main())
