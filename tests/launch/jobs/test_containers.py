"""What bash makes of a job's script on a node, without a cluster."""

import json
import shutil
import subprocess
import sys

import pytest

from launch.jobs.slurm import Slurm, mounted
from tests.support.hostile import HOSTILE, hostile_job
from tests.support.jobs import job

_NOTE = """\
#!{python}
import json, sys
from pathlib import Path
with Path({file!r}).open("a") as stream:
    stream.write(json.dumps([Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
"""


def run_by_hand(text: str, folder, *names: str) -> tuple[int, list[list[str]]]:
    """The exit code of a job's script in `folder`, and each call of the named commands."""
    tools = folder / "tools"
    tools.mkdir()
    for name in names:
        (tools / name).write_text(_NOTE.format(python=sys.executable, file=str(folder / "calls")))
        (tools / name).chmod(0o755)
    for name in ("bash", "head", "sed", "sort", "paste", "mkdir", "sleep"):  # a machine may have a real srun too
        (tools / name).symlink_to(shutil.which(name))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    environment = {"PATH": str(tools), "HOME": str(folder), **slurm}
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, [json.loads(line) for line in calls]


ODD = [word for word in HOSTILE if "\0" not in word and word]


@pytest.mark.parametrize("image", ["a b$(touch broken)", "a b$(touch broken).sif"])
def test_slurm_modules_images_and_mounts_keep_special_characters_unchanged(image, tmp_path):
    """In modules, images and mounts; never as a part of the script."""
    mounts = tuple(f"/{word}" for word in ODD if not set(word) & set(",:"))
    slurm = Slurm(module=tuple(ODD), container_image=image, container_mounts=mounts)
    text = slurm.render(hostile_job(HOSTILE, tmp_path))
    code, calls = run_by_hand(text, tmp_path, "module", "scontrol", "scancel", "srun", "apptainer")
    assert code == 0 and calls[0] == ["module", "load", *ODD]
    srun = next(call for call in calls if call[0] == "srun")  # FILE.sif is run by apptainer, the rest by pyxis
    assert (image if image.endswith("sif") else f"--container-image={image}") in srun
    assert any(word.endswith("," + ",".join(f"{mount}:{mount}" for mount in mounts)) for word in srun)
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("flags", "without", "code"),
    [
        (Slurm(module=("cuda",)), "module", 1),
        (Slurm(venv="/nowhere/venv"), "", 1),
        (Slurm(container_image="a.sif"), "apptainer", 1),
        (Slurm(), "srun", 127),
    ],
    ids=["module", "venv", "apptainer", "srun"],
)
def test_a_slurm_job_fails_at_once_if_module_or_venv_or_apptainer_or_srun_is_missing(flags, without, code, tmp_path):
    tools = {"module", "scontrol", "scancel", "srun", "apptainer"} - {without}
    ended, calls = run_by_hand(flags.render(hostile_job([], tmp_path)), tmp_path, *tools)
    assert ended == code and not any(call[0] == "srun" for call in calls)


def test_folders_that_settings_point_to_outside_the_current_folder_are_mounted_in_a_container(tmp_path, monkeypatch):
    """Those of settings on the command line and in files, existing ones; links are not followed."""
    for name in ("work", "data", "real"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "a.jsonl").write_text("")
    monkeypatch.chdir(tmp_path / "work")
    argv = ["--dataset_name", "../data/a.jsonl", "--model_name_or_path", str(tmp_path / "link")]
    argv += ["--run_name", "/nowhere/x", "--output_dir", str(tmp_path / "new")]
    found = mounted(job(argv=argv))
    assert {str(tmp_path / name) for name in ("data", "link", "new")} <= set(found)
    assert not any("nowhere" in folder or folder in (str(tmp_path), str(tmp_path / "work")) for folder in found)
