"""`recipes train` checks a run, and becomes its launcher; `prepare` tokenizes for it."""

import os
import re
import signal
import sys
from pathlib import Path

import datasets
import pytest

from launch.cli import main
from launch.data import tokens
from launch.host.launcher import LAUNCHER
from launch.host.signals import PASSED_ON
from launch.train import main as train
from tests.support.running import ROOT, SCRIPT, model_flags, run

CONFIGS = ROOT / "accelerate_configs"


@pytest.fixture
def becomes(monkeypatch, tmp_path):
    """The command line that `recipes train` with these words is replaced by."""

    def words_of(*words: str) -> list[str]:
        replaced = []
        monkeypatch.setattr(os, "execv", lambda program, argv: replaced.append(argv))
        main(["train", *words, "--output_dir", str(tmp_path)])
        return replaced[0]

    yield words_of
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)  # as the launcher does, which has not come


def test_train_without_gpus_launches_one_process_with_the_recipes_yaml_and_all_flags(becomes, tmp_path):
    words = becomes("--recipe", "fast", "--run_name", "a $b", "--hub_token", "abc")  # nothing of it is stored
    assert words[:4] == [sys.executable, str(LAUNCHER), "--config_file", str(CONFIGS / "fast.yaml")]
    assert words[words.index("--num_processes") + 1] == "1"
    script = words.index(str(SCRIPT))
    assert words[script + 1 :] == [
        *("--recipe", "fast", "--run_name", "a $$b", "--hub_token", "abc", "--output_dir", str(tmp_path))
    ]


def test_accelerate_config_of_recipes_train_takes_a_shipped_name_or_a_path(becomes, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text((CONFIGS / "standard.yaml").read_text().replace("num_processes: 1", "num_processes: 2"))
    own = becomes("--accelerate_config", str(mine))
    assert str(CONFIGS / "memory.yaml") in becomes("--accelerate_config", "memory", "--recipe", "memory")
    assert str(mine) in own and own[own.index("--num_processes") + 1] == "2"


@pytest.mark.slow
def test_a_users_recipe_trains_in_two_processes(tiny_model, texts, tmp_path):
    mine, output = tmp_path / "mine.yaml", tmp_path / "out"
    mine.write_text("base: fast\npurpose: A test.\nchanges:\n  max_steps: [2, few]\n")
    words = ["train", "--recipe", str(mine), "--num_processes", "2", *model_flags(tiny_model, texts)]
    done = run([sys.executable, "-m", "launch", *words, "--output_dir", str(output)], output, cwd=ROOT)
    assert (done.code, done.record["status"], done.record["world_size"]) == (0, "finished", 2), done.output
    assert done.output.startswith("starting 2 processes, mine on DDP ..."), done.output


# --- prepare --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_train_py_uses_the_tokens_that_recipes_prepare_has_cached(task, tiny_model, tmp_path, capsys, monkeypatch):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "some words", "label": "x"}\n{"text": "others", "label": "y"}\n' * 8)
    flags = [*model_flags(tiny_model, file), "--task", task]
    assert main(["prepare", *flags]) == 0
    found = re.search(r"([\d,]+) rows, ([\d,]+) tokens in .*s\n(.*) \(", capsys.readouterr().out)
    assert found and Path(found[3]).is_dir() and int(found[2].replace(",", "")) > 0
    monkeypatch.setattr(tokens, "_make", None)  # it is not called again
    assert main(["prepare", *flags]) == 0
    assert train([*flags, "--max_steps", "1", "--output_dir", str(tmp_path / "out")]) == 0


def test_recipes_prepare_names_a_token_cache_that_cannot_be_written(tiny_model, texts, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "datasets")
    assert main(["prepare", *model_flags(tiny_model, texts)]) == 2
    said = capsys.readouterr().err
    assert "HF_HOME: the folder for tokens, " in said and "Not a directory" in said
