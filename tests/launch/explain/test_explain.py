"""`recipes explain`: what two real ranks counted, and reasons that follow from the numbers."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch.cli import main
from launch.explain.goals import goals
from launch.explain.reasons import cpu_computes_in, notes_on, reason_for
from launch.explain.topics import BOTH, TOPICS, Measured, Row
from tests.support.waiting import PATIENCE, wait_for

COMMAND = [sys.executable, "-m", "launch", "explain", "both"]


def measured(topic):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["explain", topic, "--json"]) == 0
    return json.loads(output.getvalue())


@pytest.fixture(scope="module")
def accumulation():
    return measured("accumulation")["rows"]


@pytest.fixture(scope="module")
def amp():
    return measured("amp")["rows"]


@pytest.fixture(scope="module")
def both():
    return measured("both")["rows"]


# --- Accumulation ---------------------------------------------------------------------------------


def test_ddp_synchronises_at_each_micro_batch_except_in_no_sync(accumulation):
    assert [row["synchronisations"] for row in accumulation] == [1, 8, 1, 1]


@pytest.mark.slow
def test_each_synchronisation_sends_the_whole_gradient(accumulation):
    assert [row["sent_bytes"] / accumulation[0]["sent_bytes"] for row in accumulation] == [1, 8, 1, 1]


@pytest.mark.slow
def test_the_gradient_is_the_same_with_and_without_no_sync(accumulation):
    assert max(row["difference"] for row in accumulation[:3]) < 1e-6


@pytest.mark.slow
def test_a_loss_that_is_not_divided_makes_the_gradient_as_many_times_as_large(accumulation):
    assert accumulation[3]["gradient"] / accumulation[0]["gradient"] == pytest.approx(8, rel=1e-5)


@pytest.mark.slow
def test_smaller_micro_batches_take_less_memory(accumulation):
    assert all(row["peak_bytes"] < 0.9 * accumulation[0]["peak_bytes"] for row in accumulation[1:])


# --- Mixed precision ------------------------------------------------------------------------------


@pytest.mark.slow
def test_small_gradients_become_zero_in_fp16_and_a_scaler_saves_them(amp):
    fp16, scaled = amp[2:]
    assert fp16["lost"] > 0.1 and scaled["lost"] < 0.01


@pytest.mark.slow
def test_bf16_and_scaled_fp16_train_like_fp32(amp):
    assert [amp[1]["loss"], amp[3]["loss"]] == pytest.approx([amp[0]["loss"]] * 2, abs=0.02)


@pytest.mark.slow
def test_autocast_sends_as_much_as_fp32(amp):
    assert len({row["sent_bytes"] for row in amp}) == 1


# --- Both -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_accumulation_in_16_bits_has_the_gradient_of_the_whole_batch(both):
    assert [row["difference"] < limit for row, limit in zip(both[:5], (1e-6, 1e-6, 0.02, 0.02, 0.01), strict=True)] == [
        True
    ] * 5


@pytest.mark.slow
def test_accumulation_in_16_bits_synchronises_once(both):
    assert {row["synchronisations"] for row in both} == {1}


@pytest.mark.slow
def test_clipping_a_gradient_that_is_still_scaled_leaves_almost_nothing(both):
    assert both[5]["gradient"] < 1e-4 * both[4]["gradient"] and both[5]["loss"] > both[4]["loss"]


# --- How it ends ----------------------------------------------------------------------------------


@pytest.fixture
def started():
    """The command, running, and the process ids of its two ranks."""
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for("two ranks, or the end", lambda: len(children.read_text().split()) == 2 or process.poll() is not None)
    yield process, [int(word) for word in children.read_text().split()]
    process.kill()
    process.communicate()


def has_ended(pid) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ctrl_c_ends_both_ranks(started):
    process, ranks = started
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    # One that had only just started ends by itself, once it has asked whether its parent is there.
    wait_for("the end of both", lambda: all(has_ended(rank) for rank in ranks))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_rank_that_dies_is_named(started):
    process, ranks = started
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (1, "rank 1 was killed by SIGKILL\n")
    assert all(has_ended(rank) for rank in ranks)


def test_without_a_topic_it_names_them(capsys):
    assert main(["explain"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{topic}: " in printed for topic in TOPICS)


# --- Reasons --------------------------------------------------------------------------------------

PLAIN = Row(1.0, 100, 1, 100, 2.0, 1.0, 0.0, 0.0, 0)


def reason_of(topic, index, **changes) -> str:
    """The reason for a row that differs from the first in these numbers only."""
    rows = [PLAIN] * len(TOPICS[topic].variants)
    rows[index] = replace(PLAIN, **changes)
    found = Measured("nccl", 1, 1, 5.0, "", tuple(rows))
    return reason_for(topic, TOPICS[topic].variants[index], rows[index], found)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(2.0, "takes 2.0 times as long here"), (1.01, "as fast here"), (0.5, "2.0 times as fast here")],
)
def test_bf16_is_called_faster_only_if_it_was(seconds, words):
    assert reason_of("amp", 1, seconds=seconds).endswith(words)


@pytest.mark.parametrize(("peak_bytes", "words"), [(150, "50% more"), (100, "as much"), (75, "25% less")])
def test_memory_is_called_less_only_if_it_was(peak_bytes, words):
    assert f"{words} memory" in reason_of("amp", 3, peak_bytes=peak_bytes)


@pytest.mark.parametrize(
    ("loss", "words"),
    [(None, "loss not finite instead of 2.00"), (2.0, "loss 2.00 as well"), (3.0, "loss 3.00 instead")],
)
def test_the_reason_for_an_undivided_loss_quotes_what_was_measured(loss, words):
    assert words in reason_of("accumulation", 3, loss=loss)


def goal_of(column: int, what: str, **changes) -> str:
    """A cell of the table of goals, where each variant differs from the first in these numbers."""
    rows = [replace(PLAIN, **changes) if variant.goal else PLAIN for variant in BOTH.variants]
    _, cells = goals(Measured("nccl", 1, 1, 5.0, "", tuple(rows)))
    return next(row[column] for row in cells if row[0] == what)


@pytest.mark.parametrize("column", [1, 2, 3])
def test_a_goal_is_called_reached_only_if_it_was(column):
    assert goal_of(column, "saves memory", peak_bytes=60) == "yes: 40% less memory"
    assert goal_of(column, "saves memory") == "no: as much memory"
    assert goal_of(column, "saves time", seconds=0.5) == "yes: 2.0 times as fast here"
    assert goal_of(column, "saves time", seconds=2.0) == "no: takes 2.0 times as long here"
    assert goal_of(column, "saves time", seconds=0.5, off=1.5) == "unclear: x 2.00 here, which noise can make"


@pytest.mark.parametrize(
    ("backend", "seconds", "said"), [("gloo", 2.0, True), ("gloo", 0.5, False), ("nccl", 2.0, False)]
)
def test_a_cpu_that_is_slower_in_16_bits_is_called_the_reverse_of_tensor_cores(backend, seconds, said):
    rows = [replace(PLAIN, seconds=seconds) if variant.dtype != "fp32" else PLAIN for variant in BOTH.variants]
    notes = notes_on(BOTH, Measured(backend, 1, 1, 5.0, "", tuple(rows)))
    assert any("reverse of tensor cores: bf16, 1 micro-batch of 8 takes" in note for note in notes) is said


@pytest.mark.parametrize(
    ("flags", "known"), [({"avx2"}, False), ({"avx512_bf16"}, True), ({"amx_bf16", "avx2"}, True), (set(), None)]
)
def test_a_cpu_computes_in_bf16_if_it_says_so(flags, known):
    assert cpu_computes_in("bf16", frozenset(flags)) is known
