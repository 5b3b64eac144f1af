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
def test_a_job_starts_train_py_only_if_the_doctor_preflight_passes(fails, broken_torch, tmp_path):
    text = Local().render(replace(hostile_job(["a b"], tmp_path), preflight=True))
    environment = broken_torch if fails else None
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environment)
    assert done.returncode == fails and ("failed: 1 of" if fails else "healthy: ") in done.stdout, done.stderr
    assert (tmp_path / "words.json").exists() != fails and "Traceback" not in done.stdout + done.stderr
    assert fails or received(tmp_path) == ["a b"]


@pytest.mark.parametrize(("target", "nodes"), [(Local(), 1), (Slurm(venv="/v"), 1), (Slurm(), 2)])
def test_a_preflight_job_is_valid_bash_and_runs_the_doctor_before_accelerate_launch(target, nodes):
    text = target.render(job(nodes=nodes, processes=4, preflight=True))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert re.search(rf"launch doctor --nodes {nodes} --num_processes {4 * nodes} .*&& exec .*accelerate", text)


def test_the_training_command_read_from_an_azureml_job_is_the_same_with_and_without_preflight():
    found = {}
    for preflight in (True, False):
        body = yaml.safe_load(Azure(compute="cluster").render(job(nodes=2, processes=4, preflight=preflight)))
        assert ("launch doctor" in body["command"]) == preflight
        found[preflight] = training_in(body)
    assert found[True] == found[False] is not None
