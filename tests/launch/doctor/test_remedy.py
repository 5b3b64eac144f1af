"""After a failure between ranks: the same again, then switches, and none after an accident."""

import pytest

from launch.doctor import remedy
from launch.doctor.network import Meeting
from launch.doctor.probe import STAGES, StageFailure
from tests.support.doctor import requested

REFUSED = StageFailure("connection", "rank 1: refused", "look")
KILLED = StageFailure("connection", "rank 1 was killed by SIGKILL", "find what kills", by_signal=True)
BROKEN = StageFailure("start", "rank 1: ImportError", "install it")


@pytest.fixture
def probe_runs(monkeypatch):
    """Replaces probe runs: each fails unless `works(number, switches)`. Returns what was tried."""

    def replace(works, failure=REFUSED):
        tried = []

        def run(request, stages, port, chosen=()):
            tried.append(tuple(name for name, _ in chosen))
            return [], None if works(len(tried) - 1, tried[-1]) else failure

        monkeypatch.setattr(remedy, "probe_run", run)
        return tried

    return replace


def found():
    """The only check of the ranks, None if there is none."""
    return next(remedy.examine(Meeting(requested(gpus=2)), []), None)


@pytest.mark.parametrize(
    ("works", "failure", "says", "runs"),
    [
        (lambda number, _: number > 0, REFUSED, "run the doctor again", 2),  # again, and it works: no switch
        (lambda number, _: number > 0, KILLED, "run the doctor again", 2),
        (lambda number, _: number > 1, REFUSED, "now and then", 4),
        (lambda *_: False, KILLED, KILLED.fix, 2),
        (lambda *_: False, BROKEN, BROKEN.fix, 1),  # not a link
        (lambda *_: False, REFUSED, "sets of NCCL or gloo variables helped; look", None),
    ],
    ids=["once", "killed once", "now and then", "killed again", "not a link", "nothing mends"],
)
def test_a_failure_that_no_nccl_variable_fixes_is_reported_without_a_variable(works, failure, says, runs, probe_runs):
    tried = probe_runs(works, failure)
    check = found()
    assert check.status == "error" and failure.what in check.found and says in check.fix
    assert "export" not in check.fix and (runs is None or len(tried) == runs)
    assert ("failed 1 of 2 tries" in check.found) == (says == "run the doctor again")


def test_a_doctor_probe_that_succeeds_is_not_repeated(probe_runs):
    tried = probe_runs(lambda *_: True)
    assert found() is None and tried == [()]


def test_a_repeated_failure_is_reported_with_the_nccl_variable_that_fixes_it(probe_runs):
    tried = probe_runs(lambda _, names: names == ("NCCL_P2P_DISABLE",))
    check = found()
    assert check.found == REFUSED.what and "export NCCL_P2P_DISABLE=1  # turns off NVLink" in check.fix
    assert tried[2] == ("NCCL_NVLS_ENABLE",) and tried[-1] == ()  # the control, without it


def test_nccl_variables_that_fix_a_failure_only_together_are_all_advised(probe_runs):
    tried = probe_runs(lambda _, names: len(names) > 1)
    lines = found().fix.splitlines()[1:]
    assert [line.split("=")[0] for line in lines] == [f"export {name}" for name in tried[-2]]


def test_the_doctor_tries_no_nccl_variables_once_the_doctors_own_timeout_is_over(probe_runs):
    tried = probe_runs(lambda *_: False)
    meeting = Meeting(requested("--timeout", "1", gpus=2))
    object.__setattr__(meeting.request, "began", meeting.request.began - 2)
    assert [check.found for check in remedy.examine(meeting, [])] == [REFUSED.what] and len(tried) == 1


def test_the_doctor_reports_the_failure_that_caused_the_failures_on_other_nodes():
    said = [
        {"failure": {"stage": "connection", "what": "rank 0: closed by peer", "fix": "", "by_another": True}},
        {"failure": vars(BROKEN)},
        {"failure": None},
    ]
    words = "--nodes 3 --main_process_ip n0 --machine_rank 2"
    meeting = Meeting(requested(*words.split(), gpus=1))
    meeting.exchange = lambda *_, **__: [{**one, "failed": False} for one in said]
    assert remedy._Attempts(meeting, STAGES).worst(None).what == "on node 1: rank 1: ImportError"
