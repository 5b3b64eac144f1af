"""`recipes prepare`: the tokens of a run ahead of time, which train.py finds."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from launch.cli import main
from launch.data import tokens
from launch.train import main as train
from tests.support.running import ROOT, model_flags

pytestmark = pytest.mark.usefixtures("own_cache")


def test_train_py_finds_what_was_prepared(tiny_model, texts, tmp_path, capsys, monkeypatch):
    flags = model_flags(tiny_model, texts)
    assert main(["prepare", *flags]) == 0
    found = re.search(r"([\d,]+) examples, ([\d,]+) tokens in .*s\n(.*) \(", capsys.readouterr().out)
    assert found and Path(found[3]).is_dir() and int(found[2].replace(",", "")) > 0
    monkeypatch.setattr(tokens, "_make", None)  # it is not called again
    assert main(["prepare", *flags]) == 0
    assert train([*flags, "--max_steps", "1", "--output_dir", str(tmp_path / "out")]) == 0


def test_a_classifiers_texts_are_cut_where_the_model_ends_as_in_the_training(tiny_model, tmp_path, capsys, monkeypatch):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    flags = ["--model_name_or_path", str(tiny_model), "--dataset_name", str(file), "--task", "sequence_classification"]
    assert main(["prepare", *flags]) == 0
    monkeypatch.setattr(tokens, "_make", None)
    assert train([*flags, "--max_steps", "1", "--output_dir", str(tmp_path / "out")]) == 0


def test_a_limit_for_files_is_one_line(tiny_model, tmp_path):
    file, limit = tmp_path / "data.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    file.write_text('{"text": "some words"}\n' * 9999)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate_recipes", "prepare", *model_flags(tiny_model, file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1])),
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "File too large. Run `ulimit -f unlimited`" in done.stderr


def test_a_mistake_in_the_data_is_one_line(tiny_model, tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    file.write_text('{"body": "a"}\n')
    assert main(["prepare", "--model_name_or_path", str(tiny_model), "--dataset_name", str(file)]) == 2
    assert "there is no column 'text'; the data has body" in capsys.readouterr().err


def test_the_demonstration_needs_no_preparation(capsys):
    assert main(["prepare"]) == 2
    assert "there is nothing to prepare" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_named(tiny_model, texts, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "datasets")
    assert main(["prepare", *model_flags(tiny_model, texts)]) == 1
    said = capsys.readouterr().err
    assert "/datasets" in said and "cannot be read or written: Not a directory. Set HF_HOME " in said
