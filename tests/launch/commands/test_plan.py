"""`recipes plan`: its tables and its messages."""

import re
import shlex

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from launch.cli import main
from recipes.catalog import RECIPES
from recipes.planner.plan import plan_memory
from tests.recipes.planner.small import LARGE, SHAPE, SMALL
from tests.support.running import ROOT

ONE = "--gpu H100 --recipe standard"
MODELS = {"llama": SMALL["llama"], "experts": SMALL["qwen3_moe"], "large": LARGE}


@pytest.fixture
def said(tmp_path, capsys):
    """Runs `recipes plan` for one of the MODELS, or for a size; returns what it prints."""

    def run(model: str, argv: str, status: int = 0) -> str:
        if config := MODELS.get(model):
            config.save_pretrained(tmp_path)
        named = ["--model", str(tmp_path)] if config else ["--model_name_or_path", model]  # train.py's name for it
        assert main(["plan", *named, *shlex.split(argv)]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run


class LooksAtItsDataConfig(LlamaConfig):
    model_type = "looks_at_its_data"


class LooksAtItsData(LlamaForCausalLM):
    config_class = LooksAtItsDataConfig

    def forward(self, input_ids=None, **others):
        return super().forward(input_ids[:, : input_ids.max().item() + 1], **others)


def test_plan_recommends_the_fit_command_for_a_model_that_cannot_be_traced(said, monkeypatch):
    AutoConfig.register(LooksAtItsDataConfig.model_type, LooksAtItsDataConfig)
    AutoModelForCausalLM.register(LooksAtItsDataConfig, LooksAtItsData)
    monkeypatch.setitem(MODELS, "untraceable", LooksAtItsDataConfig(**SHAPE))
    assert "use `recipes fit`, which measures the memory" in said("untraceable", "--gpu H100 --recipe standard", 2)


def test_plan_prints_the_recommended_recipe_before_a_table_of_the_recipes(said):
    printed = said("llama", "--gpu H100 --num_processes 4")
    assert all(f"\n{name} " in printed for name in RECIPES if name != "baseline")
    answer, command = map(printed.index, ("take fast, ", "  recipes train --num_processes 4 --recipe fast"))
    assert answer < command < printed.index("\nrecipe ")  # the answer comes before the table


def test_plan_with_details_explains_each_column_and_names_the_source_of_the_cuda_context_size(said):
    printed = said("llama", "--gpu L4 --recipe standard --max_length 128 --details")
    heads = next(line for line in printed.splitlines() if line.startswith("recipe ")).split()[1:]
    assert all(f"\n{head}: " in printed for head in heads) and "\nnot counted: " in printed
    assert re.search(r"\ncontext: \d+ MiB, .*the largest known value", printed)
    assert re.search(r"\n8 x 2 x 1 .* yes .* ms", printed)  # a split of the same global batch


def test_plan_for_a_model_size_names_the_model_whose_shape_it_uses(said):
    printed = said("0.5B", "--gpu H100 --recipe standard --max_length 64")
    assert "0.5B, 494,032,768 parameters" in printed and "\nthe shape of Qwen/Qwen2.5-0.5B: 24 layers" in printed


def test_plan_takes_num_processes_from_the_users_accelerate_yaml_unless_a_flag_sets_it(said, tmp_path):
    file = tmp_path / "own.yaml"
    shipped = (ROOT / "accelerate_configs" / "sharded.yaml").read_text()
    file.write_text(shipped.replace("num_processes: 1", "num_processes: 4"))
    argv = f"--max_length 128 --accelerate_config {file}"
    assert "\n2 x L4, " in said("large", f"{argv} --gpu L4 --num_processes 2")
    printed = said("large", f"{argv} --gpu_memory 0.6").splitlines()
    commands = [line.partition(": ")[2] for line in printed if line[:1].isdigit() and ": recipes train " in line]
    assert commands and all(" --num_processes 4 " in command for command in commands)


def test_plan_prints_next_steps_if_no_recipe_fits(said, tmp_path):
    printed = said("large", "--gpu_memory 1.55 --recipe memory --max_length 128")
    plan = plan_memory(str(tmp_path), argv=["--max_length", "128"], gpu_memory=1.55, recipe="memory")
    assert "nothing fits" in printed and "--use_peft true --load_in_4bit true" in printed
    for number, step in enumerate(plan.next_steps, 1):
        assert f"\n{number}: {step.words}\n" in printed  # on a line of its own, to be copied whole
    enough = any(step.planned.fits for step in plan.next_steps)
    assert enough != ("none of these changes is enough: use " in printed)


def test_plan_says_if_only_offload_fits_or_if_only_host_memory_is_too_small(said):
    assert "no recipe fits without offload: even fast needs " in said("large", "--gpu_memory 2.5 --max_length 128")
    printed = said("large", "--gpu_memory 3 --max_length 128 --host_memory 0.5 --recipe memory_zero3")
    assert "only the RAM of each node is too small: " in printed
    argv = "--gpu_memory 2.53 --max_length 128 --host_memory 0.3 --recipe standard --num_processes 8"
    printed = said("large", argv)
    assert " --recipe sharded " in next(line for line in printed.splitlines() if line.startswith("1: "))
    assert re.search(r"^1 .* no \(host\) ", printed, re.MULTILINE)


def test_plan_for_two_nodes_prints_a_submit_slurm_command_that_works(tiny_model, tmp_path, capsys, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    printed = said(str(tiny_model), "--gpu 'A100 80GB' --recipe standard --num_processes 4 --nodes 2")
    words = shlex.split(next(line for line in printed.splitlines() if line.startswith("  recipes ")))
    assert words[:7] == ["recipes", "submit", "slurm", "--nodes", "2", "--gpus_per_node", "2"]
    assert main([*words[1:3], "--dry_run", *words[3:]]) == 0
    assert "--num_machines 2 --num_processes 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "argv", "why"),
    [
        ("large", "--gpu L4", ", the fastest that fits: "),
        ("large", "--gpu L4 --recipe standard", ", which fits: "),
        ("large", "--gpu_memory 2.68", ", which fits with the least communication and offload: "),
        ("experts", f"{ONE} --mfu 0.4", "experts, or without attention, are not counted; --mfu has no effect"),
        ("llama", "--gpu_memory 8 --recipe standard", "unknown: the peak of this GPU is unknown: choose"),
        ("llama", "--gpu H100 --recipe baseline", "the GPU's peak in fp32 is unknown\n"),
        ("llama", f"{ONE} --num_processes 2 --details", "communication (at 370 GB/s, "),
        ("llama", f"{ONE} --num_processes 2 --nodes 2 --details", "(left out: --bandwidth GB/s adds it)"),
    ],
)
def test_plan_says_why_a_recipe_is_recommended_and_why_its_step_time_is_unknown(model, argv, why, said):
    assert why in said(model, f"{argv} --max_length 128")
