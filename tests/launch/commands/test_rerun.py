"""A run again: from its record, in another folder and environment, bit by bit; or what differs."""

import re
import shutil
import site
import sys
import venv
from pathlib import Path

import pytest

from launch.cli import main
from launch.output import record
from recipes.run import here, resolve
from recipes.run.files import shipped
from recipes.run.hardware import read as read_hardware
from tests.support.running import ROOT, SCRIPT, losses, rewrite, run


@pytest.fixture
def place(tiny_model, texts, tmp_path, monkeypatch):
    """The folder `then`, with a model and data to name by relative paths; it is the current one."""
    then = tmp_path / "then"
    shutil.copytree(tiny_model, then / "tiny")
    shutil.copy(texts, then / "texts.jsonl")
    monkeypatch.chdir(then)
    return then


MATERIAL = "--model_name_or_path tiny --dataset_name texts.jsonl --max_steps 3 --logging_steps 1".split()


def recorded(folder: Path, *flags: str, launcher: str = "", yaml: Path | None = None, processes: int = 1) -> Path:
    """The folder of a run with these flags, as its record has it. Nothing was trained."""
    engine = yaml or shipped("single.yaml" if processes == 1 else "standard.yaml")
    run = resolve(
        [*MATERIAL, "--output_dir", folder.name, *flags],
        here(processes, hardware=read_hardware(), accelerate_config=str(engine)),
    )
    content = record.started(run) | {"status": "finished", "launcher": launcher.split()}
    if yaml:
        content["accelerate_config"] = str(yaml)
        content["files"][str(yaml)] = yaml.read_text()
    record.write(folder, content)
    return folder


def dry(capsys, *words: object) -> tuple[int, str, str]:
    """The exit code of a dry run, its script, and what was said of it in one line."""
    code = main(["rerun", *map(str, words), "--dry_run"])
    printed = capsys.readouterr()
    return code, printed.out, " ".join(printed.err.split())


# --- Bit by bit -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_rerun_exact_repeats_losses_and_weights_bit_for_bit_in_another_virtual_environment(processes, place, tmp_path):
    environment, output, now = tmp_path / "environment", place / "out", tmp_path / "now"
    now.mkdir()
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "of_the_other.pth").write_text("\n".join([str(ROOT), *site.getsitepackages()]))
    launcher = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 0".split()
    command = [sys.executable, *(launcher if processes == 2 else ()), str(SCRIPT), *MATERIAL, "--output_dir", "out"]
    first = run(command, output, cwd=place)
    assert first.code == 0
    words = [str(environment / "bin" / "python"), "-m", "launch", "rerun", str(output), "--exact"]
    again = run(words, now / "outputs" / "out-rerun", {"PYTHONPATH": ""}, now)
    assert again.code == 0, again.output
    assert "nothing differs here" in again.output
    assert (again.record["world_size"], again.record["engine"]) == (processes, first.record["engine"])
    assert losses(again) == losses(first)
    weights = [folder / "model.safetensors" for folder in (output, now / "outputs" / "out-rerun")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# --- What differs ---------------------------------------------------------------------------------


DIFFERENCES = {
    "a version": ({"versions": {"torch": "1.0+cu999"}}, "torch 1.0+cu999"),
    "a library that is missing": ({"versions": {"flash-attn": "2"}}, "flash-attn 2 null"),
    "the code": ({"code": {"version": "0", "source": "x", "commit": "abc"}}, "commit abc"),
    "the CPU": ({"hardware": {"gpus": [], "cpu": "Z80"}}, "cpu Z80"),
    "the GPUs": ({"hardware": {"gpus": [{"name": "H9"}, {"name": "H9"}]}}, 'gpus ["H9", "H9"] []'),
    "a variable": ({"environment": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO Ring null"),
    "a variable that was not set": ({"environment": {}}, "OMP_NUM_THREADS null"),
    "the data": ({"data": "sha256-0"}, "data sha256-0"),
    "the nodes": ({"world_size": 2, "local_world_size": 1}, "nodes 2 1"),
    "the engine": ({"engine": "FSDP2"}, "engine FSDP2 one process"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_rerun_lists_a_difference_in_versions_hardware_or_data_and_exact_refuses_it(what, place, capsys, monkeypatch):
    monkeypatch.setattr(record, "first_environment", lambda: {"OMP_NUM_THREADS": "3"})
    changes, words = DIFFERENCES[what]
    folder = recorded(place / "out")
    rewrite(folder, **changes)
    code, _, said = dry(capsys, folder)
    assert code == 0 and words in said
    assert dry(capsys, folder, "--exact")[0] == 2


def test_rerun_lists_a_flag_that_changes_a_setting_and_rerun_exact_refuses_it(place, capsys):
    folder = recorded(place / "out", "--seed", "7")
    code, script, said = dry(capsys, folder, "--seed", "8")
    assert code == 0 and "seed 7 8 command line" in said and "--seed 8" in script
    assert dry(capsys, folder, "--seed", "8", "--exact")[0] == 2


def test_rerun_exact_reports_no_difference_for_the_same_run_with_its_model_and_data_at_another_path(
    place, tmp_path, capsys
):
    folder = recorded(place / "out")
    moved = {name: tmp_path / f"moved-{name}" for name in ("tiny", "texts.jsonl")}
    for name, path in moved.items():
        (place / name).rename(path)
    words = ["--model_name_or_path", str(moved["tiny"]), "--dataset_name", str(moved["texts.jsonl"])]
    code, script, said = dry(capsys, folder, "--exact", *words)
    assert code == 0 and ": nothing differs here" in said and str(moved["tiny"]) in script
    assert f"--config {place}/out/run.json" in script and "--output_dir outputs/out-rerun" in script


def test_rerun_repeats_the_recorded_micro_batch_and_with_more_processes_keeps_the_global_batch(place, capsys):
    folder = recorded(place / "out")
    rewrite(folder, {"per_device_train_batch_size": 2})  # as if an earlier version had split the batch otherwise
    assert "batch 2 x 8 x 1 = 16" in dry(capsys, folder)[1]
    code, script, said = dry(capsys, folder, "--num_processes", "2")
    assert code == 0 and "batch 4 x 2 x 2 = 16" in script and "standard.yaml" in script
    assert "world_size 1 2" in said and "gradient_accumulation_steps" not in said


# --- Its folder and its files ---------------------------------------------------------------------


def test_rerun_refuses_the_output_dir_of_the_recorded_run(place, capsys):
    code, _, said = dry(capsys, recorded(place / "out"), "--output-dir=../then/out")
    assert code == 2 and "is the folder of the recorded run" in said


def test_rerun_lists_a_changed_recipe_file_and_keeps_the_recorded_values(place, capsys):
    (place / "mine.yaml").write_text("base: fast\npurpose: Ours.\nchanges:\n  seed: [1, ours]\n")
    folder = recorded(place / "out", "--recipe", "mine.yaml")
    assert "--recipe mine.yaml" in dry(capsys, folder, "--exact")[1]
    (place / "mine.yaml").write_text("base: fast\npurpose: Ours.\nchanges:\n  seed: [2, ours]\n")
    code, _, said = dry(capsys, folder)
    assert code == 0 and re.search(r"mine.yaml sha256-\w+ sha256-\w+ files", said) and "seed" not in said
    assert dry(capsys, folder, "--exact")[0] == 2


def test_rerun_compares_a_recipe_file_that_held_a_secret_by_its_hash(place, capsys):
    secret = "hf_" + "a" * 30
    (place / "mine.yaml").write_text(f"base: fast\npurpose: Ours.\nchanges:\n  seed: [1, {secret}]\n")
    folder = recorded(place / "out", "--recipe", "mine.yaml")
    assert dry(capsys, folder, "--exact")[0] == 0
    (place / "mine.yaml").unlink()
    code, _, said = dry(capsys, folder)
    assert code == 2 and "mine.yaml" in said and secret not in said


def test_rerun_uses_the_recorded_accelerate_yaml_and_lists_changes_of_the_file(place, capsys):
    file = place / "engine.yaml"
    shutil.copy(ROOT / "accelerate_configs" / "standard.yaml", file)
    folder = recorded(place / "out", yaml=file, launcher=f"accelerate launch --config_file {file}")
    assert f"--config_file {file} " in dry(capsys, folder, "--exact")[1]
    file.write_text(f"{file.read_text()}\n")
    code, script, said = dry(capsys, folder)
    assert code == 0 and f"--config_file {file} " in script and "engine.yaml sha256-" in said


def test_rerun_replaces_a_shipped_yaml_of_another_environment_by_the_one_installed_here(place, capsys):
    folder = recorded(place / "out")
    then = "/of/another/environment/fast.yaml"
    rewrite(folder, accelerate_config=then, files={then: shipped("fast.yaml").read_text()})
    assert f"--config_file {shipped('fast.yaml')} " in dry(capsys, folder)[1]


def test_rerun_names_accelerate_launch_flags_that_are_not_repeated(place, capsys):
    launcher = "python -m accelerate.commands.launch --multi_gpu --num_processes 2 --mixed-precision=bf16"
    folder = recorded(place / "out", "--bf16", launcher=launcher, processes=2)
    _, script, said = dry(capsys, folder)
    assert f"--config_file {shipped('standard.yaml')} " in script and "--num_processes 2" in script
    assert "launcher flags that are not repeated: --mixed-precision=bf16;" in said


def test_rerun_loads_a_hub_model_at_the_recorded_commit(place, capsys):
    folder = recorded(place / "out", "--model_name_or_path", "org/name")
    rewrite(folder, model="commit " + "a" * 40)
    assert "--model_revision " + "a" * 40 in dry(capsys, folder)[1]
