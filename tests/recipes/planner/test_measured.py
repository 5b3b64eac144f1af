"""The CUDA context: measured here, as others read it on such a card, or the most they read."""

import json

import pytest

from recipes.planner.measured import context_of, file_in
from recipes.run.hardware import Gpu, Hardware
from tests.recipes.planner.small import run_of

MIB = 2**20


def context(name: str, environment=None, world=1):
    run = run_of(hardware=Hardware((Gpu(name, (8, 0), 24 << 30),) * world, cores=8), world=world)
    return context_of(run, environment or {})


@pytest.fixture
def measured(tmp_path):
    """Writes the file of an environment; returns the environment."""

    def written(content) -> dict[str, str]:
        environment = {"HF_HOME": str(tmp_path)}
        file_in(environment).parent.mkdir(parents=True, exist_ok=True)
        file_in(environment).write_text(content if isinstance(content, str) else json.dumps({"context": content}))
        return environment

    return written


def row(**changes) -> dict:
    return {"card": "A100 80GB", "torch": "2.11.0", "driver": "580.1", "several": False, "bytes": 500 * MIB, **changes}


@pytest.mark.parametrize(("card", "mib"), [("Tesla T4", 141), ("A100", 426)])
def test_a_card_that_others_have_read_takes_what_they_read(card, mib):
    found = context(card)
    assert round(found.bytes / MIB) == mib and found.source.startswith("as others read it on ")


@pytest.mark.parametrize("card", ["NVIDIA L4", "a GPU of 24 GB"])
def test_another_card_takes_the_most_that_others_read_and_says_so(card):
    found = context(card)
    assert found.bytes == 426 * MIB and found.source.startswith("the most that others read, on A100 (")


def test_of_several_measurements_here_that_of_as_many_processes_and_of_this_torch_counts(measured, monkeypatch):
    monkeypatch.setattr("recipes.planner.measured.version", lambda package: "2.11.0")
    environment = measured([row(), row(several=True, bytes=900 * MIB), row(torch="2.12.0", bytes=600 * MIB)])
    found = context("NVIDIA A100-SXM4-80GB", environment)
    assert found.bytes == 500 * MIB and found.source == "measured here with torch 2.11.0, driver 580.1"
    assert context("NVIDIA A100-SXM4-80GB", environment, world=2).bytes == 900 * MIB
    assert context("Tesla T4", environment).bytes < 500 * MIB  # another card


@pytest.mark.parametrize("content", ["[", '{"context": 3}', [{"card": "A100 80GB", "bytes": "many"}]])
def test_a_damaged_file_counts_as_not_measured(content, measured):
    assert context("NVIDIA A100-SXM4-80GB", measured(content)).bytes == 426 * MIB
