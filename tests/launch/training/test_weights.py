"""Files in a model's folder that are something else: each is named, and nothing is executed."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models import load, problem, run_with

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.mark.parametrize(
    ("content", "what", "fix"),
    [
        (b"", "is empty", "copy or download"),
        (POINTER, "is a git-lfs pointer to the file", "git lfs pull"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"])
def test_what_stands_in_for_a_file_is_said(name, content, what, fix, folder):
    (folder / name).write_bytes(content)
    found = problem(run_with(str(folder)))
    assert f"{folder / name} {what}" in found.what and fix in found.fix


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("tokenizer.json", '{"error": "not found"}', "has no 'model'"),
        ("tokenizer.json", "not found", "is not valid JSON"),
        ("config.json", "not found", "is not valid JSON"),
    ],
)
def test_json_that_is_not_a_models_is_named(name, content, what, folder):
    (folder / name).write_text(content)
    assert f"{folder / name} {what}" in problem(run_with(str(folder))).what


def test_an_index_that_is_not_one_is_named(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"error": "not found"}))
    assert "model.safetensors.index.json has no 'weight_map'" in problem(run_with(str(folder))).what


class Code:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        torch.ones(3),
        torch.nn.Linear(2, 2),
        {"weight": Code()},
        {"model": {"weight": torch.ones(3)}, "epoch": 3},
    ],
    ids=["a list", "a tensor", "a module", "code", "another program's checkpoint"],
)
@pytest.mark.parametrize("write", [torch.save, lambda content, file: file.write_bytes(pickle.dumps(content))])
def test_a_pickle_of_something_else_is_not_loaded(write, content, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    write(content, folder / "pytorch_model.bin")
    found = problem(run_with(str(folder)))
    assert str(folder) in found.what and "weights" in found.what
    assert not (tmp_path / "executed").exists()


def test_the_weights_of_another_model_are_not_trained(folder):
    """transformers would start from random values, and only warn."""
    save_file({"encoder.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{folder} holds none of the 21 weights" in problem(run_with(str(folder))).what


def test_weights_that_are_missing_are_noted(folder, capsys):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load(run_with(str(folder)))
    assert "lacks model.layers.1.mlp.up_proj.weight: random values to start with" in capsys.readouterr().out.replace(
        "\n", " "
    )


def test_a_new_head_is_not_noted(llama, capsys):
    from tests.support.models import CLASSES

    load(run_with(llama, task="sequence_classification"), CLASSES)
    assert "lacks" not in capsys.readouterr().out
