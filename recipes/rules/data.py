"""Whether the data that the run names can be there: what a path alone says."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path, PurePath

from recipes.errors import Problem
from recipes.mixture import Part, parts_of, paths_of
from recipes.rules.facts import advice, available, missing, of_train_py, problem, rule
from recipes.run import RunSpec

FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
COMPRESSED = (".gz", ".zst")  # but not Parquet, which is compressed inside


def file_kind(path: PurePath) -> str | None:
    """How `datasets` reads a file, as its suffix says; None if unknown."""
    kind = FILE_KINDS.get(path.suffix.lower())
    if kind or path.suffix.lower() not in COMPRESSED:
        return kind
    kind = FILE_KINDS.get(Path(path.stem).suffix.lower())
    return None if kind == "parquet" else kind


@rule
@of_train_py
def the_data_exists(run):
    """The library would look for a missing path on the Hub."""
    for part in parts_of(run["dataset_name"]):
        if run.elsewhere is not None or paths_of(part.name):
            continue
        if glob.has_magic(part.name):
            what = f"there is no file that matches {part.name}"
            yield problem(run, "dataset_name", what, "a pattern of files that exist")
        elif part.name.startswith((".", "/", "~")) or file_kind(Path(part.name)):
            what = f"there is no file or folder {part.name}"
            yield problem(run, "dataset_name", what, "the path of one that exists")


@rule
@of_train_py
def a_data_file_can_be_read(run):
    """Its suffix says how to read a file, and an empty one has no columns."""
    for part, paths in _of_files(run):
        kinds = {file_kind(path): path for path in paths}
        if None in kinds:
            fix = f"a file ending in {', '.join(FILE_KINDS)}, perhaps with {' or '.join(COMPRESSED)} behind it"
            yield problem(run, "dataset_name", f"{kinds[None]} is not of a known kind", fix)
        elif len(kinds) > 1:
            one, other = list(kinds.values())[:2]
            what = f"{part.name} matches files of several kinds: {one}, {other}"
            yield problem(run, "dataset_name", what, "a pattern for each kind, as parts of a mixture")
        for path in paths:
            if file_kind(path) and not path.stat().st_size:
                yield problem(run, "dataset_name", f"{path} is empty", "a file with rows in it")
        if config := part.config or run["dataset_config"]:
            what = (
                f"{config} is not in {part.name}, a single file" if len(paths) == 1 else f"{part.name} has no {config}"
            )
            yield problem(run, "dataset_config", what, "leave it out")


@rule
@of_train_py
def zstandard_is_installed(run):
    """`Compression type zstd not supported`, from datasets, once the model is loaded."""
    packed = [path for _, paths in _of_files(run) for path in paths if path.suffix.lower() == ".zst"]
    if packed and not available(run, "zstandard"):
        yield missing(run, "dataset_name", "zstandard", f"{packed[0]} needs the package zstandard to be read")


@rule
@of_train_py
def a_data_file_has_one_split(run):
    """datasets reads files as `train`: nothing is left to evaluate on, or to choose."""
    of_files = _of_files(run)
    has = "a single file has only train" if len(of_files) == 1 else "files have only train"
    evaluates = run["eval_strategy"] != "no"
    for part, _ in of_files:
        asked = {"dataset_name" if part.split else "dataset_train_split": part.split or run["dataset_train_split"]}
        asked |= {"dataset_test_split": run["dataset_test_split"]} if evaluates else {}
        for name, split in asked.items():
            if {piece.partition("[")[0].strip() for piece in re.split(r"\+", split or "train")} - {"train"}:
                what = f"there is no split {split!r}: {has}"
                fix = "train" if run["dataset_streaming"] else "train, or a slice of it: 'train[:95%]'"
                yield problem(run, name, what, fix)
    if of_files and len(of_files) == len(parts_of(run["dataset_name"])) and evaluates and not run["dataset_test_split"]:
        yield run.with_source(nothing_to_evaluate_on(has, run["dataset_streaming"]))


@rule
@of_train_py
def a_mixture_is_for_language_models(run):
    """Each part would have classes of its own. For other columns there are flags."""
    parts = parts_of(run["dataset_name"])
    if run["task"] != "causal_lm" and len(parts) > 1:
        yield problem(run, "dataset_name", f"is a mixture, and --task is {run['task']}", "one source, with all labels")
    elif run["task"] != "causal_lm" and parts and parts[0].columns:
        what = f"renames columns, and --task is {run['task']}"
        yield problem(run, "dataset_name", what, "--dataset_text_field and --dataset_label_field with the names")


def _of_files(run: RunSpec) -> list[tuple[Part, list[Path]]]:
    """The parts that are files, and these."""
    found = [(part, paths_of(part.name)) for part in parts_of(run["dataset_name"])]
    return [(part, paths) for part, paths in found if paths and not paths[0].is_dir()]


def nothing_to_evaluate_on(has: str, streams: bool = False) -> Problem:
    """A problem with data that has no test split, and that a run wants to evaluate on."""
    slices = "--dataset_test_split 'train[95%:]' --dataset_train_split 'train[:95%]'"
    return Problem(
        "dataset_test_split",
        f"there is nothing to evaluate on: {has}, no test and no validation",
        f"{_SPLIT_FILES if streams else slices}, or --eval_strategy no",
    )


# --- Streams --------------------------------------------------------------------------------------

_SPLIT_FILES = "a folder with a file for each split, such as train.jsonl and test.jsonl"


@rule
@of_train_py
def a_stream_is_told_how_long(run):
    """`ValueError: The train_dataset does not implement __len__, max_steps has to be specified`"""
    if run["dataset_streaming"] and run["max_steps"] <= 0:
        what = "is missing: nobody knows how many examples a stream has, and an epoch of it has no end"
        yield problem(run, "max_steps", what, "--max_steps 1000, or as many as you like")


@rule
@of_train_py
def a_stream_has_whole_splits(run):
    """`ValueError: Bad split: train[:95%]. Available splits: ['train']`"""
    if not run["dataset_streaming"]:
        return
    asked = [("dataset_train_split", run["dataset_train_split"])]
    asked += [("dataset_name", part.split) for part in parts_of(run["dataset_name"])]
    asked += [("dataset_test_split", run["dataset_test_split"])] if run["eval_strategy"] != "no" else []
    for name, split in asked:
        if re.search(r"[\[+]", split or ""):
            what = f"{split!r} is a part of the data by its number of rows, which a stream does not know"
            yield problem(run, name, what, f"one whole split; to evaluate, {_SPLIT_FILES}")


@rule
@of_train_py
def a_streamed_mixture_has_weights(run):
    """Without weights each part is taken whole: nobody knows how much of a stream that is."""
    parts = parts_of(run["dataset_name"])
    if run["dataset_streaming"] and len(parts) > 1 and parts[0].weight is None:
        entries = [{"name": entry} if isinstance(entry, str) else entry for entry in run["dataset_name"]]
        shown = ", ".join(json.dumps({**entry, "weight": 1}) for entry in entries[:3]) + (
            ", ..." if entries[3:] else ""
        )
        what = "is a mixture without weights: each part would be taken whole, and nobody knows a stream's size"
        yield problem(run, "dataset_name", what, f"dataset_name: [{shown}] in a file for --config")


@rule
@of_train_py
def a_stream_has_no_classes(run):
    """The classes are numbered before training, and only all rows tell which there are."""
    if run["dataset_streaming"] and run["task"] == "sequence_classification":
        what = "the classes are known once all rows are read, and a stream never is"
        yield problem(run, "dataset_streaming", what, "--dataset_streaming false")


@rule
@of_train_py
def a_stream_has_an_order_of_its_own(run):
    """Trainer's samplers need the length of the data. It ignores the setting, with a warning."""
    strategy = run["train_sampling_strategy"]
    if run["dataset_streaming"] and strategy not in ("random", "sequential"):
        what = f"{strategy} is not possible in a stream: its examples are shuffled"
        yield advice(run, "train_sampling_strategy", what, "leave it out")


@rule
@of_train_py
def a_stream_is_one_epoch(run):
    """To Trainer all steps of a stream are one epoch, whatever the rows are."""
    for name in ("save_strategy", "eval_strategy", "logging_strategy"):
        if run["dataset_streaming"] and run[name] == "epoch":
            what = "of a stream all steps are one epoch: it happens at the end alone"
            yield advice(run, name, what, f"--{name} steps")
