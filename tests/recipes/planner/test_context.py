"""The CUDA context: measured here, as others read it on such a card, or the most they read."""

import json

import pytest

from recipes.planner.context import context_of
from recipes.planner.measured import file_in
from recipes.run.hardware import Gpu, Hardware
from tests.recipes.planner.small import planned, run_of

MIB = 2**20
NAMES = {"T4": "Tesla T4", "RTX 3090": "NVIDIA GeForce RTX 3090", "A100": "NVIDIA A100-SXM4-80GB"}


def context(name: str, environment=None, world=1):
    run = run_of(hardware=Hardware((Gpu(name, (8, 0), 24 << 30),) * world, cores=8), world=world)
    return context_of(run, environment or {})


def measured(folder, *rows) -> dict[str, str]:
    """An environment in which these rows were measured."""
    environment = {"HF_HOME": str(folder)}
    file_in(environment).parent.mkdir(parents=True, exist_ok=True)
    file_in(environment).write_text(json.dumps({"context": rows}))
    return environment


def row(**changes) -> dict:
    return {"card": "A100 80GB", "torch": "2.11.0", "driver": "580.1", "several": False, "bytes": 500 * MIB, **changes}


@pytest.mark.parametrize(("card", "mib"), [("T4", 141), ("RTX 3090", 292), ("A100", 426)])
def test_a_card_that_others_have_read_takes_what_they_read(card, mib):
    for name in (NAMES[card], card):
        found = context(name)
        assert round(found.bytes / MIB) == mib and found.low == found.high == found.bytes
        assert [reading.startswith(f"{card}: ") for reading in found.readings] == [True]


@pytest.mark.parametrize("card", ["NVIDIA L4", "NVIDIA H100 80GB HBM3", "a GPU of 24 GB"])
def test_another_card_takes_the_most_of_a_range_and_says_so(card):
    found = context(card)
    assert found.low < found.high == found.bytes == 426 * MIB
    assert "141 to 426" in found.source and len(found.readings) == 3


def test_what_was_measured_here_goes_first(tmp_path):
    environment = measured(tmp_path, row())
    found = context(NAMES["A100"], environment)
    assert found.bytes == 500 * MIB and found.source == "measured here with torch 2.11.0, driver 580.1"
    assert context(NAMES["T4"], environment).bytes < 500 * MIB  # another card


def test_of_several_measurements_that_of_as_many_processes_and_of_this_torch_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.planner.measured.version", lambda package: "2.11.0")
    rows = (row(), row(several=True, bytes=900 * MIB), row(torch="2.12.0", bytes=600 * MIB))
    environment = measured(tmp_path, *rows)
    assert context(NAMES["A100"], environment).bytes == 500 * MIB
    assert context(NAMES["A100"], environment, world=2).bytes == 900 * MIB


@pytest.mark.parametrize(
    "content",
    ["", "[", '{"context": 3}', '{"context": [{"card": "A100 80GB", "bytes": "many"}]}'],
)
def test_a_damaged_file_counts_as_not_measured(content, tmp_path):
    environment = measured(tmp_path)
    file_in(environment).write_text(content)
    assert context(NAMES["A100"], environment).bytes == 426 * MIB


def test_the_plan_holds_the_context_and_where_it_comes_from():
    plan = planned(gpu="T4", gpu_memory=None, recipe="standard")
    assert plan.recipes[0].components.context == plan.context.bytes
    assert plan.context.source == "as others read it on T4"
