"""The benchmarks' own arithmetic, and two of their measurements on this CPU."""

import pytest
from transformers import LlamaConfig

from tests.benchmarks import estimators, saving
from tests.gpu import memory

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2}
SMALL = LlamaConfig(**SHAPE, vocab_size=1000)
LAYER = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
TABLE, NORM, ROTARY = 1000 * 64, 64, 2 * 16


@pytest.mark.parametrize(("precision", "for_each"), [("float32", 16), ("bfloat16", 8)])
def test_accelerate_estimates_the_model_without_its_head(precision, for_each):
    assert estimators.by_accelerate(SMALL, precision) == for_each * (2 * LAYER + TABLE + NORM + ROTARY)


def test_deepspeed_gets_every_parameter_and_the_largest_module():
    assert estimators.parameters(SMALL) == (2 * LAYER + 2 * TABLE + NORM, TABLE)


def test_deepspeed_estimates_states_only():
    pytest.importorskip("deepspeed")
    total = 2 * LAYER + 2 * TABLE + NORM
    assert estimators.by_deepspeed(SMALL, 2, gpus=4) == (2 * total, 24 * total)
    assert estimators.by_deepspeed(SMALL, 3, gpus=4) == (4 * TABLE, 27 * total)


def test_what_cannot_be_planned_says_why():
    illegal = estimators.Training("100M", "standard", 1, 1, 64, {"packing": True, "padding_free": True})
    *_, ours = estimators.compared(illegal)
    assert "packing" in ours


# --- Memory on a GPU ------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserved", "holds"), [(1053, True), (1054, False)])
def test_the_context_is_no_allocation_but_has_to_fit_with_the_margin(reserved, holds):
    plan = {"components": {"context": 60, "cached": 40}, "total": 1050}
    found = memory.compared({**plan, "allocated": 1000, "reserved": reserved, "outside_torch": 60})
    assert (found["difference"], found["holds"]) == (pytest.approx(-0.05), holds)


def test_what_cannot_be_planned_is_measured_all_the_same():
    assert "planned" not in memory.compared({"not_planned": "is not planned yet", "allocated": 1000})


@pytest.mark.slow
def test_accumulated_gradients_exist_beside_the_buckets_that_views_would_spare():
    case = memory.Case("llama", "tiny", "fast", 2, 64, accumulation=2)
    tries = (memory.measured_apart(case)["difference"] for _ in range(3))  # a busy rank may release buckets late
    assert any(abs(difference) < 0.01 for difference in tries)


# --- A save ---------------------------------------------------------------------------------------


def test_trainers_part_of_a_save_is_measured(tmp_path, monkeypatch):
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(saving, "SHAPE", tiny)
    rounds = saving.measured(2, tmp_path)
    assert len(rounds) == 2 and all(0 < each.trainers < each.waited for each in rounds)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-2"}
    assert "GB/s from memory" in saving.speed(tmp_path / "checkpoint-2")
