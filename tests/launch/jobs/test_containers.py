"""Slurm jobs in a container, as a site has it: a site file, apptainer or pyxis, requeue and all.

Neither is installed here: stand-ins check their options and run the command, on a real cluster.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.cli import main
from launch.jobs.slurm import Slurm, mounted
from tests.support.containers import stand_in
from tests.support.hostile import HOSTILE, hostile_job
from tests.support.jobs import job
from tests.support.running import Outcome, read_record
from tests.support.slurm import NEEDS_SLURM, log, recipes, submit, wait_for_step

IMAGES = {"apptainer": ("apptainer", "/images/training.sif"), "pyxis": ("srun", "registry#lab/training:1")}


@dataclass
class Contained:
    """A preempted run of two nodes in containers: its folder, what it said, what the runner saw."""

    folder: Path
    image: str
    state: str
    dry_run: str
    outcome: Outcome
    seen: list[dict]


@pytest.fixture(scope="module", params=IMAGES)
def contained(request, cluster, slow_flags, tmp_path_factory):
    runner, image = IMAGES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    tools = stand_in(runner, folder / "site", srun=shutil.which("srun") or "")
    (folder / "site" / "mine").mkdir()
    (folder / "accelerate-recipes").mkdir()
    site = {"partition": "low", "container_image": image, "container_mounts": str(folder / "site" / "mine")}
    (folder / "accelerate-recipes" / "site.yaml").write_text(json.dumps({"slurm": site}))
    variables = {"XDG_CONFIG_HOME": str(folder), "PATH": f"{tools}:{os.environ['PATH']}", "HF_HOME": f"{folder}/hf"}
    (folder / "work").mkdir()
    words = ["--nodes", "2", "--time", "1:00:00", "--", *slow_flags]
    dry = recipes(cluster, folder / "work", "submit", "slurm", "--dry_run", *words, **variables)
    job, outcome = submit(cluster, folder / "work", *words, **variables)
    wait_for_step(cluster, folder / "work", 5)
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3")
    state = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED")
    seen = [json.loads(line) for line in (folder / "site" / "note").read_text().splitlines()]
    return Contained(folder / "work", image, state, dry.output, outcome, seen)


@NEEDS_SLURM
@pytest.mark.slow
def test_a_preempted_run_in_containers_goes_on_to_the_last_step(contained):
    assert contained.state == "COMPLETED", log(contained.folder)
    record = read_record(contained.folder / "run")
    assert record["status"] == "finished" and record["world_size"] == 2
    text = log(contained.folder)
    assert "told to stop by SIGTERM at step" in text and "resuming from" in text and "step 40/40" in text


@NEEDS_SLURM
@pytest.mark.slow
def test_the_container_sees_what_the_run_names(contained, slow_flags):
    """The current folder, the model's, the data's, HF_HOME, this package, and the site's own."""
    model, data = (slow_flags[slow_flags.index(flag) + 1] for flag in ("--model_name_or_path", "--dataset_name"))
    wanted = [contained.folder, Path(model), Path(data), contained.folder.parent / "hf"]
    wanted.append(contained.folder.parent / "site" / "mine")
    for seen in contained.seen:
        binds = seen.get("--container-mounts") or ",".join(seen["bind"])
        mounted = [Path(bind.split(":")[0]) for bind in binds.split(",")]
        assert all(any(path.is_relative_to(folder) for folder in mounted) for path in wanted), mounted
        assert (seen.get("--container-workdir") or seen["pwd"]) == str(contained.folder)
        assert (seen.get("--container-image") or seen["image"]) == contained.image


@NEEDS_SLURM
@pytest.mark.slow
def test_the_dry_run_says_what_the_site_file_gave(contained):
    assert "site.yaml: --partition low --container_image" in contained.dry_run.splitlines()[1]


@NEEDS_SLURM
@pytest.mark.slow
def test_one_process_in_a_container_saves_when_it_is_cancelled_and_has_its_preflight_there(
    cluster, slow_flags, tmp_path
):
    """accelerate passes no signal on to a single process: it has to get its own."""
    tools = stand_in("apptainer", tmp_path / "site")
    variables = {"PATH": f"{tools}:{os.environ['PATH']}", "HF_HOME": str(tmp_path / "hf")}
    words = ["--container_image", "/images/training.sif", "--preflight", "--", *slow_flags]
    job, outcome = submit(cluster, tmp_path, *words, **variables)
    assert job, outcome.output
    wait_for_step(cluster, tmp_path, 3)
    assert "healthy:" in log(tmp_path)
    cluster.run("scancel", job)
    cluster.wait_until("the run's record", lambda: read_record(tmp_path / "run").get("status") == "preempted")
    assert list((tmp_path / "run").glob("checkpoint-*/trainer_state.json")) and "requeued" not in log(tmp_path)


# --- Without a cluster: what bash makes of the script ---------------------------------------------

_NOTE = """\
#!{python}
import json, sys
from pathlib import Path
with Path({file!r}).open("a") as stream:
    stream.write(json.dumps([Path(sys.argv[0]).name, *sys.argv[1:]]) + "\\n")
"""


def run_by_hand(text: str, folder: Path, *names: str) -> tuple[int, list[list[str]]]:
    """The exit code of a job's script in `folder`, and each call of the named commands."""
    tools = folder / "tools"
    tools.mkdir()
    for name in names:
        (tools / name).write_text(_NOTE.format(python=sys.executable, file=str(folder / "calls")))
        (tools / name).chmod(0o755)
    for name in ("bash", "head", "sed", "sort", "paste", "mkdir", "sleep"):  # a machine may have a real srun too
        (tools / name).symlink_to(shutil.which(name))
    environment = {
        "PATH": str(tools),
        "HOME": str(folder),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True)
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, [json.loads(line) for line in calls]


ODD = [word for word in HOSTILE if "\0" not in word and word]


@pytest.mark.parametrize("image", ["{}", "{}.sif"])
def test_odd_characters_arrive_as_they_were_typed(image, tmp_path):
    """In modules, images and mounts; never as a part of the script."""
    mounts = tuple(f"/{word}" for word in ODD if not set(word) & set(",:"))
    for number in range(0, len(ODD), 40):
        folder = tmp_path / str(number)
        folder.mkdir()
        name = image.format(ODD[number])
        slurm_flags = Slurm(module=tuple(ODD), container_image=name, container_mounts=mounts)
        text = slurm_flags.render(hostile_job(HOSTILE, folder))
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        code, calls = run_by_hand(text, folder, "module", "scontrol", "scancel", "srun", "apptainer")
        assert code == 0
        assert calls[0] == ["module", "load", *ODD]
        srun = next(call for call in calls if call[0] == "srun")
        assert (name in srun) if image.endswith("sif") else (f"--container-image={name}" in srun)
        assert any(word.endswith("," + ",".join(f"{mount}:{mount}" for mount in mounts)) for word in srun)
        assert not (folder / "broken").exists()


@pytest.mark.parametrize(
    ("flags", "without", "code"),
    [
        (Slurm(module=("cuda",)), "module", 1),
        (Slurm(venv="/nowhere/venv"), "", 1),
        (Slurm(container_image="a.sif"), "apptainer", 1),
        (Slurm(), "srun", 127),
    ],
)
def test_what_is_missing_on_the_node_fails_the_job_at_once(flags, without, code, tmp_path):
    tools = {"module", "scontrol", "scancel", "srun", "apptainer"} - {without}
    ended, calls = run_by_hand(flags.render(hostile_job([], tmp_path)), tmp_path, *tools)
    assert ended == code and not any(call[0] == "srun" for call in calls)


@pytest.mark.parametrize("changed", ["SLURM_ARRAY_JOB_ID=7", "SLURM_JOB_NUM_NODES=2"])
def test_a_job_array_and_another_number_of_nodes_are_refused_on_the_node(changed, tmp_path):
    text = Slurm().render(hostile_job([], tmp_path))
    ended, calls = run_by_hand(f"export {changed}\n{text}", tmp_path, "srun", "scontrol")
    assert (ended, calls) == (2, [])


def test_the_environment_of_a_module_may_read_what_is_not_set(tmp_path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text('[ "$NOT_SET_ANYWHERE" = x ] || true\n')
    text = Slurm(venv=str(tmp_path / "venv")).render(hostile_job([], tmp_path))
    assert run_by_hand(text, tmp_path, "srun", "scontrol")[0] == 0


@pytest.mark.parametrize(("image", "runs"), [("a.sif", True), ("a.sqsh", False), ("registry#a:1", False)])
def test_the_images_name_says_who_runs_it(image, runs, capsys):
    assert main(["submit", "slurm", "--container_image", image, "--dry_run"]) == 0
    assert ("command -v apptainer" in capsys.readouterr().out) == runs


def test_folders_outside_the_current_one_are_mounted(tmp_path, monkeypatch):
    """Those of settings on the command line and in files, existing ones; links are not followed."""
    (tmp_path / "work").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "data" / "a.jsonl").write_text("")
    monkeypatch.chdir(tmp_path / "work")
    argv = ["--dataset_name", "../data/a.jsonl", "--model_name_or_path", str(tmp_path / "link")]
    argv += ["--run_name", "/nowhere/x", "--output_dir", str(tmp_path / "new")]
    found = mounted(job(argv=argv))
    assert {str(tmp_path / name) for name in ("data", "link", "new")} <= set(found)
    assert not any("nowhere" in folder or folder.endswith("/work") for folder in found)
