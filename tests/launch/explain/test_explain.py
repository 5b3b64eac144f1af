"""`recipes explain`: what two real ranks counted, and how the command ends."""

import subprocess
import sys

import psutil
import pytest

from launch.explain.tables import goals, measured
from tests.support.waiting import PATIENCE, wait_for


def rows(topic):
    return measured(topic, "cpu", 2)["rows"]


@pytest.mark.slow
def test_ddp_synchronises_at_each_micro_batch_except_in_no_sync():
    whole, at_each, no_sync, undivided = found = rows("accumulation")
    assert [row["synchronisations"] for row in found] == [1, 8, 1, 1]
    assert [row["sent_bytes"] / whole["sent_bytes"] for row in found] == [1, 8, 1, 1]
    assert max(at_each["difference"], no_sync["difference"]) < 1e-6
    assert undivided["gradient"] / whole["gradient"] == pytest.approx(8, rel=1e-5)
    assert all(row["peak_bytes"] < 0.9 * whole["peak_bytes"] for row in found[1:])


@pytest.mark.slow
def test_small_gradients_become_zero_in_fp16_and_a_scaler_saves_them():
    fp32, bf16, fp16, scaled = found = rows("amp")
    assert fp16["lost"] > 0.1 and scaled["lost"] < 0.01
    assert [bf16["loss"], scaled["loss"]] == pytest.approx([fp32["loss"]] * 2, abs=0.02)
    assert len({row["sent_bytes"] for row in found}) == 1  # autocast sends as much as fp32


@pytest.mark.slow
def test_gradients_accumulated_in_16_bits_match_the_full_batch_if_unscaled_before_clipping():
    *right, clipped_while_scaled = found = rows("both")
    for row, limit in zip(right, (1e-6, 1e-6, 0.02, 0.02, 0.01), strict=True):
        assert row["difference"] < limit, row["name"]
    assert {row["synchronisations"] for row in found} == {1}
    assert clipped_while_scaled["gradient"] < 1e-4 * right[-1]["gradient"]
    assert clipped_while_scaled["loss"] > right[-1]["loss"]


# --- How it ends ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_recipes_explain_names_a_killed_rank_and_ends_the_other():
    words = [sys.executable, "-m", "launch", "explain", "both"]
    with psutil.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ranks = wait_for("two ranks", lambda: len(found := process.children()) == 2 and found)
        ranks[1].kill()
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (1, "rank 1 failed: killed by SIGKILL\n")
    assert not any(rank.is_running() for rank in ranks)


# --- What is printed ------------------------------------------------------------------------------


def test_the_explain_table_shows_memory_and_speed_relative_to_row_1_and_the_noise_of_the_speed():
    first = {"goal": "", "seconds": 1.0, "off": 0.1, "peak_bytes": 100, "difference": 0.0, "synchronisations": 1}
    headings, cells = goals([first, {**first, "goal": "both", "seconds": 0.5, "off": 0.05, "peak_bytes": 60}])
    shown = {name: value for name, value, *_ in cells}
    assert headings == ["", "both"]
    assert (shown["memory"], shown["speed"]) == ("x 0.60", "x 2.00 ± 0.30")
