"""Every rule fires in its cases, and only there; what is shipped breaks no rule."""

import importlib
import itertools
from pathlib import Path

import pytest

from recipes import rules
from recipes.catalog import RECIPES
from recipes.rules.check import RULES, check
from recipes.rules.facts import Rule
from recipes.run.files import shipped
from tests.recipes.rules import test_data_and_model, test_engine, test_table, test_training
from tests.support.real_failures import BY_NAME
from tests.support.runs import A100, CPU, H100, T4, machine, resolved

SUBJECTS = (test_table, test_training, test_engine, test_data_and_model)
CASES = {name: runs for subject in SUBJECTS for name, runs in subject.CASES.items()}
ALSO_FIRES = [case for subject in SUBJECTS for case in subject.ALSO_FIRES]
LEGAL_AFTER_ALL = [case for subject in SUBJECTS for case in subject.LEGAL_AFTER_ALL]


def test_every_rule_in_the_rules_folder_is_collected_under_a_unique_name():
    names = [file.stem for file in Path(rules.__path__[0]).glob("[a-z]*.py")]
    modules = [importlib.import_module(f"recipes.rules.{name}") for name in names]
    written = {item.name for module in modules for item in vars(module).values() if isinstance(item, Rule)}
    assert written <= set(BY_NAME) and len(BY_NAME) == len(RULES)


def test_every_rule_has_a_test_case():
    assert set(CASES) == set(BY_NAME)


def test_every_rule_says_which_failure_it_prevents():
    assert [rule.name for rule in RULES if not rule.why] == []


@pytest.mark.parametrize("name", CASES)
def test_each_rule_fires_in_its_first_case_with_a_fix_and_says_where_the_value_comes_from(name, tmp_path, monkeypatch):
    found = list(BY_NAME[name](CASES[name][0].resolve(tmp_path, monkeypatch)))
    assert found
    for problem in found:
        assert problem.fix and problem.source and problem.severity in ("error", "advice")
        assert not problem.fix.endswith(".")  # the sentence gets its own


@pytest.mark.parametrize("name", CASES)
def test_each_rule_reports_nothing_for_the_nearest_legal_run(name, tmp_path, monkeypatch):
    run = CASES[name][1].resolve(tmp_path, monkeypatch)
    assert not list(BY_NAME[name](run))
    assert not run.problems


@pytest.mark.parametrize(("name", "run", "part"), ALSO_FIRES, ids=lambda value: getattr(value, "argv", value))
def test_each_rule_also_fires_in_its_other_test_cases(name, run, part, tmp_path, monkeypatch):
    found = list(BY_NAME[name](run.resolve(tmp_path, monkeypatch)))
    assert [problem for problem in found if part in f"{problem.subject}, {problem.fix}"]


@pytest.mark.parametrize(("name", "run"), LEGAL_AFTER_ALL, ids=lambda value: getattr(value, "argv", value))
def test_rules_with_a_second_legal_run_among_their_test_cases_report_nothing_for_it(name, run, tmp_path, monkeypatch):
    assert not list(BY_NAME[name](run.resolve(tmp_path, monkeypatch)))


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


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_and_shipped_accelerate_yamls_are_legal_on_every_machine(recipe):
    for (hardware, world), file in itertools.product(MACHINES.values(), [None, *SHIPPED]):
        world = 1 if file == "single.yaml" else world  # which is what it starts
        found = check(resolved(f"--recipe {recipe}", world, hardware=hardware, accelerate_config=file))
        assert not [str(one) for one in found if one.severity == "error"], (hardware, world, file)
