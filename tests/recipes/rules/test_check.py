"""`check`: wrong inputs, all at once, and what the check itself imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.errors import UserError
from recipes.rules import check as checking
from recipes.rules import facts
from recipes.rules.check import check, require_legal
from recipes.run import here, resolve
from recipes.run.hardware import Hardware
from tests.support.running import ROOT
from tests.support.wrong_inputs import WRONG, Wrong


def resolve_wrong(wrong: Wrong, folder: Path):
    argv = wrong.argv.split()
    if wrong.config:
        (folder / "run.yaml").write_text(wrong.config, encoding="utf-8")
        argv += ["--config", "run.yaml"]
    return resolve(argv, here(wrong.world, hardware=Hardware(), environment={}))


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.title)
def test_wrong_input_is_an_error_with_its_fix(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [problem for problem in check(resolve_wrong(wrong, tmp_path)) if problem.severity == "error"]
    about = [problem for problem in found if problem.subject == wrong.subject]
    assert about, f"nothing about {wrong.subject}: {[str(problem) for problem in found]}"
    assert any(wrong.fix in problem.fix for problem in about), [str(problem) for problem in about]
    assert all(problem.source for problem in about)


def test_several_problems_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("wieght_decay: 0.1\nmax_steps: many\n", encoding="utf-8")
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 1\nstatic_graph: true\ndeepspeed_config:\n  zero_stge: 3\n"
    )
    flags = (
        "--learning_rat 1e-4 --warmup_ratio 0.1 --max_grad_norm -1 --save_total_limit 0 --optim adam --config run.yaml"
    )
    run = resolve(flags.split(), here(accelerate_config="accelerate.yaml", hardware=Hardware(), environment={}))
    subjects = {problem.subject for problem in check(run)}
    assert subjects >= {
        *("learning_rat", "warmup_ratio", "max_grad_norm", "save_total_limit", "optim"),
        *("wieght_decay", "max_steps", "static_graph", "zero_stge"),
    }
    with pytest.raises(UserError) as raised:
        require_legal(run)
    assert len(raised.value.problems) >= 9


def test_errors_come_first_and_advice_does_not_stop():
    run = resolve(["--lora_r", "8", "--load_in_4bit"], here(hardware=Hardware(), environment={"NCCL_TIMEOUT": "1"}))
    severities = [problem.severity for problem in check(run)]
    assert severities == sorted(severities, reverse=True)
    advised = resolve(["--lora_r", "8"], here(hardware=Hardware(), environment={}))
    assert [problem.severity for problem in require_legal(advised)] == ["advice"]


def test_messages_say_what_where_and_what_instead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 1\ndeepspeed_config: {zero_stge: 3}\n"
    )
    run = resolve([], here(accelerate_config="a.yaml", hardware=Hardware(), environment={}))
    assert [str(problem) for problem in check(run) if problem.subject == "zero_stge"] == [
        "zero_stge: is not a key of the Accelerate YAML; in deepspeed_config it is dropped silently (a.yaml)."
        " Fix: zero_stage."
    ]


# --- What the check imports --------------------------------------------------------------------

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "datasets")


def test_a_check_imports_none_of_the_libraries():
    code = (
        "import sys\n"
        "from recipes.rules.check import check\n"
        "from recipes.run.resolve import resolve\n"
        "from recipes.run import here\nfrom recipes.run.files import shipped\n"
        "for recipe in ('fast', 'memory_zero3'):\n"
        "    argv = ['--recipe', recipe, '--report_to', 'wandb', '--optim', 'adamw_8bit', '--deepspeed', 'x.json']\n"
        "    check(resolve(argv, here(accelerate_config=str(shipped('memory.yaml')))), accelerate_config_given=False)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_every_optional_package_is_looked_for_without_importing(monkeypatch):
    asked = []
    monkeypatch.setattr(facts, "installed", lambda package: bool(asked.append(package)))
    argv = ["--recipe", "memory", "--use_peft", "--load_in_4bit", "--report_to", "mlflow"]
    found = check(resolve(argv, here(hardware=Hardware(), environment={})))
    fixes = {problem.fix for problem in found}
    assert {"deepspeed", "peft", "bitsandbytes", "mlflow"} <= set(asked)
    assert {f"pip install {name}" for name in ("deepspeed", "peft", "bitsandbytes", "mlflow")} <= fixes


# --- The user's own default configuration ---------------------------------------------------------


def test_a_stray_default_config_is_reported(tmp_path):
    run = resolve([], here(hardware=Hardware(), environment={"HF_HOME": str(tmp_path)}))
    assert check(run, accelerate_config_given=False) == []
    (tmp_path / "accelerate").mkdir()
    text = "distributed_type: MULTI_GPU\nmixed_precision: fp16\n"
    (tmp_path / "accelerate" / "default_config.yaml").write_text(text, encoding="utf-8")
    (problem,) = check(run, accelerate_config_given=False)
    assert problem.severity == "advice" and "mixed_precision fp16" in problem.what
    assert "--config_file" in problem.fix
    assert check(run, accelerate_config_given=True) == []


def test_a_broken_default_config_is_no_crash(tmp_path):
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "default_config.yaml").write_text("a: [", encoding="utf-8")
    (problem,) = checking.stray_accelerate_config({"HF_HOME": str(tmp_path)})
    assert "not valid YAML" in problem.what
