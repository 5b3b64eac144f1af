"""`check`: wrong inputs, all at once, and what the check itself imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipes.errors import UserError
from recipes.rules.check import check, require_legal
from recipes.run import here, resolve
from recipes.run.hardware import Hardware
from tests.support.running import ROOT
from tests.support.runs import Run, deepspeed
from tests.support.wrong_inputs import WRONG


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.title)
def test_wrong_input_is_an_error_with_its_fix(wrong, tmp_path, monkeypatch):
    argv, files = wrong.argv, {}
    if wrong.config:
        argv, files = f"{argv} --config run.yaml", {"run.yaml": wrong.config}
    found = check(Run(argv, wrong.world, files=files).resolve(tmp_path, monkeypatch))
    about = [problem for problem in found if (problem.subject, problem.severity) == (wrong.subject, "error")]
    assert about, f"nothing about {wrong.subject}: {[str(problem) for problem in found]}"
    assert any(wrong.fix in problem.fix for problem in about), [str(problem) for problem in about]
    assert all(problem.source for problem in about)


def test_all_problems_are_reported_at_once_errors_first(tmp_path, monkeypatch):
    argv = "--learning_rat 1e-4 --warmup_ratio 0.1 --max_grad_norm -1 --optim adam --lora_r 8 --config run.yaml"
    files = {"run.yaml": "wieght_decay: 0.1\nmax_steps: many\n"}
    run = Run(argv, yaml=deepspeed("zero_stge: 3"), files=files).resolve(tmp_path, monkeypatch)
    found = check(run)
    about = "learning_rat warmup_ratio max_grad_norm optim lora_r wieght_decay max_steps zero_stge"
    assert {problem.subject for problem in found} >= {*about.split()}
    severities = [problem.severity for problem in found]
    assert severities == sorted(severities, reverse=True)
    with pytest.raises(UserError) as raised:
        require_legal(run)
    assert list(raised.value.problems) == [problem for problem in found if problem.severity == "error"]


def test_advice_does_not_stop():
    advised = resolve(["--lora_r", "8"], here(hardware=Hardware(), environment={}))
    assert [problem.severity for problem in require_legal(advised)] == ["advice"]


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


# --- The user's own default configuration ---------------------------------------------------------


def test_a_stray_default_config_is_reported(tmp_path):
    run = resolve([], here(hardware=Hardware(), environment={"HF_HOME": str(tmp_path)}))
    assert check(run, accelerate_config_given=False) == []
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").touch()
    (problem,) = check(run, accelerate_config_given=False)
    assert problem.severity == "advice" and "--config_file" in problem.fix
    assert check(run, accelerate_config_given=True) == []
