"""A mistake in a command is one line with its fix, exit 2, and nothing is started or sent."""

import os

import pytest

from launch.cli import main
from launch.jobs.azure import Azure
from launch.jobs.local import Local
from launch.jobs.slurm import Slurm
from tests.support.running import ROOT

MODEL = "--model_name_or_path somebody/model"
MISTAKES = {
    "show fast --num_processes 3": "15 or 18",
    "show outputs/none": "there is no folder outputs/none",
    "show .": "the folder . has no run.json",
    "show nothing": "there is no recipe",
    "check --gpu T4 --bf16": "only emulated on compute capability 7.5",
    "check --gpu H1000": "H100 SXM",
    "check --num_processes 7 --azureml fast.yaml": "without --num_processes",
    "check --accelerate_config fats": "Fix: fast",
    "plan --model 7B": "--gpu_memory GB",
    "plan --model 0B --gpu H100": "such as 7B",
    "plan --model 7B --gpu H1000": "--gpu_memory GB",
    "plan --model nowhere/at/all --gpu H100": "nowhere/at/all cannot be read",
    "plan --model ./nowhere --gpu H100": "or give a folder, a config.json, a size: 7B",
    "plan --model 7B --gpu H100 --nodes 2": "1 process cannot be split evenly over 2 nodes",
    "plan --model 7B --gpu H100 --num_processes 3 --global_batch_size 16": "15 or 18",
    "train fast": "--recipe fast",
    "train --lerning_rate 1": "--learning_rate",
    "train --recipe baseline --num_processes 2": "one process",
    "train --accelerate_config mine.yaml": "an existing file, or one of fast, memory, memory_zero3",
    "fit --per_device_train_batch_size 4": "is the value that --fit searches for",
    "prepare": "there is nothing to prepare",
    "chekc": "Fix: recipes check.",
    "sft": "Fix: recipes train.",
    "": "one of list, show",
    "plan --model 8B --gpu H100 --num_procesess 2": "Fix: --num_processes.",
    "check --num_process 2": "is not an argument of `recipes check`. Fix: --num_processes.",
    "train --accelerate_confg fast": "Fix: --accelerate_config.",
    "scale run --step 2": "Fix: --steps.",
    "list --learning_rate 1": "see `recipes list --help`",
    "generate outputs/none How do I": "put the prompt in quotes",
    "train --task sequence_classification --eval_strategy epoch --metric_for_best_model f1": "macro or f1_weighted.",
    "submit slurm --output_dir out": "train.py's flags come after --",
    "doctor --nodes 2": "main_process_ip",
    "doctor --nodes 2 --main_process_ip n1 --machine_rank 2": "0 to 1",
    "doctor --nodes 2 --main_process_ip n1 --num_processes 3": "a multiple of 2",
    "scale run --num_processes 1 3": "global batch of 16 cannot be split evenly over 3",
    "scale run --recipe baseline": "baseline trains in one process",
    "scale run --output_dir here": "--output_dir: is set by `recipes scale run`",
    "scale run --fit_only": "--fit_only: is set by `recipes scale run`",
    "scale run --learning_rat 1": "--learning_rate",
    "scale run --apply": "first run `recipes scale run",
    "status": "no run was submitted or started in outputs",
    "logs": "no run was submitted or started in outputs",
    "submit slurm -- --lerning_rate 1": "learning_rate",
    "submit slurm --nodes 3 -- --global_batch_size 16": "--global_batch_size 15 or 18",
    "submit slurm --recipe baseline --nodes 2": "--recipe standard",
    "submit slurm --gpus_per_node a100:2,h100:2": "--gpus_per_node 4, or a100:4",
    "submit slurm -- --run_name hf_a1B2c3D4a1B2c3D4a1B2c3D4": "others can read it",
    "submit slurm --container_image hf_abcdefghijklmnopqrstuvwxyz": "looks like a secret",
    "submit slurm -- --config fresh.yaml": "another --output_dir",
    "submit slurm --dry_run -- --accelerate_config mine.yaml": "slurm --accelerate_config FILE -- FLAGS`",
    "submit slurm --accelerate_config accelerate.yaml": "'multi_gpu' is not a valid Distribut",
    "submit local --output job.sh": "--dry_run",
    "submit local --nodes 2 --dry_run": "--processes_per_node",
    "submit local --dry_run --output /nowhere/job.sh": "a writable folder",
    "submit azureml -- --output_dir ../out": "--compute NAME",  # beside the mistake in output_dir
    "submit local --dry_run -- --hub_token mine": "hub_token: looks like a secret",
    "submit azureml --compute c --spot": "replace --compute by --instance_type",
    "submit azureml --compute c --job_name hf_a1B2c3D4a1B2c3D4a1B2c3D4": "looks like a secret",
    f"submit azureml --data azureml:a:1 -- --dataset-name=b {MODEL}": "names the job's data set",
    f"submit azureml --compute c --dry_run --output {ROOT}/azureml/fast.yaml": "another name",
    "submit azureml --compute c --output_uri ./here": "azureml://datastores",
    "submit azureml --compute c -- --fresh": "--output_uri",
    **{
        f"submit azureml --compute c --data {place} -- {MODEL}": "is not a data asset or a uri of storage"
        for place in ("azureml:texts", "azureml:texts:x:y", "hf://x")
    },
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_in_a_command_is_named_and_no_job_is_started_or_submitted(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *anything: pytest.fail("it was started"))
    for target in (Local, Slurm, Azure):
        monkeypatch.setattr(target, "send", lambda *anything: pytest.fail("it was sent"))
    (tmp_path / "fresh.yaml").write_text("fresh: true\n")
    (tmp_path / "accelerate.yaml").write_text("distributed_type: multi_gpu\nnum_processes: 1\n")
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert MISTAKES[words] in " ".join(printed.err.split()) and not printed.out
