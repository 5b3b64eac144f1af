"""`--preflight`: the doctor runs on every node of a job before the training starts."""

import re
import subprocess

import pytest
import yaml

from launch.jobs.azure import Azure, training_in
from launch.jobs.local import Local
from launch.jobs.slurm import Slurm
from tests.support.jobs import job


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
