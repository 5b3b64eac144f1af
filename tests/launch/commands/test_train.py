"""`recipes train` checks a run, and becomes its launcher; `recipes where` names the files."""

import os
import signal
import sys

import pytest

from launch.cli import main
from launch.host.launcher import LAUNCHER
from launch.host.signals import PASSED_ON
from tests.support.running import ROOT, SCRIPT, model_flags, run

CONFIGS = ROOT / "accelerate_configs"


@pytest.fixture
def becomes(monkeypatch):
    """The command line that `recipes train` with these words is replaced by."""

    def words_of(*words: str) -> list[str]:
        replaced = []
        monkeypatch.setattr(os, "execv", lambda program, argv: replaced.append(argv))
        main(["train", *words])
        return replaced[0]

    yield words_of
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)  # as the launcher does, which has not come


def test_the_recipes_yaml_one_process_without_gpus_and_the_flags(becomes, tmp_path):
    words = becomes("--recipe", "fast", "--output_dir", str(tmp_path), "--run_name", "a $b")
    assert words[:4] == [sys.executable, str(LAUNCHER), "--config_file", str(CONFIGS / "fast.yaml")]
    assert words[words.index("--num_processes") + 1] == "1"
    script = words.index(str(SCRIPT))
    assert words[script + 1 :] == ["--recipe", "fast", "--output_dir", str(tmp_path), "--run_name", "a $$b"]


def test_another_yaml_by_name_or_by_path(becomes, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text((CONFIGS / "standard.yaml").read_text().replace("num_processes: 1", "num_processes: 2"))
    named = becomes("--accelerate_config", "memory", "--recipe", "memory", "--output_dir", str(tmp_path))
    own = becomes("--accelerate_config", str(mine), "--output_dir", str(tmp_path))
    assert str(CONFIGS / "memory.yaml") in named
    assert str(mine) in own and own[own.index("--num_processes") + 1] == "2"


def test_a_deepspeed_json_is_launched_by_a_yaml_without_deepspeed(becomes, tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"}')
    words = becomes("--recipe", "memory", "--deepspeed", str(tmp_path / "ds.json"), "--output_dir", str(tmp_path))
    assert str(CONFIGS / "standard.yaml") in words


def test_a_token_may_be_given_since_nothing_of_the_command_is_stored(becomes, tmp_path):
    assert "--hub_token" in becomes("--hub_token", "abc", "--output_dir", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ("--lerning_rate 1", "--learning_rate"),
        ("--recipe baseline --num_processes 2", "one process"),
        ("--accelerate_config fsat", "Fix: fast"),
        ("--accelerate_config mine.yaml", "an existing file, or one of fast, memory, memory_zero3"),
    ],
)
def test_a_mistake_starts_nothing(words, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda *anything: pytest.fail("it was started"))
    assert main(["train", *words.split(), "--output_dir", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert printed in output.err and not output.out


@pytest.mark.slow
def test_a_recipe_of_ones_own_trains_in_two_processes(tiny_model, texts, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: fast\npurpose: A test.\nchanges:\n  max_steps: [2, few]\n")
    words = ["train", "--recipe", str(mine), "--num_processes", "2", *model_flags(tiny_model, texts)]
    done = run(
        [sys.executable, "-m", "launch", *words, "--output_dir", str(tmp_path / "out")], tmp_path / "out", cwd=ROOT
    )
    assert (done.code, done.record["status"], done.record["world_size"]) == (0, "finished", 2), done.output
    assert done.output.startswith("recipe "), "nothing is printed before train.py's own lines"


@pytest.mark.parametrize(
    ("name", "path"),
    [("train.py", SCRIPT), ("fast", CONFIGS / "fast.yaml"), ("azureml/fast.yaml", ROOT / "azureml" / "fast.yaml")],
)
def test_where_prints_a_path_and_nothing_else(name, path, capsys):
    assert main(["where", name]) == 0
    assert capsys.readouterr().out == f"{path}\n"


def test_where_knows_no_other_file(capsys):
    assert main(["where", "fsat"]) == 2
    assert "train.py, fast.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["check", pytest.param("plan --model 1B --gpu H100 --recipe fast", marks=pytest.mark.slow)]
)
def test_a_yaml_is_known_by_its_name(command, capsys):
    assert main([*command.split(), "--accelerate_config", "fast"]) == 0
    assert main([*command.split(), "--accelerate_config", "fats"]) == 2
    assert "Fix: fast" in capsys.readouterr().err


def test_a_file_wins_over_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fast").write_text("")
    assert main(["check", "--accelerate_config", "fast"]) == 2
    assert "fast is empty" in capsys.readouterr().err
