"""`python -m tests.gpu`: its cases, with tiny models on this CPU."""

import json
from pathlib import Path

import pytest

from tests.gpu import memory
from tests.gpu.__main__ import NOT_RUN, Results
from tests.gpu.cases import OK, all_cases, measured
from tests.support.running import ROOT, python


def figures_of(name: str, work: Path) -> dict:
    row = measured(name, work, rehearse=True, deadline=900)
    assert row["status"] == OK, row
    return row["figures"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny parts", "tiny fast", "tiny loop"])
def test_a_tiny_case_of_the_gpu_measurements_gives_results_on_a_cpu(name, tmp_path):
    assert figures_of(name, tmp_path)


COMPILED = "torch_compile, use_regional_compilation, attn_implementation sdpa"
# Compiled layers, accumulated gradients beside the buckets that views would spare, pooled rows,
# LoRA, experts.
PLANNED = (
    f"llama tiny, fast, 4x2 of 64, {COMPILED}",
    f"llama tiny, fast, 4x1 of 64, {COMPILED}, use_peft, dtype float32",
    "llama tiny, fast, 4x2 of 64",
    "gpt2 tiny, standard, 8x1 of 64",
    "bert tiny, standard, 16x1 of 64, gradient_checkpointing",
    "qwen2 tiny, standard, 4x1 of 64, use_peft, dtype float32",
    "qwen3_moe tiny, standard, 4x1 of 64",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_planned_memory_of_two_training_steps_is_close_to_the_memory_measured_on_a_cpu(name, tmp_path):
    (planned,) = (case.plan("") for case in all_cases(rehearse=True) if case.plan and case.name == name)
    # On a CPU, LoRA takes 8 % more than planned, and BERT, which has dropout, 15 %. LoRA's first
    # compiled layer is planned as one of the others, of which this model has few.
    off = memory.compared(planned, figures_of(name, tmp_path))["difference"]
    assert (-0.16 if "bert" in name else -0.12) < off < (0.02 if COMPILED in name else 0.01)


@pytest.mark.slow
def test_planned_memory_for_an_h200_is_close_to_the_measured_memory_except_for_moe_models(monkeypatch):
    monkeypatch.setattr("recipes.planner.plan.package_folder", Path)  # liger-kernel was installed there
    (file,) = (ROOT / "tests/gpu/results").glob("*H200.json")
    rows = json.loads(file.read_text())["rows"]
    cases = [case for case in all_cases(rehearse=False) if case.plan and "figures" in rows.get(case.name, {})]
    off = {case.name: memory.compared(case.plan("H200"), rows[case.name]["figures"]) for case in cases}
    assert len(off) > 40
    wrong = [name for name, by in off.items() if abs(by["difference"]) > 0.01 or abs(by["of process"]) > 0.05]
    assert all("moe" in name for name in wrong), wrong


@pytest.mark.parametrize(
    ("status", "words", "left"), [(OK, [], 0), (NOT_RUN, ["--budget", "10"], len(all_cases(rehearse=True)))]
)
def test_python_m_tests_gpu_skips_what_is_finished_and_lists_what_exceeds_the_time(status, words, left, tmp_path):
    results = Results(tmp_path, all_cases(rehearse=True), rehearse=True)
    for case in results.cases:
        results.add(case.name, {"status": status})
    done = python("-m", "tests.gpu", "--rehearse", "--output", tmp_path, *words)
    assert done.returncode == 0 and done.stdout.count(NOT_RUN) == left


@pytest.mark.slow
def test_a_measurement_of_tests_gpu_that_fails_or_exceeds_its_deadline_has_the_status_failed(tmp_path):
    assert measured("tiny loop", tmp_path, rehearse=True, deadline=0.01)["status"] == "failed: over its deadline"
    assert measured("no such case", tmp_path, rehearse=True, deadline=900)["status"].startswith("failed: ")


def test_python_m_tests_gpu_without_a_gpu_suggests_the_flag_rehearse_and_exits_with_2(tmp_path):
    done = python("-m", "tests.gpu", "--output", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "--rehearse" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("process", "holds"), [(1113, True), (1114, False)])
def test_python_m_tests_gpu_compares_plans_with_allocated_and_with_process_memory(process, holds):
    planned = {"planned GiB": 950, "planned process GiB": 1050}
    found = memory.compared(planned, {"allocated GiB": 1000, "process GiB": process})
    assert (found["difference"], found["holds"]) == (pytest.approx(-0.05), holds)
