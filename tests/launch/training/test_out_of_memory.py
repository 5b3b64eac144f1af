"""A training runs out of memory: what it reports, and how it resumes at the same global batch."""

import json
import re
import sys

import pytest
import torch

from launch.host import memory
from launch.training.failure import next_attempt
from recipes.run import here, resolve, with_flags
from tests.support.running import ROOT, launch_quickly, losses, run
from tests.support.wide import LENGTH, imported_gb, texts_of, wide_model

LONG = LENGTH // 2
AMONG_8 = 1.75  # GB that a micro-batch of 8 with one long text exceeds, and one of 4 does not
AMONG_4 = 1.05  # GB that one of 4 exceeds as well
STEPS = "--max_steps 8 --save_steps 1 --logging_steps 1 --learning_rate 1e-3 --global_batch_size 8"


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    """A model and 64 texts, the 45th of which is long: it comes in the sixth step, and to the last
    of two ranks.
    """
    folder = tmp_path_factory.mktemp("wide")
    model, data = wide_model(folder / "model"), texts_of(folder / "texts.jsonl", [16] * 44 + [LONG] + [16] * 19)
    words = f"--model_name_or_path {model} --dataset_name {data} --max_length {LONG} {STEPS}"
    return [*words.split(), "--train_sampling_strategy", "sequential", "--per_device_train_batch_size"]


# --- The report ----------------------------------------------------------------------------------


def test_the_out_of_memory_report_names_the_limit_the_checkpoint_and_the_next_micro_batch(flags, tmp_path):
    limited = ["--recipe", "standard", *flags, "8", "--memory_limit", str(AMONG_8)]
    outcome = launch_quickly(*limited, output=tmp_path, processes=1, config="single.yaml")
    assert (outcome.code, outcome.record["status"]) == (1, "out_of_memory") and "Traceback" not in outcome.output
    said = r"^out of memory after step 5, within --memory_limit [\d.]+: .*you tried to allocate \d+ bytes"
    assert re.search(said, outcome.output, flags=re.M), outcome.output
    assert re.search(r"^measured  a peak of [\d.]+ \wiB", outcome.output, flags=re.M)
    assert f"saved     {tmp_path / 'checkpoint-5'}" in outcome.output
    assert "micro-batch 4 at the same global batch, from that checkpoint: the same command with " in outcome.output


@pytest.mark.slow
def test_only_the_rank_that_runs_out_of_memory_reports_the_failure(flags, tmp_path):
    limited = ["--recipe", "standard", *flags, "4", "--memory_limit", str(AMONG_4)]
    outcome = launch_quickly(*limited, output=tmp_path, processes=2)
    assert (outcome.code, outcome.record["status"]) == (1, "out_of_memory"), outcome.output
    assert "rank 1: out of memory after step 5" in outcome.output and outcome.output.count("out of memory") == 1
    assert "another rank failed" in outcome.output and "micro-batch 2 at the same global batch" in outcome.output
    note = json.loads((tmp_path / "out_of_memory.json").read_text())
    assert (note["rank"], note["step"], note["next"]) == (1, 5, {"per_device_train_batch_size": 2})
    assert note["checkpoint"] == str(tmp_path / "checkpoint-5") and 0 < note["peak_bytes"] < AMONG_4 * 1.1e9


# --- The next attempt ----------------------------------------------------------------------------


@pytest.mark.slow
def test_on_oom_next_of_submit_local_resumes_with_a_smaller_micro_batch_and_the_same_losses(flags, tmp_path):
    limit = str(round(imported_gb() + 1.19, 2))
    ours = [*flags, "8", "--memory_limit", limit, "--fresh", "--output_dir", str(tmp_path / "out")]
    words = [sys.executable, "-m", "launch", "submit", "local", "--recipe", "baseline", "--on_oom", "next", "--", *ours]
    done = run(words, tmp_path / "out", cwd=ROOT)
    assert (done.code, done.record["status"]) == (0, "finished"), done.output
    assert "out of memory: retrying with batch 4 x 2 x 1 = 8: --per_device_train_batch_size 4" in done.output
    assert done.output.count("out of memory after step 5") == 1 and "checkpoint-5, step 5" in done.output
    assert not (tmp_path / "out" / "out_of_memory.json").exists()
    whole = {"output": tmp_path / "whole", "processes": 1, "config": "single.yaml"}
    undisturbed = launch_quickly("--recipe", "baseline", *flags, "8", **whole)
    assert losses(done) == pytest.approx(losses(undisturbed), rel=1e-5)
    assert len(losses(done)) == 8


def ladder(argv: list[str], **world) -> list[dict]:
    """Every attempt after a run that runs out of memory again and again."""
    attempts = []
    while (flags := next_attempt(resolve(argv, here(**world)), argv)) and len(attempts) < 20:
        attempts.append(flags)
        argv = with_flags(argv, flags)
    return attempts


def test_attempts_after_out_of_memory_shrink_the_micro_batch_then_add_gradient_checkpointing():
    attempts = ladder(["--global_batch_size", "12", "--per_device_train_batch_size", "6"])
    assert [attempt["per_device_train_batch_size"] for attempt in attempts] == [4, 3, 2, 1, 1]
    assert [attempt.get("gradient_checkpointing") for attempt in attempts] == [None] * 4 + [True]
    attempts = ladder(["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3"], world_size=2)
    sizes = [(one["per_device_train_batch_size"], one["gradient_accumulation_steps"]) for one in attempts]
    assert sizes == [(3, 4), (2, 6), (1, 12), (1, 12)]  # an accumulation that was written down follows


def test_a_retry_after_out_of_memory_omits_fresh_and_fit_and_resume_from_checkpoint(tmp_path):
    (tmp_path / "run.yaml").write_text("fit: true\n")
    argv = ["--config", str(tmp_path / "run.yaml"), "--fresh", "--resume_from_checkpoint", "elsewhere/checkpoint-3"]
    run = resolve(with_flags(argv, next_attempt(resolve(argv), argv)))
    assert (run["fresh"], run["fit"], run["resume_from_checkpoint"], run.batch.micro) == (False, False, None, 2)


# --- How it is recognised ------------------------------------------------------------------------


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: bytearray(1 << 60)])
def test_failed_allocations_of_torch_and_python_are_recognised_as_out_of_memory(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate()
    assert memory.ran_out(raised.value)
