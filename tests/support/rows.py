"""Rows of data on the disk, and what a model learns from them once they are loaded."""

import json

import pytest

from launch.data.encode import IGNORED
from launch.data.load import load_data
from recipes.errors import UserError
from recipes.rules.check import require_legal
from tests.support.runs import resolved

# The name of a file -> how a Dataset is written into it.
WRITERS = {
    "data.jsonl": lambda rows, path: rows.to_json(path),
    "data.jsonl.gz": lambda rows, path: rows.to_json(path, compression="gzip"),
    "data.json": lambda rows, path: path.write_text(json.dumps(rows.to_list())),
    "data.csv": lambda rows, path: rows.to_csv(path),
    "data.parquet": lambda rows, path: rows.to_parquet(path),
    "data.txt": lambda rows, path: path.write_text("\n".join(rows["text"])),
}


def run_with(**chosen):
    """A run on a CPU with these settings. No model is read: a test brings its own tokenizer."""
    named = {"model_name_or_path": "somebody/model"} if "dataset_name" in chosen else {}
    return resolved(settings={"recipe": "baseline", **named, **chosen})


def jsonl(tmp_path, rows, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(*words):
    return [{"text": word} for word in words]


def user(text, **more):
    return {"role": "user", "content": text, **more}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


CHAT = [user("Hello"), answer("Hi!")]


def decoded(tokenizer, dataset):
    return [tokenizer.decode(row["input_ids"]) for row in dataset]


def learned(tokenizer, row):
    """The text that the labels of a row ask for."""
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def problem(run, tokenizer):
    """What is wrong with the data: as train.py finds it, by the rules first."""
    with pytest.raises(UserError) as caught:
        require_legal(run)
        load_data(run, tokenizer)
    (found,) = caught.value.problems
    return found
