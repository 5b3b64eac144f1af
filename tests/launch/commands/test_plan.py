"""`recipes plan`: its tables, its JSON, its picture and its messages."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from launch.cli import main
from recipes.catalog import RECIPES
from tests.recipes.planner.small import LARGE, SHAPE, SMALL, SMALL_CARD


class LooksAtItsDataConfig(LlamaConfig):
    model_type = "looks_at_its_data"


class LooksAtItsData(LlamaForCausalLM):
    config_class = LooksAtItsDataConfig

    def forward(self, input_ids=None, **others):
        return super().forward(input_ids[:, : input_ids.max().item() + 1], **others)


def test_it_says_so_if_a_model_cannot_be_traced_but_only_estimated(tmp_path, capsys):
    AutoConfig.register(LooksAtItsDataConfig.model_type, LooksAtItsDataConfig)
    AutoModelForCausalLM.register(LooksAtItsDataConfig, LooksAtItsData)
    LooksAtItsDataConfig(**SHAPE).save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), "--gpu", "A100 80GB", "--recipe", "standard"]) == 0
    assert "cannot be traced" in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path) -> Path:
    SMALL["llama"].save_pretrained(tmp_path)
    return tmp_path


def test_it_prints_a_row_for_each_recipe_and_the_recommended_one(folder, capsys):
    assert main(["plan", "--model", str(folder), "--gpu", "H100", "--num_processes", "4"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in RECIPES if name != "baseline")
    assert "take fast" in printed


def test_json_holds_bytes_and_whole_numbers_only(folder, capsys):
    assert main(["plan", "--model", str(folder / "config.json"), "--gpu_memory", "24", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recommended"] == "fast" and plan["gpu"]["usable_bytes"] == 24_000_000_000
    for entry in plan["recipes"]:
        assert sum(entry["components"].values()) == entry["total_bytes"]
        assert all(type(size) is int for size in entry["components"].values())


def test_the_plot_is_a_picture(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    one = ["--gpu", "H100", "--recipe", "standard"]
    assert main(["plan", "--model", str(folder), *one, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--model", str(folder), *one, "--plot", str(tmp_path / "no" / "plan.png")]) == 2
    assert "choose a writable folder" in capsys.readouterr().err


def test_it_prints_what_to_try_if_nothing_fits(tmp_path, capsys):
    LARGE.save_pretrained(tmp_path)
    argv = ["--model", str(tmp_path), "--gpu_memory", str(SMALL_CARD), "--recipe", "memory", "--max_length", "256"]
    assert main(["plan", *argv]) == 0
    printed = capsys.readouterr().out
    assert "nothing fits" in printed and "--use_peft true --load_in_4bit true" in printed
    assert main(["plan", *argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for number, step in enumerate(plan["next_steps"], 1):
        assert f"\n{number}: {step['words']}\n" in printed  # on a line of its own, to be copied whole
        assert "--max_length 128" in step["words"] or "--max_length 256" in step["words"]


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        ("--gpu L4", "the fastest that fits"),
        ("--gpu T4", "the first that fits"),
        ("--gpu_memory 3", "the fastest that fits, apart from compute, which is unknown"),
    ],
)
def test_it_says_why_a_recipe_is_recommended(gpu, why, tmp_path, capsys):
    LARGE.save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), *gpu.split(), "--max_length", "128"]) == 0
    assert f", {why}: --recipe " in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", ['{"model_type": "t5"}', '{"model_type": "llama", "hidden_size": "256"}', "{}", "["]
)
def test_a_model_that_the_task_cannot_use_is_one_line(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path), "--gpu", "L4", "--recipe", "standard"]) == 2
    assert capsys.readouterr().err.startswith("error  model")


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("--model 7B", "--gpu_memory GB"),
        ("--model 7B --gpu H100 --gpu_memory 80", "--gpu_memory GB"),
        ("--model 0B --gpu H100", "such as 7B"),
        ("--model 7X --gpu H100", "such as 7B"),
        ("--model 7B --gpu H100 --plot x", ".png"),
        ("--model 7B --gpu H1000", "--gpu_memory GB"),
        ("--model nowhere/at/all --gpu H100", "a Hub id, a folder, a config.json or 7B"),
        ("--model 7B --gpu H100 --recipe fats", "fast"),
        ("--model 7B --gpu H100 --lerning_rate 1", "--learning_rate"),
        ("--model 7B --gpu H100 --num_processes 3 --nodes 2", "a multiple"),
        ("--model 7B --gpu H100 --num_processes 3 --global_batch_size 16", "15 or 18"),
    ],
)
def test_a_mistake_is_one_line(argv, advice, capsys):
    assert main(["plan", *argv.split()]) == 2
    assert advice in capsys.readouterr().err
