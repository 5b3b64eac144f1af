"""Whether the data that the run names can be there: what a path alone says."""

from __future__ import annotations

import re
from pathlib import Path

from recipes.errors import Problem
from recipes.rules.facts import of_train_py, problem, rule
from recipes.run.local_model import existing_path

FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@rule
@of_train_py
def the_data_exists(run):
    """The library would look for a missing path on the Hub."""
    name = run["dataset_name"]
    if not name or run.elsewhere is not None or existing_path(name):
        return
    if name.startswith((".", "/", "~")) or Path(name).suffix.lower() in FILE_KINDS:
        yield problem(run, "dataset_name", f"there is no file or folder {name}", "the path of one that exists")


@rule
@of_train_py
def a_data_file_can_be_read(run):
    """Its suffix says how to read a file, and an empty one has no columns."""
    path = existing_path(run["dataset_name"])
    if path is None or not path.is_file():
        return
    if path.suffix.lower() not in FILE_KINDS:
        yield problem(
            run, "dataset_name", f"{path} is not of a known kind", "a file ending in " + ", ".join(FILE_KINDS)
        )
    elif not path.stat().st_size:
        yield problem(run, "dataset_name", f"{path} is empty", "a file with rows in it")
    if run["dataset_config"]:
        what = f"{run['dataset_config']} is not in {path}, a single file"
        yield problem(run, "dataset_config", what, "leave it out")


@rule
@of_train_py
def a_data_file_has_one_split(run):
    """datasets reads a single file as `train`: nothing is left to evaluate on, or to choose."""
    path = existing_path(run["dataset_name"])
    if path is None or not path.is_file():
        return
    has = "a single file has only train"
    for name in ("dataset_train_split", "dataset_test_split"):
        asked = run[name] if name == "dataset_train_split" or run["eval_strategy"] != "no" else None
        absent = {part.partition("[")[0].strip() for part in re.split(r"\+", asked or "train")} - {"train"}
        if absent:
            yield problem(run, name, f"there is no split {asked!r}: {has}", "train, or a slice of it: 'train[:95%]'")
    if run["eval_strategy"] != "no" and run["dataset_test_split"] is None:
        yield run.with_source(nothing_to_evaluate_on(has))


def nothing_to_evaluate_on(has: str) -> Problem:
    """A problem with data that has no test split, and that a run wants to evaluate on."""
    return Problem(
        "dataset_test_split",
        f"there is nothing to evaluate on: {has}, no test and no validation",
        "--dataset_test_split 'train[95%:]' --dataset_train_split 'train[:95%]', or --eval_strategy no",
    )
