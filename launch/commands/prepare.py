"""`recipes prepare`: the data's tokens ahead of time, on a machine without a GPU. train.py with the
same flags finds them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from launch.flags import Commands
from launch.host.files import storage_failure
from launch.host.signals import EXIT_CODE, Preempted, StopRequest
from launch.host.world import prepare_environment
from launch.terminal import duration, memory_size, plural
from recipes.errors import Failure, mistake
from recipes.quiet import quiet_imported, quiet_libraries
from recipes.rules.check import require_legal
from recipes.run import resolve


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "prepare",
        allow_abbrev=False,
        usage="recipes prepare [the flags of train.py]",
        description="Tokenize the data of a run into the cache of datasets, on every core and without a GPU. "
        "train.py with the same flags and the same cache (HF_HOME) begins at once. Killed in the middle, "
        "the same command goes on. The printed folder may be removed when no run needs it.",
    )
    parser.set_defaults(run=prepare_run)


def prepare_run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    stop = StopRequest()
    stop.listen()
    try:
        prepare(argv)
    except Preempted as error:
        print(error)
        return EXIT_CODE
    except Failure as error:  # of the machine
        print(error, file=sys.stderr)
        return 1
    except Exception as error:
        if not (failed := storage_failure(error)):
            raise
        print(f"{failed.what}. {failed.remedy}, then run the same command again: it goes on.", file=sys.stderr)
        return 1
    return 0


def prepare(argv: Sequence[str]) -> None:
    """Tokenize the data of train.py's `argv`, and say where the tokens lie and how many there are.

    Raises `UserError` as train.py does.
    """
    run = resolve(argv)
    require_legal(run)
    if not run["dataset_name"]:
        raise mistake("dataset_name", "there is nothing to prepare", "--dataset_name FILE_OR_ID")
    if run["dataset_streaming"]:
        what = "there is nothing to prepare: a stream is tokenized while it trains"
        raise mistake("dataset_streaming", what, "leave it out, here and in the training")
    quiet_libraries(run["verbose"])
    prepare_environment(run)
    from launch.data.mixture import tokens_of_parts
    from launch.data.packing import lengths_of
    from launch.training.model import load_tokenizer, with_model

    quiet_imported(run["verbose"], deepspeed=False)
    started, tokenizer = time.monotonic(), load_tokenizer(run)
    run, _ = with_model(run, tokenizer)  # a classifier's tokens end where its model does
    for _, found in tokens_of_parts(run, tokenizer):
        folder = found.folder
        assert folder is not None
        tokens = sum(int(lengths_of(split).sum()) for split in (found.train, found.eval) if split is not None)
        examples = len(found.train) + (len(found.eval) if found.eval is not None else 0)
        size = sum(file.stat().st_size for file in folder.rglob("*.arrow"))
        print(f"{plural(examples, 'example')}, {tokens:,} tokens in {duration(time.monotonic() - started)}")
        print(f"{folder} ({memory_size(size)})")
