"""`recipes submit`: checked before it is sent, and what a dry run shows is what runs."""

import json
import os
import signal
import subprocess
import sys

import pytest

from launch.cli import main
from launch.host.signals import EXIT_CODE
from launch.jobs.local import Local
from launch.jobs.slurm import Slurm, _ask
from tests.support.hostile import HOSTILE, hostile_job
from tests.support.jobs import job
from tests.support.running import ROOT, losses, model_flags, read_record, run, train_here
from tests.support.waiting import PATIENCE

GOLDEN = ROOT / "tests" / "launch" / "jobs" / "golden"
STEPS = "--max_steps 4 --learning_rate 1e-3 --logging_steps 1".split()

FULL = Slurm(
    partition="gpu", account="lab", time="1-00:00:00", gpus_per_node="a100:4", cpus_per_task=32, module=("cuda/12.6",)
)
PYXIS = Slurm(container_image="nvcr.io#nvidia/pytorch:26.01-py3", container_mounts=("/scratch", "/data:/in:ro"))
APPTAINER = Slurm(container_image="/shared/training.sif", module=("apptainer",), max_restarts=0)
RENDERED = {
    "local-1x1.sh": lambda: Local().render(job("fast", argv=("--run_name", "a b"), gpu=False)),
    "slurm-2x4.sbatch": lambda: FULL.render(job("memory", 2, 4, ("--learning_rate", "1e-5"))),
    "slurm-1x1-pyxis.sbatch": lambda: PYXIS.render(job("fast")),
    "slurm-1x1-apptainer.sbatch": lambda: APPTAINER.render(job("fast", argv=("--output_dir", "/tmp/run"))),
}


def test_a_slurm_command_gets_no_variable_of_the_job_around_it(monkeypatch):
    for name in (names := {"SLURM_JOB_ID", "SLURM_MEM_PER_CPU", "SBATCH_PARTITION", "SLURM_CONF"}):
        monkeypatch.setenv(name, "1")
    assert names & {line.partition("=")[0] for line in _ask(["env"]).splitlines()} == {"SLURM_CONF"}


@pytest.mark.parametrize("name", RENDERED)
def test_rendered_job_scripts_equal_the_golden_files(name):
    """To accept: `ACCEPT_GOLDEN=1 pytest tests/launch/jobs/test_submit.py`, and read the diff."""
    text = RENDERED[name]().replace(sys.executable, "python").replace(str(ROOT), "/checkout")
    if os.environ.get("ACCEPT_GOLDEN"):
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()


def test_a_job_with_a_deepspeed_json_uses_an_accelerate_yaml_without_deepspeed(tmp_path):
    """accelerate refuses the two together."""
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    text = FULL.render(job("memory", 2, 4, ("--deepspeed", str(file))))
    assert "standard.yaml" in text and "DeepSpeed ZeRO-1" in text and "--deepspeed_multinode_launcher" not in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "so the job has no GPU"),
        ({"gpus_per_node": "2"}, "Fix: --cpus_per_task 16"),
        ({"gpus_per_node": "2", "cpus_per_task": 8}, ""),
    ],
)
def test_submit_slurm_advises_gpus_per_node_and_cpus_per_task_if_they_are_missing(flags, said, capsys):
    Slurm(**flags).place(None)
    printed = " ".join(capsys.readouterr().err.split())
    assert said in printed if said else not printed


def test_train_py_gets_special_characters_unchanged_in_a_local_job(tmp_path):
    text = Local().render(hostile_job(HOSTILE, tmp_path))
    subprocess.run(["bash", "-c", text], check=True, cwd=tmp_path)
    _recipe, _name, *received = json.loads((tmp_path / "words.json").read_text())
    assert received == HOSTILE and not (tmp_path / "broken").exists()


@pytest.mark.slow
def test_the_script_printed_by_a_dry_run_trains_to_the_losses_of_one_process(tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), *STEPS, "--output_dir", str(tmp_path / "out")]
    words = ["submit", "local", "--processes_per_node", "2", "--dry_run"]
    assert main([*words, "--output", str(tmp_path / "job.sh"), "--", *flags]) == 0
    assert not (tmp_path / "out").exists()
    by_hand = run(["bash", str(tmp_path / "job.sh")], tmp_path / "out", cwd=tmp_path)
    assert (by_hand.code, by_hand.record.get("world_size")) == (0, 2), by_hand.output
    assert losses(by_hand) == pytest.approx(losses(train_here(tiny_model, texts, tmp_path / "alone", *STEPS)), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_sigint_or_sigterm_to_recipes_submit_local_saves_a_checkpoint(number, processes, tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), "--max_steps", "5000", "--output_dir", str(tmp_path)]
    command = [sys.executable, "-m", "launch", "submit", "local", "--processes_per_node", processes, "--", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as job:
        next(line for line in job.stdout if "step 5/" in line)
        job.send_signal(number)
        job.communicate(timeout=PATIENCE)
    ended = "interrupted" if number == signal.SIGINT else "preempted"
    assert job.returncode == EXIT_CODE and read_record(tmp_path)["status"] == ended
    assert list(tmp_path.glob("checkpoint-*/trainer_state.json"))


# --- Nothing illegal is submitted -----------------------------------------------------------------


def test_a_job_launches_the_recipe_that_a_config_file_names(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("recipe: memory\n")
    assert main(["submit", "local", "--dry_run", "--", "--config", str(tmp_path / "mine.yaml")]) == 0
    script = capsys.readouterr().out
    assert "--recipe memory" in script and "accelerate_configs/memory.yaml" in script


def test_the_advice_on_a_dry_run_stands_on_stderr_and_the_script_alone_on_stdout(capsys):
    assert main(["submit", "local", "--dry_run", "--", "--lora_r", "4"]) == 0
    script, said = capsys.readouterr()
    assert "is ignored without use_peft" in said and "advice" not in script


def test_submit_slurm_says_that_there_is_no_sbatch(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert main(["submit", "slurm"]) == 2
    assert "there is no sbatch" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["local --processes_per_node 2", "slurm --nodes 2 --gpus_per_node 2"])
def test_submit_uses_the_users_accelerate_yaml_instead_of_the_recipes_yaml(target, tmp_path, capsys):
    """With plain DDP the launcher knows nothing of the DeepSpeed that the recipe starts itself."""
    file, folder = tmp_path / "mine.yaml", ROOT / "accelerate_configs"
    words = ["submit", *target.split(), "--recipe", "memory", "--accelerate_config", str(file), "--dry_run"]
    memory, ddp = ((folder / f"{name}.yaml").read_text() for name in ("memory", "standard"))
    for text in (memory.replace("zero_stage: 2", "zero_stage: 1"), ddp):
        file.write_text(text)
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert f"--config_file {file} " in printed
    assert "--deepspeed" not in printed
    file.write_text(memory.replace("zero_stage: 2", "zero_stage: many"))
    assert main(words) == 2 and "zero_stage" in capsys.readouterr().err
