"""The benchmarks' own arithmetic, and two of their measurements on this CPU."""

import pytest

from tests.benchmarks import plan_time, saving
from tests.gpu import memory


def rounds(*seconds, peak=10**8):
    return [{"plan": one, "cpu": one, "imports": 2.0, "bytes": peak} for one in seconds]


def test_the_median_round_is_compared_with_the_target():
    def is_met(every, one, refusals=(0.3, 0.5, 4.0)):
        return plan_time.is_met({"every recipe": every, "sharded": one, "a refusal": [{"plan": s} for s in refusals]})

    assert is_met(rounds(1.0, 4.9, 30.0), rounds(1.0, 2.9, 30.0))
    assert not is_met(rounds(1.0, 5.0, 5.1), rounds(1.0))
    assert not is_met(rounds(1.0), rounds(1.0, 3.0, 3.1))
    assert not is_met(rounds(1.0), rounds(1.0), refusals=(0.9, 1.0, 1.1))
    assert not is_met(rounds(1.0, peak=10**9), rounds(1.0))
    report = plan_time.report("every recipe", rounds(1.0, 4.9, 30.0))
    assert "4.90 s (median of 3, from 1.00 to 30.00;" in report and "4.90 s of CPU" in report


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
