"""`check`: wrong inputs, all at once."""

import pytest

from recipes.errors import UserError
from recipes.rules.check import check, require_legal
from tests.support.runs import Run, deepspeed, resolved


def wrong(subject: str, fix: str, argv: str = "", config: str = ""):
    """A row: the name that the problem is about, a part of the fix, and what a user writes."""
    return pytest.param(subject, fix, argv, config, id=" ".join((argv or config).split())[:70])


WRONG = [
    # Misspelt.
    wrong("gradient_accumulation", "--gradient_accumulation_steps", "--gradient_accumulation 4"),
    wrong("lora_rank", "lora_r", "--lora_rank 8"),
    wrong("dataset", "dataset_name", "--dataset d.jsonl"),
    wrong("xylophone", "--help", "--xylophone"),
    wrong("recipe", "fast", "--recipe fsat"),
    # Renamed.
    wrong("evaluation_strategy", "eval_strategy", "--evaluation_strategy steps"),
    wrong("overwrite_output_dir", "--fresh", "--overwrite_output_dir"),
    wrong("per_gpu_train_batch_size", "per_device_train_batch_size", "--per_gpu_train_batch_size 4"),
    wrong("group_by_length", "train_sampling_strategy", "--group_by_length"),
    wrong("warmup_ratio", "warmup_steps", "--warmup_ratio 0.1"),
    # Of another place.
    wrong("mixed_precision", "--bf16", "--mixed_precision bf16"),
    wrong("static_graph", "ddp_static_graph", "--static_graph true"),
    wrong("num_processes", "accelerate launch", "--num_processes 2"),
    wrong("zero_stage", "deepspeed_config", "--zero_stage 3"),
    wrong("batch_size", "global_batch_size", "--batch_size 8"),
    wrong("deepspeed_config", "Accelerate YAML", config="deepspeed_config:\n  zero_stage: 2\n"),
    wrong("config", "leave it out", config="config: other.yaml\n"),
    # Values.
    wrong("num_train_epochs", "a number", config="num_train_epochs: true\n"),
    wrong("save_steps", "a number", config="save_steps: [1, 2]\n"),
    wrong("accelerator_config", "JSON", "--accelerator_config {even_batches:1}"),
    wrong("optim", "adamw_torch_fused", "--optim adam"),
    wrong("ddp_comm_hook", "fp16", "--ddp_comm_hook powersgd"),
]


@pytest.mark.parametrize(("subject", "fix", "argv", "config"), WRONG)
def test_a_wrong_setting_is_reported_with_a_fix_and_its_source(subject, fix, argv, config, tmp_path, monkeypatch):
    argv, files = (f"{argv} --config run.yaml", {"run.yaml": config}) if config else (argv, {})
    found = check(Run(argv, files=files).resolve(tmp_path, monkeypatch))
    about = [problem for problem in found if (problem.subject, problem.severity) == (subject, "error")]
    assert about, f"nothing about {subject}: {[str(problem) for problem in found]}"
    assert any(fix in problem.fix for problem in about), [str(problem) for problem in about]
    assert all(problem.source for problem in about)


def test_all_problems_are_reported_at_once_errors_first(tmp_path, monkeypatch):
    argv = "--learning_rat 1e-4 --warmup_ratio 0.1 --weight_decay -1 --optim adam --lora_r 8 --config run.yaml"
    files = {"run.yaml": "wieght_decay: 0.1\nmax_steps: many\nmodel_name_or_path: gpt2\ndataset_name: [2]\n"}
    run = Run(argv, yaml=deepspeed("zero_stge: 3"), files=files).resolve(tmp_path, monkeypatch)
    found = check(run)
    about = "learning_rat warmup_ratio weight_decay optim lora_r wieght_decay max_steps zero_stge"
    assert {problem.subject for problem in found} >= {*about.split()}
    assert sum(problem.subject == "dataset_name" for problem in found) == 1  # it is wrong, not missing too
    severities = [problem.severity for problem in found]
    assert severities == sorted(severities, reverse=True)
    with pytest.raises(UserError) as raised:
        require_legal(run)
    assert list(raised.value.problems) == [problem for problem in found if problem.severity == "error"]


def test_for_a_run_without_errors_the_function_require_legal_raises_nothing_and_returns_the_advice():
    advised = resolved("--lora_r 8")
    assert [problem.severity for problem in require_legal(advised)] == ["advice"]
