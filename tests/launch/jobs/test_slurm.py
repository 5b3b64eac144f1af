"""Runs on a real Slurm: a private cluster of two nodes, started here, used as a user would.

Apptainer is not installed here: a stand-in runs the command on the PATH of an image.
"""

import json
import os
import signal
import sys

import psutil
import pytest

from tests.support.running import Outcome, losses, read_record, train_here
from tests.support.slow_model import write_slow_model
from tests.support.slurm import NEEDS_SLURM, Cluster, log, recipes, submit

pytestmark = NEEDS_SLURM

STEPS = "--learning_rate 1e-3 --logging_steps 1 --save_steps 1000 --max_length 64".split()
APPTAINER = """\
#!/bin/bash
echo "$*" >> {site}/note
while [[ $1 != *.sif ]]; do shift; done
shift
PATH={site}/image:/usr/bin:/bin exec "$@"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def slow_flags(tiny_model, texts, tmp_path_factory):
    """40 steps of a second each, when two nodes share the global batch."""
    model = write_slow_model(tmp_path_factory.mktemp("slow") / "model", tiny_model, 0.5)
    return [*model, "--dataset_name", str(texts), *STEPS, "--max_steps", "40", "--output_dir", "run"]


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
    assert (record["status"], record["world_size"]) == ("finished", 2), log(folder)
    return Outcome(0, log(folder), record)


# --- Preempted by a job of higher priority, and requeued, also in containers ----------------------


@pytest.fixture(scope="module", params=["", "/images/training.sif"])
def preempted(request, cluster, slow_flags, tmp_path_factory):
    """A run of two nodes: its folder and submission. With a container, the site file names it."""
    site = tmp_path_factory.mktemp("site")
    variables = {"XDG_CONFIG_HOME": str(site), "HF_HOME": f"{site}/hf"}
    if request.param:
        for name in ("bin", "image", "mine", "accelerate-recipes"):
            (site / name).mkdir()
        (site / "bin" / "apptainer").write_text(APPTAINER.format(site=site))
        (site / "image" / "python3").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        for tool in ("bin/apptainer", "image/python3"):
            (site / tool).chmod(0o755)
        variables["PATH"] = f"{site}/bin:{os.environ['PATH']}"
        flags = {"partition": "low", "container_image": request.param, "container_mounts": str(site / "mine")}
        (site / "accelerate-recipes" / "site.yaml").write_text(json.dumps({"slurm": flags}))
    (site / "work").mkdir()
    words = ["--nodes", "2", "--time", "1:00:00", "--", *slow_flags]
    job, outcome = submit(cluster, site / "work", *words, **variables)
    cluster.wait_for_step(site / "work", 5)
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3")
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", log(site / "work")
    assert not request.param or f"{site}/mine:{site}/mine" in (site / "note").read_text()
    return site / "work", outcome


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, texts, tmp_path_factory):
    """40 steps in one process, never stopped."""
    return train_here(tiny_model, texts, tmp_path_factory.mktemp("whole"), *STEPS[:-2], "--max_steps", "40")


@pytest.mark.slow
def test_a_preempted_slurm_job_is_requeued_and_has_the_losses_of_an_uninterrupted_process(preempted, uninterrupted):
    folder, submitted = preempted
    assert losses(finished(folder)) == pytest.approx(losses(uninterrupted), rel=1e-4)
    text = log(folder)
    assert "told to stop by SIGTERM at step" in text and "resuming from" in text
    assert "scancel " in submitted.output and str(next(folder.glob("standard-*.log"))) in submitted.output


@pytest.mark.slow
def test_a_slurm_job_is_requeued_at_each_time_limit_until_training_is_finished(cluster, tiny_model, texts, tmp_path):
    # Slurm's shortest limit is a minute: at most 9 steps of 6 seconds; the third start is quick.
    model = write_slow_model(tmp_path / "slow", tiny_model, 3.0, restarts=2)
    flags = [*model, "--dataset_name", str(texts), *STEPS, "--max_steps", "20", "--output_dir", str(tmp_path / "run")]
    limits = "--nodes 2 --time 1 --signal_seconds 5 --max_restarts 20".split()
    job, _ = submit(cluster, tmp_path, *limits, "--", *flags)
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT") == "COMPLETED", log(tmp_path)
    assert log(tmp_path).count("requeueing, restart") >= 2
    whole = train_here(tiny_model, texts, tmp_path / "whole", *STEPS[:-2], "--max_steps", "20")
    assert losses(finished(tmp_path)) == pytest.approx(losses(whole), rel=1e-4)


# --- Ended in other ways --------------------------------------------------------------------------


@pytest.mark.slow
def test_status_and_logs_follow_a_slurm_job_until_scancel_after_which_it_is_not_requeued(cluster, slow_flags, tmp_path):
    job, submitted = submit(cluster, tmp_path, "--nodes", "2", "--", *slow_flags)
    second, refused = submit(cluster, tmp_path, "--", *slow_flags)
    assert (second, refused.code) == ("", 2)
    assert f"job {job} is writing to run" in refused.output
    cluster.wait_for_step(tmp_path, 3)
    running = recipes(cluster, tmp_path, "status", "run").output
    assert "recipes logs -f run" in submitted.output
    assert f"slurm {job}" in running and "RUNNING" in running and "step" in running
    cluster.run("scancel", job)
    assert "told to stop by SIGTERM at step" in recipes(cluster, tmp_path, "logs", "-f", "run").output
    assert "CANCELLED, preempted" in recipes(cluster, tmp_path, "status", "run").output
    assert cluster.wait_for(job, "COMPLETED", "CANCELLED") == "CANCELLED"
    assert "requeued" not in log(tmp_path)


@pytest.mark.slow
def test_a_killed_rank_ends_the_slurm_job_on_every_node(cluster, slow_flags, tmp_path):
    """Otherwise the other node would wait for it in a collective, for half an hour and more."""
    job, _ = submit(cluster, tmp_path, "--nodes", "2", "--", *slow_flags)
    cluster.wait_for_step(tmp_path, 3)
    os.kill(ranks_in(tmp_path)[1], signal.SIGKILL)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED", log(tmp_path)
    assert "requeued" not in log(tmp_path) and "step 40/" not in log(tmp_path)
    cluster.wait_until("the end of the other rank", lambda: not ranks_in(tmp_path))


def test_a_job_that_slurm_refuses_is_reported_with_slurms_own_message(cluster, tmp_path):
    job, outcome = submit(cluster, tmp_path, "--partition", "nowhere")
    assert (job, outcome.code) == ("", 2)
    assert "Slurm reports: " in outcome.output and "invalid partition specified: nowhere" in outcome.output
