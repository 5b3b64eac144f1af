"""A private Slurm cluster for a file of tests, and a training slow enough to be interrupted."""

import os

import pytest

from tests.support.slow_model import write_slow_model
from tests.support.slurm import Cluster, installed

SLOW = "--learning_rate 1e-3 --logging_steps 1 --save_steps 1000 --max_length 64 --max_steps 40 --output_dir run"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if not installed() and os.environ.get("CI"):
        pytest.fail("Slurm is not installed, and in CI it must be", pytrace=False)
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def slow_flags(tiny_model, texts, tmp_path_factory):
    """40 steps of a second each, when two nodes share the global batch."""
    model = write_slow_model(tmp_path_factory.mktemp("slow") / "model", tiny_model, 0.5)
    return [*model, "--dataset_name", str(texts), *SLOW.split()]
