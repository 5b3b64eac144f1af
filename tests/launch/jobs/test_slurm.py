"""Runs on a real Slurm: a private cluster of two nodes, started here, used as a user would."""

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.hostile import HOSTILE, received, script_that_prints_its_words
from tests.support.running import Outcome, losses, read_record, train_here
from tests.support.slow_model import write_slow_model
from tests.support.slurm import NEEDS_SLURM, Cluster, log, recipes, submit, wait_for_step

pytestmark = NEEDS_SLURM

STEPS = "--learning_rate 1e-3 --logging_steps 1 --save_steps 1000 --max_length 64".split()


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, texts, tmp_path_factory):
    """40 steps in one process, never stopped."""
    return train_here(tiny_model, texts, tmp_path_factory.mktemp("whole"), *STEPS[:-2], "--max_steps", "40")


def ranks_in(folder) -> list[int]:
    """The processes of train.py whose current folder this is, by the time they started."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "create_time", "environ"]):
        info = process.info
        if info["cwd"] == str(folder) and "LOCAL_RANK" in (info["environ"] or {}):
            found.append((info["create_time"], process.pid))
    return [pid for _, pid in sorted(found)]


def finished(folder) -> Outcome:
    record = read_record(folder / "run")
    assert record["status"] == "finished", log(folder)
    return Outcome(0, log(folder), record)


@pytest.fixture(scope="module")
def preempted(cluster, slow_flags, tmp_path_factory):
    """The folder of a run of two nodes that a job of higher priority interrupted, and its job."""
    folder = tmp_path_factory.mktemp("preempted")
    job, outcome = submit(cluster, folder, "--nodes", "2", "--partition", "low", "--", *slow_flags)
    wait_for_step(cluster, folder, 5)
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3")
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", log(folder)
    return folder, job, outcome


def test_a_job_of_two_nodes_trains(cluster, tiny_model, texts, tmp_path):
    flags = ["--model_name_or_path", str(tiny_model), "--dataset_name", str(texts), "--max_length", "64"]
    job, _ = submit(cluster, tmp_path, "--nodes", "2", "--", *flags, "--max_steps", "2", "--output_dir", "run")
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", log(tmp_path)
    assert finished(tmp_path).record["world_size"] == 2


@pytest.mark.slow
def test_what_is_submitted_is_named_with_its_log(preempted):
    folder, job, outcome = preempted
    assert (
        outcome.code == 0
        and f"scancel {job}" in outcome.output
        and str(folder / f"standard-{job}.log") in outcome.output
    )


@pytest.mark.slow
def test_two_nodes_are_one_world_and_train_what_one_process_trains(preempted, uninterrupted):
    assert finished(preempted[0]).record["world_size"] == 2
    assert losses(finished(preempted[0])) == pytest.approx(losses(uninterrupted), rel=1e-4)


@pytest.mark.slow
def test_a_preempted_run_is_requeued_and_goes_on(preempted):
    assert "told to stop by SIGTERM at step" in log(preempted[0]) and "resuming from" in log(preempted[0])


@pytest.mark.slow
def test_a_time_limited_run_is_requeued_until_it_is_done(cluster, tiny_model, texts, tmp_path):
    # Slurm's shortest limit is a minute: at most 9 steps of 6 seconds; the third start is quick.
    model = write_slow_model(tmp_path / "slow", tiny_model, 3.0, restarts=2)
    flags = [*model, "--dataset_name", str(texts), *STEPS, "--max_steps", "20", "--output_dir", str(tmp_path / "run")]
    job, _ = submit(
        cluster, tmp_path, "--nodes", "2", "--time", "1", "--signal_seconds", "5", "--max_restarts", "20", "--", *flags
    )
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT") == "COMPLETED", log(tmp_path)
    assert log(tmp_path).count("requeued, restart") >= 2
    whole = train_here(tiny_model, texts, tmp_path / "whole", *STEPS[:-2], "--max_steps", "20")
    assert losses(finished(tmp_path)) == pytest.approx(losses(whole), rel=1e-4)


@dataclass
class Cancelled:
    """A run of two nodes, cancelled after its third step, and what the commands printed."""

    folder: Path
    job: str
    submitted: str
    refused: Outcome
    running: str
    followed: str
    ended: str


@pytest.fixture(scope="module")
def cancelled(cluster, slow_flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cancelled")
    job, outcome = submit(cluster, folder, "--nodes", "2", "--", *slow_flags)
    second, refused = submit(cluster, folder, "--", *slow_flags)
    assert second == ""
    wait_for_step(cluster, folder, 3)
    running = recipes(cluster, folder, "status", "run").output
    cluster.run("scancel", job)
    followed = recipes(cluster, folder, "logs", "-f", "run").output
    ended = recipes(cluster, folder, "status", "run").output
    return Cancelled(folder, job, outcome.output, refused, running, followed, ended)


@pytest.mark.slow
def test_a_cancelled_run_has_saved_and_stays_cancelled(cluster, cancelled):
    assert cluster.wait_for(cancelled.job, "COMPLETED", "CANCELLED") == "CANCELLED"
    run = cancelled.folder / "run"
    cluster.wait_until("the run's record", lambda: read_record(run).get("status") == "preempted")
    assert "requeued" not in log(cancelled.folder)


@pytest.mark.slow
def test_a_run_is_found_again(cancelled):
    assert "recipes logs -f run" in cancelled.submitted
    assert f"slurm {cancelled.job}" in cancelled.running and "RUNNING" in cancelled.running
    assert "step" in cancelled.running
    assert "told to stop by SIGTERM at step" in cancelled.followed
    assert "CANCELLED, preempted" in cancelled.ended


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(cancelled):
    refused = cancelled.refused
    assert refused.code == 2 and f"job {cancelled.job} is still running and writes to run" in refused.output


@pytest.mark.slow
def test_a_run_that_fails_is_not_requeued(cluster, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"a": "b"}')
    job, _ = submit(cluster, tmp_path, "--", "--dataset_name", str(tmp_path / "bad.jsonl"))
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED"
    assert "error  dataset_" in log(tmp_path)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--partition nowhere", "invalid partition specified: nowhere"),
        ("--constraint a100", "Invalid feature specification"),
        ("--gpus_per_node gpu:2", "Requested node configuration is not available"),
        ("--time 8h", "Invalid --time specification"),
        ("--mem 64GiB", "Invalid --mem specification"),
    ],
)
def test_what_slurm_refuses_is_its_own_sentence_in_one_line(flags, what, cluster, tmp_path):
    job, outcome = submit(cluster, tmp_path, *flags.split())
    assert (job, outcome.code) == ("", 2)
    assert "Slurm says: " in outcome.output and what in outcome.output


def test_a_silent_controller_is_one_line(cluster, tmp_path):
    conf = (cluster.folder / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", conf) + "MessageTimeout=2\n")
    silent = Cluster.__new__(Cluster)
    silent.environment = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    _, outcome = submit(silent, tmp_path)
    assert outcome.code == 2 and "scontrol ping" in outcome.output.splitlines()[-1]


@pytest.mark.slow
def test_arguments_arrive_as_they_were_typed(cluster, tmp_path):
    file = tmp_path / "job.sh"
    file.write_text(script_that_prints_its_words("slurm", HOSTILE, tmp_path))
    job = cluster.run("sbatch", "--parsable", f"--output={tmp_path}/out.log", str(file)).strip()
    cluster.wait_for(job, "COMPLETED", "FAILED")
    assert received(tmp_path) == HOSTILE


@pytest.mark.slow
def test_a_single_process_of_another_environment_may_be_told_by_sigusr1(cluster, slow_flags, tmp_path):
    """accelerate's own launcher dies of it, and Slurm then ends the step."""
    job, _ = submit(cluster, tmp_path, "--recipe", "baseline", "--venv", sys.prefix, "--", *slow_flags)
    wait_for_step(cluster, tmp_path, 2)
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED", log(tmp_path)
    assert "told to stop by SIGUSR1 at step" in log(tmp_path) and "Exited with exit code 75" in log(tmp_path)
    assert read_record(tmp_path / "run")["status"] == "preempted"


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_on_every_node(cluster, slow_flags, tmp_path):
    """Otherwise the other node would wait for it in a collective, for half an hour and more."""
    job, _ = submit(cluster, tmp_path, "--nodes", "2", "--", *slow_flags)
    wait_for_step(cluster, tmp_path, 3)
    os.kill(ranks_in(tmp_path)[1], signal.SIGKILL)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED", log(tmp_path)
    assert "requeued" not in log(tmp_path) and "step 40/" not in log(tmp_path)
    cluster.wait_until("the end of the other rank", lambda: not ranks_in(tmp_path))
