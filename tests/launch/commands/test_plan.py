"""`recipes plan`: its tables, its JSON, its picture and its messages."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, LlamaConfig, LlamaForCausalLM

from launch.cli import main
from recipes.catalog import RECIPES
from tests.recipes.planner.small import LARGE, SHAPE, SMALL, SMALL_CARD
from tests.support.running import ROOT


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


def test_json_says_what_was_planned_and_how_sure_it_is(folder, capsys):
    argv = ["plan", "--model", str(folder), "--gpu", "L4", "--recipe", "standard", "--max_length", "99"]
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["length"], plan["asked_length"], plan["margin"]) == (99, 99, 0.06)
    context = plan["context"]
    assert context["low"] < context["high"] == context["bytes"] and "other cards" in context["source"]
    assert main([*argv, "--explain"]) == 0
    printed = capsys.readouterr().out
    heads = next(line for line in printed.splitlines() if line.startswith("recipe ")).split()[1:]
    assert all(f"\n{head}: " in printed for head in heads) and "\nnot counted: " in printed
    assert f"\ncontext: {context['bytes'] / 2**20:.0f} MiB, {context['source']}\n" in printed
    assert all(f"\ncontext of {reading}\n" in printed for reading in context["readings"])


def test_a_size_names_the_model_whose_shape_it_has(capsys):
    assert main(["plan", "--model", "0.5B", "--gpu", "H100", "--recipe", "standard", "--max_length", "64"]) == 0
    printed = capsys.readouterr().out
    assert "0.5B, 494,032,768 parameters" in printed and "\nthe shape of Qwen/Qwen2.5-0.5B: 24 layers" in printed


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "of_this_folder"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(folder) -> Path:
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    places = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "of_this_folder", "auto_map": places}))
    return folder


def test_a_model_with_code_of_its_own_is_planned_once_it_is_trusted(with_code, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    argv = ["plan", "--model", str(with_code), "--gpu", "L4", "--recipe", "standard"]
    assert main(argv) == 2
    assert "read it, then --trust_remote_code" in capsys.readouterr().err
    assert main([*argv, "--trust_remote_code"]) == 0
    printed = capsys.readouterr().out
    assert "take standard" in printed and "cannot be traced" not in printed


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Encoders in a folder and in the cache of the Hub, an empty folder, and a data set."""
    folder = tmp_path_factory.mktemp("models")
    cached = folder / "hub" / "models--some--bert"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    for place in (folder / "bert", cached / "snapshots" / ("a" * 40)):
        BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2).save_pretrained(place)
    (folder / "empty").mkdir()
    (folder / "rows.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return folder


@pytest.mark.parametrize(
    "argv",
    [
        "--model 7B",
        "--model 7B --gpu L4 --optim nine",
        "--model bert --gpu L4",
        "--model bert/config.json --gpu L4",
        "--model 7B --gpu L4 --accelerate_config nowhere.yaml",
        "--model 7B --gpu L4 --use_dora --load_in_4bit",
    ],
)
def test_a_mistake_is_refused_without_the_libraries_that_take_seconds(argv, models):
    code = (
        "import sys; from launch.cli import main; "
        f"status = main(['plan', *{argv!r}.split()]); "
        "sys.exit(0 if status == 2 and not {'torch', 'transformers'} & set(sys.modules) else 1)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(models), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=models)
    progress = ("planning ", "Reading the settings")  # on a busy machine; in a new cache
    said = [line for line in done.stderr.splitlines() if not line.startswith(progress)]
    assert done.returncode == 0 and len(said) == 1, done.stderr


def test_a_plan_is_for_as_many_processes_as_the_users_own_yaml_says(tmp_path, capsys):
    LARGE.save_pretrained(tmp_path)
    file = tmp_path / "own.yaml"
    shipped = (ROOT / "accelerate_configs" / "sharded.yaml").read_text()
    file.write_text(shipped.replace("num_processes: 1", "num_processes: 4"))
    argv = ["plan", "--model", str(tmp_path), "--max_length", "128", "--accelerate_config", str(file)]
    assert main([*argv, "--gpu", "L4"]) == 0
    assert "\n4 x L4, " in capsys.readouterr().out
    assert main([*argv, "--gpu_memory", "0.6"]) == 0
    printed = capsys.readouterr().out.splitlines()
    commands = [line.partition(": ")[2] for line in printed if line[:1].isdigit() and ": recipes train " in line]
    assert commands and all(" --num_processes 4 " in command for command in commands)
    left_out = [command for command in commands if "--accelerate_config" not in command]
    assert left_out and all(command.startswith("recipes train --num_processes 4 --recipe ") for command in left_out)
    assert not [line for line in printed if ": --recipe" in line]
    assert main([*argv, "--gpu", "L4", "--num_processes", "2"]) == 0
    assert "\n2 x L4, " in capsys.readouterr().out


def test_the_plot_is_a_picture(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    one = ["--gpu", "H100", "--recipe", "standard"]
    assert main(["plan", "--model", str(folder), *one, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--model", str(folder), *one, "--plot", str(tmp_path / "no" / "plan.png")]) == 2
    assert "in a writable folder" in capsys.readouterr().err


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


def test_if_only_ram_is_short_it_says_how_much_is_needed(tmp_path, capsys):
    LARGE.save_pretrained(tmp_path)
    argv = ["plan", "--model", str(tmp_path), "--gpu_memory", "3", "--max_length", "128", "--host_memory", "0.5"]
    assert main([*argv, "--recipe", "memory_zero3"]) == 0
    assert "only the RAM of each node is too small: " in capsys.readouterr().out


def test_a_step_that_lacks_only_ram_says_so_where_the_gpu_is_what_is_short(tmp_path, capsys):
    LARGE.save_pretrained(tmp_path)
    argv = ["plan", "--model", str(tmp_path), "--gpu_memory", "1.55", "--max_length", "128", "--host_memory", "0.3"]
    assert main([*argv, "--recipe", "standard", "--num_processes", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sharded = next(line for line in lines if line.startswith("1: "))
    assert " --recipe sharded " in sharded
    assert re.search(r"^1 .* no \(host\) ", "\n".join(lines), re.MULTILINE)


def test_on_several_nodes_the_command_is_one_for_slurm_that_works(tiny_model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cards = ["--gpu", "A100 80GB", "--num_processes", "4", "--nodes", "2"]
    assert main(["plan", "--model", str(tiny_model), *cards, "--json"]) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["command"])
    assert words[:7] == ["recipes", "submit", "slurm", "--nodes", "2", "--gpus_per_node", "2"]
    assert main([*words[1:3], "--dry_run", *words[3:]]) == 0
    assert "--num_machines 2 --num_processes 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        ("--gpu L4", "the fastest that fits"),
        ("--gpu L4 --recipe standard", "which fits"),
        ("--gpu_memory 2.3", "with least sending and offload of those that fit"),
    ],
)
def test_it_says_why_a_recipe_is_recommended(gpu, why, tmp_path, capsys):
    LARGE.save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), *gpu.split(), "--max_length", "128"]) == 0
    assert f", {why}: recipes train --num_processes " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "argv", "why"),
    [
        ("qwen3_moe", "--gpu H100 --mfu 0.4", "experts, or without attention, are not counted; --mfu has no effect"),
        ("llama", "--gpu_memory 8 --mfu 0.4", "the peak of this card is unknown: --gpu NAME"),
        ("llama", "--gpu H100 --recipe baseline", "the peak of fp32 is unknown\n"),
    ],
)
def test_it_says_why_the_time_of_a_step_is_unknown(model, argv, why, tmp_path, capsys):
    SMALL[model].save_pretrained(tmp_path)
    assert main(["plan", "--model", str(tmp_path), *argv.split(), "--max_length", "64"]) == 0
    printed = capsys.readouterr().out
    assert "the time of a step is unknown: " in printed and why in printed and "fastest" not in printed
    assert ("--mfu has no effect" in printed) == ("--mfu" in argv)


@pytest.mark.parametrize(
    ("argv", "advice"),
    [
        ("--model 7B", "--gpu_memory GB"),
        ("--model 7B --gpu H100 --gpu_memory 80", "--gpu_memory GB"),
        ("--model 0B --gpu H100", "such as 7B"),
        ("--model 7X --gpu H100", "such as 7B"),
        ("--model 7B --gpu H100 --plot x", ".png"),
        ("--model 7B --gpu H1000", "--gpu_memory GB"),
        ("--model nowhere/at/all --gpu H100", "nowhere/at/all cannot be read"),
        ("--model ./nowhere --gpu H100", "a Hub id, a folder, a config.json or 7B"),
        ("--model 7B --gpu H100 --nodes 2", "1 process cannot be split evenly over 2 nodes"),
        ("--model 7B --gpu H100 --recipe fats", "fast"),
        ("--model 7B --gpu H100 --lerning_rate 1", "--learning_rate"),
        ("--model 7B --gpu H100 --num_processes 3 --nodes 2", "a multiple"),
        ("--model 7B --gpu H100 --num_processes 3 --global_batch_size 16", "15 or 18"),
    ],
)
def test_a_mistake_is_one_line(argv, advice, capsys):
    assert main(["plan", *argv.split()]) == 2
    assert advice in capsys.readouterr().err
