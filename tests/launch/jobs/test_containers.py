"""Slurm jobs in a container, as a site has it: a site file, apptainer or pyxis, requeue and all.

Neither is installed here: stand-ins check their options and run the command, on a real cluster.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.containers import stand_in
from tests.support.running import Outcome, read_record
from tests.support.slurm import NEEDS_SLURM, log, recipes, submit, wait_for_step

pytestmark = NEEDS_SLURM

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


@pytest.mark.slow
def test_a_preempted_run_in_containers_goes_on_to_the_last_step(contained):
    assert contained.state == "COMPLETED", log(contained.folder)
    record = read_record(contained.folder / "run")
    assert record["status"] == "finished" and record["world_size"] == 2
    text = log(contained.folder)
    assert "told to stop by SIGTERM at step" in text and "resuming from" in text and "step 40/40" in text


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


@pytest.mark.slow
def test_the_dry_run_says_what_the_site_file_gave(contained):
    site, line = contained.dry_run.splitlines()[1:3]
    assert "site.yaml: --partition low --container_image" in site
    assert line == "# From the command line: --time 1:00:00"
