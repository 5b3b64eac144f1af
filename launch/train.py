"""Train a model with a recipe. Each process of a launch runs this file. To launch, use either:

    recipes train --recipe standard --num_processes 2 --max_steps 20 --output_dir runs/first
    accelerate launch --config_file accelerate_configs/standard.yaml --num_processes 2 \
        launch/train.py --recipe standard --max_steps 20 --output_dir runs/second

Without a model and data, train.py trains a small byte-level decoder on Python's library source.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

# If run as a script, import the packages beside launch/, not the files inside launch/.
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.host.processes import import_own_packages
    from launch.host.signals import block_until_listening

    block_until_listening()  # a signal during the imports below would end in a traceback
    import_own_packages()

from launch.data.columns import require_columns
from launch.fit.search import fit
from launch.host.files import exit_with, print_without_reader
from launch.host.launcher import end_with_launcher
from launch.host.signals import Preempted, StopRequest
from launch.host.world import World, launched, prepare_process, process_group, require_launcher
from launch.output.record import kept_record
from launch.terminal import console, print_problems, print_progress
from launch.training import banner, failure
from recipes.quiet import quiet_libraries
from recipes.rules.check import require_legal
from recipes.rules.probe import require_constructible
from recipes.run import RunSpec, resolve, with_fit

if TYPE_CHECKING:
    from launch.data.load import Data


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 finished, 1 failed, 2 a mistake, 75 stopped by signal, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(f"{banner.USAGE}\n{banner.settings_help()}")
        return 0
    world, stop = launched(), StopRequest()
    try:
        stop.listen()
        end_with_launcher()
        run = with_fit(resolve(argv, world.place()))  # command line > file > recipe, each value with its source
        with failure.explained_by(run):
            quiet_libraries(run["verbose"])
            print_problems(require_legal(run) + require_columns(run), console(world.is_main))
            require_launcher()
            if run["fit"] or run["fit_only"]:
                run = fit(run, argv, world)
            if not run["fit_only"]:
                load_and_train(run, argv, world, stop)
    except (KeyboardInterrupt, Preempted, Exception) as error:
        return failure.report(error, world)
    return 0


def load_and_train(run: RunSpec, argv: list[str], world: World, stop: StopRequest) -> None:
    """Check the run. If something is left to train, load the data (maybe for hours) and train."""
    out = console(world.is_main)
    print_progress("importing the libraries", out)
    prepare_process(run)
    require_constructible(run)
    from launch.data.labels import recognised
    from launch.data.load import load_data
    from launch.output.resume import look_ahead, output_folder
    from launch.training.model import known_classes, load_tokenizer, with_model
    from launch.training.trainer import require_hub

    print_progress("reading the data", out)
    tokenizer = load_tokenizer(run)
    run, advice = with_model(run, tokenizer)  # may change max_length, packing and attention for the model
    with failure.explained_by(run):
        print_problems(advice, out)
        require_hub(run)
        finished = look_ahead(run)
        if finished and world.nodes == 1:  # several nodes may have different output folders: they decide later
            banner.print_earlier(finished, run, out)
            return
        with failure.catch_out_of_memory(run, argv, world, stop), world.meeting(run["ddp_timeout"]):
            data = load_data(run, tokenizer, known_classes(run, tokenizer))
        run, advice = recognised(run, data.problem_type)
        print_problems(advice, out)
        with (
            process_group(run, world) as args,
            output_folder(run, world),
            failure.catch_out_of_memory(run, argv, world, stop),
        ):
            train_and_record(run, args, world, stop, tokenizer, data)


def train_and_record(run: RunSpec, args, world: World, stop: StopRequest, tokenizer, data: Data) -> None:
    """Load the model, train it and write run.json. If the folder's run is finished, only say so."""
    from launch.data.load import recorded, require_same
    from launch.host import memory
    from launch.output.resume import find_earlier_run, make_room
    from launch.training.model import load_model, saved_bytes
    from launch.training.timing import results
    from launch.training.trainer import build_trainer

    out = console(world.is_main)
    require_same(data, world)
    earlier = world.decide(lambda: find_earlier_run(run, data.commit))
    banner.print_earlier(earlier, run, out)
    if earlier.finished:
        return
    run = earlier.as_it_trains(run)

    if run["memory_limit"]:  # set only now, because libraries mishandle MemoryError while they load data
        memory.limit(round(run["memory_limit"] * 1e9), run.hardware.cuda)
    print_progress("loading the model", out)
    model = load_model(run, tokenizer, data.labels, data.problem_type)
    world.decide(lambda: make_room(run, saved_bytes(model, run)))
    trainer = build_trainer(run, args, model, tokenizer, data, out, earlier.identity, stop)
    banner.banner(run, model, tokenizer, data, out)
    trainer.any_world.prepare(earlier.checkpoint)

    stop.defer()  # from here on, a signal takes effect at the end of a step
    with kept_record(run, world, earlier, data.commit, recorded(data, tokenizer)) as record:
        metrics = trainer.train(resume_from_checkpoint=earlier.checkpoint).metrics
        trainer.require_finite_weights()
        trainer.save_model()  # before an evaluation in 16 bits, which casts the weights
        files = {"model_files": trainer.flush_model()}
        record.update(results(run, trainer, metrics | trainer.final_metrics()) | files)
    banner.show_results(record, run, world, trainer)


if __name__ == "__main__":
    print_without_reader()
    exit_with(main)
