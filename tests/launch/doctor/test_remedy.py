"""After a failure between ranks: the same again, then switches, and none after an accident."""

import signal

import pytest

from launch.doctor import remedy
from launch.doctor.command import TIMEOUT
from launch.doctor.failures import StageFailure, failure_in
from launch.doctor.meeting import Meeting
from launch.doctor.ranks import Report
from tests.support.doctor import requested

REFUSED = StageFailure("connection", "rank 1: refused", "look", of_link=True)
KILLED = StageFailure("connection", "rank 1 was killed by SIGKILL", "find what kills", by_signal=True)
BROKEN = StageFailure("start", "rank 1: ImportError", "install it")


@pytest.fixture
def probe_runs(monkeypatch):
    """Replaces probe runs: each fails unless `works(number, switches)`. Returns what was tried."""

    def replace(works, failure=REFUSED, seconds=0):
        tried = []

        def run(request, stages, chosen=(), attempt=0):
            tried.append(tuple(switch.name for switch in chosen))
            return None if works(attempt, tried[-1]) else failure

        monkeypatch.setattr(remedy, "probe_run", run)
        monkeypatch.setattr(remedy, "failure_in", lambda request, found, kills: found)
        return tried

    return replace


def diagnosed(failure, *words, gpus=2):
    return remedy.diagnosed(Meeting(requested(*words, gpus=gpus)), failure)


def test_a_success_needs_no_second_run(probe_runs):
    tried = probe_runs(lambda *_: True)
    assert diagnosed(None) is None and not tried


@pytest.mark.parametrize("failure", [REFUSED, KILLED])
def test_what_works_when_tried_again_gets_no_switch(failure, probe_runs):
    tried = probe_runs(lambda *_: True)
    check = diagnosed(failure)
    assert (check.status, check.found) == ("error", f"failed once of two: {failure.what}")
    assert tried == [()] and "export" not in check.fix


def test_what_fails_again_gets_the_switch_without_which_it_fails(probe_runs):
    tried = probe_runs(lambda _, names: names == ("NCCL_P2P_DISABLE",))
    check = diagnosed(REFUSED)
    assert check.found == REFUSED.what and "export NCCL_P2P_DISABLE=1  # costs: " in check.fix
    assert tried[0] == tried[-1] == ()  # the same again before, and after


def test_what_fails_now_and_then_gets_no_switch(probe_runs):
    probe_runs(lambda attempt, _: attempt > 1)
    check = diagnosed(REFUSED)
    assert "export" not in check.fix and "now and then" in check.fix


def test_a_rank_that_is_killed_again_gets_no_switch(probe_runs):
    tried = probe_runs(lambda *_: False, KILLED)
    assert diagnosed(KILLED).fix == KILLED.fix and tried == [()]


def test_what_cannot_be_an_accident_is_not_tried_again(probe_runs):
    tried = probe_runs(lambda *_: True)
    assert diagnosed(BROKEN).found == BROKEN.what and not tried


def test_without_time_nothing_is_tried(probe_runs):
    tried = probe_runs(lambda *_: True)
    meeting = Meeting(requested("--timeout", "1", gpus=2))
    object.__setattr__(meeting.request, "began", meeting.request.began - 2)
    assert remedy.diagnosed(meeting, REFUSED).found == REFUSED.what and not tried


# --- What became of the ranks ---------------------------------------------------------------------


def outcome(**rank_1) -> StageFailure:
    """The failure of a probe run of which rank 1 ended so, while rank 0 waited."""
    reports = [Report(0, "connection"), Report(1, **{"stage": "connection", **rank_1})]
    return failure_in(requested(), reports, rank_1.pop("oom_kills", 0))


@pytest.mark.parametrize(
    ("rank", "words", "advice"),
    [
        ({"state": "T"}, "a signal has stopped it", "kill -CONT"),
        ({"state": "t"}, "a debugger has stopped it", "gdb"),
        ({"state": "D"}, "waits inside the kernel", "dmesg"),
        ({"code": -signal.SIGKILL}, "not by the kernel", "scheduler"),
        ({"code": -signal.SIGXCPU}, "CPU time is used up", "ulimit -t unlimited"),
        ({"code": -signal.SIGSEGV, "error": "in File a.py"}, "SIGSEGV: in File a.py", "reinstall torch"),
    ],
)
def test_stopped_held_and_dead_ranks_are_told_apart(rank, words, advice):
    found = outcome(**rank)
    assert words in found.what and advice in found.fix


def test_what_the_kernel_killed_for_lack_of_memory_is_said():
    reports = [Report(0, "connection"), Report(1, "connection", code=-signal.SIGKILL)]
    assert "because memory ran out" in failure_in(requested(), reports, oom_kills=1).what


def test_a_run_that_was_only_slow_has_not_failed():
    reports = [Report(rank, "start", out_of_time=True) for rank in range(2)]
    found = failure_in(requested(), reports)
    assert "nothing has failed" in found.what and f"--timeout {4 * TIMEOUT}" in found.fix and not found.of_link
