"""Every rule fires in its cases, and only there; what is shipped breaks no rule."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import rules
from recipes.catalog import RECIPES
from recipes.rules.check import RULES, check
from recipes.run import resolve
from recipes.run.engine import shipped
from tests.recipes.rules import (
    test_adapters,
    test_attention,
    test_batches,
    test_checkpoints,
    test_data,
    test_evaluation,
    test_models,
    test_nested,
    test_optimizer,
    test_packages,
    test_precision,
    test_speed,
    test_values,
)
from tests.recipes.rules.engine import (
    test_accelerate_yaml,
    test_deepspeed_json,
    test_fsdp,
    test_parallelism,
    test_processes,
)
from tests.support.runs import A100, CPU, H100, T4, Run, machine

SUBJECTS: tuple[ModuleType, ...] = (
    test_values,
    test_precision,
    test_attention,
    test_processes,
    test_parallelism,
    test_fsdp,
    test_models,
    test_data,
    test_batches,
    test_optimizer,
    test_adapters,
    test_evaluation,
    test_checkpoints,
    test_packages,
    test_speed,
    test_nested,
    test_accelerate_yaml,
    test_deepspeed_json,
)
CASES = {name: runs for subject in SUBJECTS for name, runs in subject.CASES.items()}
ALSO_FIRES = [case for subject in SUBJECTS for case in getattr(subject, "ALSO_FIRES", ())]
LEGAL_AFTER_ALL = [case for subject in SUBJECTS for case in getattr(subject, "LEGAL_AFTER_ALL", ())]
BY_NAME = {function.__name__: function for function in RULES}


def test_every_rule_in_the_folder_is_collected():
    written = []
    for file in Path(rules.__path__[0]).glob("**/*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", [])]
            if "rule" in marks:
                written.append(node.name)
    assert sorted(function.__name__ for function in RULES) == sorted(written)


def test_every_rule_has_a_case():
    assert set(CASES) == set(BY_NAME)


def test_every_rule_says_which_failure_it_prevents():
    assert [name for name, function in BY_NAME.items() if not (function.__doc__ or "").strip()] == []


@pytest.mark.parametrize("name", CASES)
def test_rule_fires(name, tmp_path, monkeypatch):
    found = list(BY_NAME[name](CASES[name][0].resolve(tmp_path, monkeypatch)))
    assert found
    for problem in found:
        assert problem.fix and problem.source and problem.severity in ("error", "advice")
        assert not problem.fix.endswith(".")  # the sentence gets its own


@pytest.mark.parametrize("name", CASES)
def test_rule_leaves_the_nearest_legal_run_alone(name, tmp_path, monkeypatch):
    run = CASES[name][1].resolve(tmp_path, monkeypatch)
    assert not list(BY_NAME[name](run))
    assert not run.problems


@pytest.mark.parametrize(("name", "run", "subject"), ALSO_FIRES, ids=lambda value: getattr(value, "argv", value))
def test_rule_fires_in_its_other_cases(name, run, subject, tmp_path, monkeypatch):
    found = list(BY_NAME[name](run.resolve(tmp_path, monkeypatch)))
    assert [problem for problem in found if subject in problem.subject]


@pytest.mark.parametrize(("name", "run"), LEGAL_AFTER_ALL, ids=lambda value: getattr(value, "argv", value))
def test_rule_does_not_refuse_what_trains(name, run, tmp_path, monkeypatch):
    assert not list(BY_NAME[name](run.resolve(tmp_path, monkeypatch)))


def test_a_message_names_where_the_value_came_from(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("load_in_4bit: true\n", encoding="utf-8")
    run = Run("--config run.yaml").resolve(tmp_path, monkeypatch)
    assert {problem.source for problem in check(run) if problem.subject == "load_in_4bit"} == {"run.yaml"}


# --- What is shipped is legal ---------------------------------------------------------------------

SHIPPED = [file.name for file in sorted(shipped("standard.yaml").parent.glob("*.yaml"))]
MACHINES = {
    "one process on a CPU": (CPU, 1),
    "two processes on a CPU": (CPU, 2),
    "one A100": (machine(A100), 1),
    "two A100": (machine(A100, 2), 2),
    "eight A100": (machine(A100, 8), 8),
    "two T4": (machine(T4, 2), 2),
    "one H100": (machine(H100), 1),
    "eight H100": (machine(H100, 8), 8),
}


def errors(run) -> list[str]:
    return [str(problem) for problem in check(run) if problem.severity == "error"]


@pytest.mark.parametrize("place", MACHINES)
@pytest.mark.parametrize("file", [None, *SHIPPED])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_and_shipped_files_are_legal(recipe, file, place):
    hardware, world = MACHINES[place]
    if file == "single.yaml":
        world = 1  # which is what it starts
    config = str(shipped(file)) if file else None
    run = resolve(["--recipe", recipe], world_size=world, hardware=hardware, accelerate_config=config, environment={})
    assert errors(run) == []


@settings(deadline=None, max_examples=150)
@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    world=st.integers(1, 8),
    share=st.integers(1, 48),
    gpu=st.sampled_from([None, T4, A100, H100]),
    liger=st.booleans(),
)
def test_any_recipe_on_any_machine_is_legal(recipe, world, share, gpu, liger):
    hardware = machine(gpu, world, liger) if gpu else replace(CPU, liger=liger)
    argv = ["--recipe", recipe, "--global_batch_size", str(world * share)]
    run = resolve(argv, world_size=world, hardware=hardware, environment={})
    assert errors(run) == []
    assert run.batch.total == world * share
