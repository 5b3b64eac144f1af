"""A user's mistake is one clear line, exit 2, once for all ranks; others are in test_last_words."""

import subprocess
import sys

import pytest

from launch.host.world import require_launcher
from tests.support.rows import jsonl
from tests.support.running import ROOT, SCRIPT, launch, run


@pytest.mark.parametrize(
    ("flags", "said"), [("--recipe fats", "fats"), ("--model_name_or_path a/b --dataset_name {data}", "has words")]
)
def test_a_mistake_in_flags_or_data_columns_is_found_before_torch_is_imported(flags, said, tmp_path):
    words = flags.format(data=jsonl(tmp_path, [{"words": "x"}])).split()
    code = (
        "import sys; from launch.train import main; code = main(sys.argv[1:]); "
        "print(code, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "2 []" and said in done.stderr


def test_two_ranks_report_an_unknown_recipe_once(tiny_model, tmp_path):
    outcome = launch("--recipe", "fats", output=tmp_path, processes=2, config="standard.yaml")
    assert outcome.output.count("there is no recipe") == 1, outcome.output


@pytest.mark.parametrize("command", [[str(SCRIPT)], ["-m", "launch", "train"]], ids=["train.py", "recipes train"])
def test_a_training_started_by_srun_without_accelerate_launch_or_torchrun_exits_with_2(command, tmp_path):
    environment = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PYTHONPATH": str(ROOT)}
    outcome = run([sys.executable, *command, "--output_dir", str(tmp_path)], tmp_path, environment)
    lines = outcome.output.splitlines()
    (line,) = (line for line in lines if not line.startswith("advice") and not line.endswith(" ..."))
    assert outcome.code == 2 and "accelerate launch" in line
    require_launcher({**environment, "SLURM_PTY_PORT": "1"})  # a shell, of which srun starts one
