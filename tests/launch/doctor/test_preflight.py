"""`--preflight`: the doctor runs on every node of a job before the training starts."""

import re
import subprocess
from dataclasses import replace

import pytest
import yaml

from launch.jobs.azure import Azure, training_in
from launch.jobs.local import Local
from launch.jobs.slurm import Slurm
from tests.support.hostile import hostile_job, received
from tests.support.jobs import job


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_the_script_starts_only_after_a_preflight_that_passes(fails, broken_torch, tmp_path):
    text = Local().render(replace(hostile_job(["a b"], tmp_path), preflight=True))
    environment = broken_torch if fails else None
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment)
    assert done.returncode == fails and ("failed: 1 of" if fails else "healthy: ") in done.stdout, done.stderr
    assert (tmp_path / "words.json").exists() != fails and "Traceback" not in done.stdout + done.stderr
    assert fails or received(tmp_path) == ["a b"]


@pytest.mark.parametrize(("target", "nodes"), [(Local(), 1), (Slurm(venv="/v"), 1), (Slurm(), 2)])
def test_the_preflight_is_bash_and_comes_first(target, nodes):
    text = target.render(job(nodes=nodes, processes=4, preflight=True))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert re.search(rf"launch doctor --nodes {nodes} --num_processes {4 * nodes} .*&& exec .*accelerate", text)


def test_the_training_in_a_job_for_azure_is_found_behind_its_preflight():
    found = {}
    for preflight in (True, False):
        body = yaml.safe_load(Azure(compute="cluster").render(job(nodes=2, processes=4, preflight=preflight)))
        assert ("launch doctor" in body["command"]) == preflight
        found[preflight] = training_in(body)
    assert found[True] == found[False] is not None
