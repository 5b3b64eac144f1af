"""`--preflight`: the doctor runs on every node of a job before the training starts."""

import re
import subprocess
from dataclasses import replace

import pytest
import yaml

from launch.jobs import azure as azure_job
from launch.jobs import local as local_job
from launch.jobs import slurm as slurm_job
from launch.jobs.azure import Azure
from launch.jobs.azure_check import training_in
from launch.jobs.job import Job, job_of
from launch.jobs.slurm import Slurm
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware
from tests.support.hostile import hostile_job, received


@pytest.mark.slow
def test_a_preflight_that_fails_ends_the_job_before_it_trains(broken_torch, tmp_path):
    text = local_job.render(replace(hostile_job(["a b"], tmp_path), preflight=True))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=broken_torch)
    assert done.returncode == 1 and "failed: 1 of" in done.stdout
    assert not (tmp_path / "words.json").exists() and "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow
def test_after_a_preflight_that_passes_the_script_starts(tmp_path):
    text = local_job.render(replace(hostile_job(["a b"], tmp_path), preflight=True))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert (done.returncode, received(tmp_path)) == (0, ["a b"]), done.stderr
    assert "healthy: " in done.stdout


def job(nodes: int, processes: int, preflight: bool = True) -> Job:
    hardware = Hardware((Gpu("GPU", (8, 0), 80 << 30),) * processes, cores=8)
    spec = resolve(place=here(nodes * processes, local_world_size=processes, hardware=hardware, environment={}))
    return job_of(spec, nodes, processes, [], preflight)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "render", [local_job.render, lambda job: slurm_job.render(job, Slurm(venv="/v"))], ids=["local", "slurm"]
)
def test_the_preflight_is_bash_and_comes_first(render, nodes):
    text = render(job(nodes, 4))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert re.search(rf"launch doctor --nodes {nodes} --num_processes {4 * nodes} .*&& exec .*accelerate", text)


def test_the_training_in_a_job_for_azure_is_found_behind_its_preflight():
    found = {}
    for preflight in (True, False):
        body = yaml.safe_load(azure_job.render(job(2, 4, preflight), Azure(compute="cluster")))
        assert ("launch doctor" in body["command"]) == preflight
        found[preflight] = training_in(body)
    assert found[True] == found[False] is not None
