"""`check`: a hundred wrong inputs, the real classes, and what the check itself imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.rules import check as checking
from recipes.rules import facts
from recipes.rules.check import check, check_deep, refused_by_library, require_legal
from recipes.run import resolve
from recipes.run.engine import shipped
from recipes.run.hardware import Gpu, Hardware
from tests.support.running import ROOT
from tests.support.wrong_inputs import WRONG, Wrong


def resolve_wrong(wrong: Wrong, folder: Path):
    argv = wrong.argv.split()
    if wrong.config:
        (folder / "run.yaml").write_text(wrong.config, encoding="utf-8")
        argv += ["--config", "run.yaml"]
    if wrong.json is not None:
        text = wrong.json if isinstance(wrong.json, str) else json.dumps(wrong.json)
        (folder / "ds.json").write_text(text, encoding="utf-8")
    if wrong.yaml:
        (folder / "accelerate.yaml").write_text(wrong.yaml, encoding="utf-8")
    return resolve(
        argv,
        world_size=wrong.world,
        hardware=Hardware((Gpu("GPU", wrong.gpu, 16 << 30),), cores=4) if wrong.gpu else Hardware(),
        accelerate_config="accelerate.yaml" if wrong.yaml else None,
        environment=wrong.environment,
    )


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.title)
def test_wrong_input_is_an_error_with_its_fix(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [problem for problem in check(resolve_wrong(wrong, tmp_path)) if problem.severity == "error"]
    about = [problem for problem in found if problem.subject == wrong.subject]
    assert about, f"nothing about {wrong.subject}: {[str(problem) for problem in found]}"
    assert any(wrong.fix in problem.fix for problem in about), [str(problem) for problem in about]
    assert all(problem.source for problem in about)


def test_there_are_a_hundred_different_wrong_inputs():
    assert len({(w.argv, w.config, w.yaml, str(w.json), w.world, w.gpu) for w in WRONG}) == len(WRONG) >= 100


def test_several_problems_are_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = Wrong(
        "",
        "",
        argv="--learning_rat 1e-4 --warmup_ratio 0.1 --fp16 --bf16 --save_total_limit 0 --optim adam",
        config="wieght_decay: 0.1\nmax_steps: many\n",
        yaml="compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 1\n"
        "static_graph: true\ndeepspeed_config:\n  zero_stge: 3\n",
    )
    run = resolve_wrong(wrong, tmp_path)
    subjects = {problem.subject for problem in check(run)}
    assert subjects >= {
        *("learning_rat", "warmup_ratio", "fp16", "save_total_limit", "optim"),
        *("wieght_decay", "max_steps", "static_graph", "zero_stge"),
    }
    with pytest.raises(UserError) as raised:
        require_legal(run)
    assert len(raised.value.problems) >= 9


def test_errors_come_first_and_advice_does_not_stop():
    run = resolve(["--lora_r", "8", "--load_in_4bit"], hardware=Hardware(), environment={"NCCL_TIMEOUT": "1"})
    severities = [problem.severity for problem in check(run)]
    assert severities == sorted(severities, reverse=True)
    advised = resolve(["--lora_r", "8"], hardware=Hardware(), environment={})
    assert [problem.severity for problem in require_legal(advised)] == ["advice"]


def test_messages_say_what_where_and_what_instead(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 1\ndeepspeed_config: {zero_stge: 3}\n"
    )
    run = resolve([], accelerate_config="a.yaml", hardware=Hardware(), environment={})
    assert [str(problem) for problem in check(run) if problem.subject == "zero_stge"] == [
        "zero_stge: is not a key of the Accelerate YAML; in deepspeed_config it is dropped silently (a.yaml)."
        " Fix: zero_stage."
    ]


# --- The real classes ----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_real_classes_take_every_recipe(recipe):
    run = resolve(["--recipe", recipe], hardware=Hardware(), environment={})
    assert check_deep(run) == []


@pytest.mark.parametrize("file", sorted(shipped("standard.yaml").parent.glob("*.yaml")), ids=lambda file: file.name)
def test_accelerate_reads_every_shipped_file(file):
    run = resolve([], accelerate_config=str(file), hardware=Hardware(), environment={})
    assert check_deep(run) == []


def test_deep_check_names_the_setting_the_library_refuses():
    run = resolve(["--warmup_steps", "-1"], hardware=Hardware(), environment={})
    (problem,) = check_deep(run)
    assert (problem.subject, problem.source, problem.severity) == ("warmup_steps", "command line", "error")
    assert "ValueError" in problem.what and problem.fix == "another value, or leave it out"


def test_a_refusal_that_names_no_setting_is_handed_on_as_it_is():
    run = resolve(["--config", "/dev/null"], hardware=Hardware(), environment={})
    found = refused_by_library(run, ValueError("The config of your backend is not available"))
    assert str(found) == "TrainingArguments: The config of your backend is not available (ValueError) (transformers)."


def test_deep_check_reads_the_yaml_as_accelerate_does(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nstatic_graph: true\n", encoding="utf-8")
    run = resolve([], accelerate_config=str(file), hardware=Hardware(), environment={})
    assert "unknown keys (['static_graph'])" in check_deep(run)[0].what


# --- What the check imports --------------------------------------------------------------------

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes", "datasets")


def test_a_check_imports_none_of_the_libraries():
    code = (
        "import sys\n"
        "from recipes.rules.check import check\n"
        "from recipes.run.resolve import resolve\n"
        "from recipes.run.engine import shipped\n"
        "for recipe in ('fast', 'memory_zero3'):\n"
        "    argv = ['--recipe', recipe, '--report_to', 'wandb', '--optim', 'adamw_8bit', '--deepspeed', 'x.json']\n"
        "    check(resolve(argv, accelerate_config=str(shipped('memory.yaml'))), accelerate_config_given=False)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_every_optional_package_is_looked_for_without_importing(monkeypatch):
    asked = []
    monkeypatch.setattr(facts, "installed", lambda package: bool(asked.append(package)))
    argv = ["--recipe", "memory", "--use_peft", "--load_in_4bit", "--report_to", "mlflow"]
    found = check(resolve(argv, hardware=Hardware(), environment={}))
    fixes = {problem.fix for problem in found}
    assert {"deepspeed", "peft", "bitsandbytes", "mlflow"} <= set(asked)
    assert {f"pip install {name}" for name in ("deepspeed", "peft", "bitsandbytes", "mlflow")} <= fixes


# --- The user's own default configuration ---------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HOME", "accelerate"),
        ("XDG_CACHE_HOME", "huggingface/accelerate"),
        ("HOME", ".cache/huggingface/accelerate"),
    ],
)
def test_a_stray_default_config_is_reported(variable, below, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    environment = {variable: str(tmp_path)}
    run = resolve([], hardware=Hardware(), environment=environment)
    assert check(run, accelerate_config_given=False) == []
    folder = tmp_path / below
    folder.mkdir(parents=True)
    (folder / "default_config.yaml").write_text(
        "distributed_type: MULTI_GPU\nmixed_precision: fp16\n", encoding="utf-8"
    )
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
