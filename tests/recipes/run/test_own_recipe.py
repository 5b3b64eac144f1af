"""Recipes of a user's own: what a YAML or a Python file sets, and every mistake in one line."""

import contextlib

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipes import legal
from recipes import recipe as factory
from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.rules.check import check, require_legal
from recipes.run import find_recipe, resolve
from tests.support.runs import A100, machine, resolved

MINE = """\
base: fast
purpose: Fine-tuning on our support tickets.
micro_batch_cap: 2
changes:
  learning_rate: [2e-5, "best of three, by evaluation loss"]
  logging_steps: [20, fewer lines]
"""
PYTHON = """\
from recipes.catalog import fast


def _by_world(run):
    return run.world_size * 10, "ten for each process"


def mine():
    return fast().but("ours", "For our group.", learning_rate=(2e-5, "best of three"), logging_steps=_by_world)
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes files into an empty current folder."""
    monkeypatch.chdir(tmp_path)

    def write(**contents):
        for name, text in contents.items():
            tmp_path.joinpath(name.replace("_", ".")).write_text(text)

    return write


def run_of(name, *argv, **keywords):
    run = resolved(["--recipe", name, *argv], demonstrate=False, **keywords)
    assert not run.problems
    return run


def problems_of(name):
    with pytest.raises(UserError) as raised:
        find_recipe(name)
    return [str(problem) for problem in raised.value.problems]


def test_a_yaml_is_its_base_and_its_changes_with_their_reasons(files):
    files(mine_yaml=MINE)
    run, base = run_of("mine.yaml"), run_of("fast")
    changed = {name for name in run if run[name] != base[name]}
    batch = {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert changed == {"recipe", "output_dir", "learning_rate", "logging_steps", *batch}
    setting = run.setting("learning_rate")
    assert (setting.value, setting.source) == (2e-5, "recipe mine.yaml")
    assert setting.reason == "best of three, by evaluation loss"
    assert (run["per_device_train_batch_size"], run["output_dir"]) == (2, "outputs/mine")


def test_the_command_line_and_a_file_win_over_it(files):
    files(mine_yaml=MINE, run_yaml="recipe: mine.yaml\nlearning_rate: 1e-4\n")
    run = resolved("--config run.yaml --logging_steps 7", demonstrate=False)
    assert (run["learning_rate"], run["logging_steps"], run.recipe.name) == (1e-4, 7, "mine")


def test_what_it_sets_counts_as_written_by_the_user(files):
    """Otherwise its base would choose bf16 beside it, or the batch arithmetic win over it."""
    changes = "{fp16: [true, as published], global_batch_size: [64, as published], output_dir: [there, by habit]}"
    files(mine_yaml=f"base: standard\npurpose: x\nchanges: {changes}\n")
    run = resolve(["--recipe", "mine.yaml"], hardware=machine(A100), environment={}, demonstrate=False)
    assert (run["fp16"], run["bf16"], run.batch.total, run["output_dir"]) == (True, False, 64, "there")
    assert not [problem for problem in check(run) if problem.severity == "error"]


def test_a_base_may_be_another_file_relative_to_the_first(tmp_path, files):
    files(run_yaml="")
    tmp_path.joinpath("group").mkdir()
    tmp_path.joinpath("group", "ours.yaml").write_text(MINE)
    tmp_path.joinpath("group", "mine.yaml").write_text(
        "base: ours.yaml\npurpose: x\nchanges: {seed: [7, my favourite]}\n"
    )
    run = run_of("group/mine.yaml")
    assert (run["learning_rate"], run["seed"]) == (2e-5, 7)
    assert run.recipe.files == ("group/mine.yaml", "group/ours.yaml")


def test_its_engine_is_a_shipped_file_or_one_beside_it(files):
    files(zero_yaml="compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 1\n")
    files(a_yaml="base: fast\npurpose: x\nengine: zero.yaml\n", b_yaml="base: fast\npurpose: x\nengine: single.yaml\n")
    assert (run_of("a.yaml").engine.title, run_of("b.yaml").engine.title) == ("DeepSpeed ZeRO-2", "one process")


def test_a_file_named_as_the_engine_of_the_base_is_not_its_engine(files):
    files(mine_yaml=MINE, fast_yaml="base: standard\npurpose: x\n")
    assert run_of("mine.yaml").engine.title == run_of("fast").engine.title


@pytest.mark.parametrize("name", ["mine.py", "mine.py:mine"])
def test_a_function_of_a_python_file_is_a_recipe(files, name):
    files(mine_py=PYTHON)
    run = run_of(name, world_size=2)
    assert (run["learning_rate"], run["logging_steps"], run.recipe.name) == (2e-5, 20, "ours")
    assert run.setting("logging_steps").reason == "ten for each process"
    assert run.explicit("learning_rate") and not run.explicit("save_total_limit")  # its base's


def test_its_factory_returns_arguments(files, tmp_path):
    files(mine_yaml=MINE)
    args = factory("mine.yaml")(output_dir=str(tmp_path / "out"), seed=3)
    assert (args.learning_rate, args.logging_steps, args.seed) == (2e-5, 20, 3)


# --- Mistakes -------------------------------------------------------------------------------------

_HEAD = "base: fast\npurpose: x\n"
IN_A_YAML = {
    "a misspelt setting": (_HEAD + "changes: {lerning_rate: [1, a reason]}", "Fix: learning_rate"),
    "a renamed setting": (_HEAD + "changes: {evaluation_strategy: [steps, a reason]}", "Fix: eval_strategy"),
    "no reason": (_HEAD + "changes: {seed: 3}", 'Fix: seed: [3, "the reason"]'),
    "a list that is no pair": (_HEAD + "changes: {lora_target_modules: [q_proj, v_proj]}", "lora_target_modules: has"),
    "another type": (_HEAD + "changes: {max_steps: [many, a reason]}", "takes a whole number, got 'many'"),
    "another value": (_HEAD + "changes: {eval_strategy: [ever, a reason]}", "one of no, steps, epoch"),
    "a recipe in it": (_HEAD + "changes: {recipe: [fast, a reason]}", "recipe: cannot be changed by a recipe"),
    "changes as text": (_HEAD + "changes: none", "changes: are not settings"),
    "a misspelt key": (_HEAD + "chnages: {seed: [3, a reason]}", "Fix: changes"),
    "a setting beside changes": (_HEAD + "seed: 3", "seed: is not below changes"),
    "no purpose": ("base: fast", "purpose: is missing"),
    "a purpose that is a list": ("base: fast\npurpose: [a]", "purpose: is not text"),
    "a base that is a list": ("base: [fast]\npurpose: x", "there is no recipe \"['fast']\""),
    "a base that is a mapping": ("base: {fast: 1}\npurpose: x", "base: there is no recipe"),
    "a value of another type": (
        _HEAD + "changes: {learning_rate: [fast, a reason]}",
        'Fix: learning_rate: [a number, "the reason"]',
    ),
    "a date that is none": (_HEAD + "changes: {seed: [2026-13-13, a reason]}", "is not valid YAML"),
    "an unknown base": ("base: fats\npurpose: x", "Fix: fast"),
    "a base in Python": ("base: mine.py\npurpose: x", "mine.py is a Python file"),
    "a base that is missing": ("base: other.yaml\npurpose: x", "there is no file other.yaml"),
    "its own base": ("base: mine.yaml\npurpose: x", "leads back to mine.yaml"),
    "no base": ("purpose: x", "mine.yaml has no base"),
    "settings for --config": ("seed: 3", "Fix: --config mine.yaml"),
    "an Accelerate YAML": ("distributed_type: MULTI_GPU", "accelerate launch --config_file mine.yaml"),
    "an unknown engine": (_HEAD + "engine: fats.yaml", "Fix: fast.yaml"),
    "no micro-batch": (_HEAD + "micro_batch_cap: 0", "micro_batch_cap: is 0"),
    "a list": ("- fast", "holds a list"),
    "no YAML": ("base: [", "is not valid YAML"),
}


@pytest.mark.parametrize("mistake", IN_A_YAML)
def test_a_mistake_in_a_yaml_is_one_line_that_names_the_file(files, mistake):
    text, expected = IN_A_YAML[mistake]
    files(mine_yaml=text)
    (line,) = problems_of("mine.yaml")
    assert expected in line and "mine.yaml" in line


HOSTILE = [10**400, -(10**400), "~nobody/x", "x" * 300, [1, 2], [[1]], {1: 2}, {"a": [None]}]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:12])
def test_no_setting_fails_on_a_hostile_value(tmp_path, value):
    for name in legal.settings():
        _resolve_and_check(tmp_path, {"base": "fast", "purpose": "x", "changes": {name: [value, "a reason"]}})


_KEYS = ["base", "purpose", "engine", "micro_batch_cap", "changes", "other"]
_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.dates(), st.binary(), st.text(), st.just("x" * 300),
    st.sampled_from(["fast", "fast.yaml", "mine.yaml", "~nobody/x", "a/b.yaml", "1e-4", 10**400]),
)  # fmt: skip
_ANYTHING = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_SCALARS, inner, max_size=2), max_leaves=5
)
_CHANGES = st.dictionaries(
    st.sampled_from(sorted(legal.settings())),
    _ANYTHING | st.tuples(_ANYTHING, st.just("a reason")).map(list),
    max_size=3,
)


@given(st.fixed_dictionaries({"base": st.just("fast"), "purpose": st.just("x")}, optional={"changes": _CHANGES}))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_a_change_is_a_traceback(tmp_path, content):
    _resolve_and_check(tmp_path, content)


@given(st.dictionaries(st.sampled_from(_KEYS), _ANYTHING))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_of_a_key_is_a_traceback(tmp_path, content):
    _resolve_and_check(tmp_path, {"base": "fast", **content})


def _resolve_and_check(folder, content):
    """What every command does first with a recipe."""
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    with contextlib.suppress(UserError):
        check(resolved(["--recipe", str(file)]))


def test_null_leaves_a_setting_to_the_library(files):
    files(mine_yaml=_HEAD + "changes: {learning_rate: [null, as the library has it], optim: [null, the same]}")
    run = run_of("mine.yaml")
    assert (run["learning_rate"], run["optim"]) == (5e-5, legal.settings()["optim"].default)
    assert run.setting("optim").source == "library default"


def test_all_mistakes_of_a_file_are_told_at_once(files):
    files(mine_yaml=_HEAD + "engine: fats.yaml\nchanges: {seed: 3, lerning_rate: [1, a reason]}")
    assert len(problems_of("mine.yaml")) == 3


_IMPORT = "from recipes.catalog import fast\n"
IN_PYTHON = {
    "a name that is not defined": ("def mine():\n    return fsat()\n", "mine.py raises NameError"),
    "no Python": ("def mine(:\n", "Fix: mend line 1"),
    "an end": ("raise SystemExit(3)\n", "mine.py raises SystemExit"),
    "no recipe returned": ("def mine():\n    return 3\n", "mine of mine.py returns int, not a Recipe"),
    "two functions": ("def mine(): ...\ndef other(): ...\n", "mine.py has 2 public functions: mine, other"),
    "no function": ("", "mine.py has no public function"),
    "an argument": ("def mine(hardware): ...\n", "mine.py raises TypeError"),
    "no reason": (_IMPORT + "def mine():\n    return fast().but('a', 'b', seed=3)\n", 'seed=(3, "the reason")'),
    "a misspelt setting": (_IMPORT + "def mine():\n    return fast().but('a', 'b', sed=(3, 'c'))\n", "Fix: seed"),
    "a name with a blank": (_IMPORT + "def mine():\n    return fast().but('a b', 'b')\n", "'a b' cannot name a recipe"),
    "a taken name": (_IMPORT + "def mine():\n    return fast()\n", "'fast' is the name of a shipped recipe"),
    "a batch that depends on the run": (
        _IMPORT + "def mine():\n    return fast().but('a', 'b', global_batch_size=lambda run: (3, 'c'))\n",
        "global_batch_size: cannot depend on the run",
    ),
}


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_a_mistake_in_python_is_one_line_that_names_the_file(files, mistake):
    text, expected = IN_PYTHON[mistake]
    files(mine_py=text)
    (line,) = problems_of("mine.py")
    assert expected in line and "mine.py" in line


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        ('run["sed"], "c"', "KeyError: 'sed' (mine.py). Fix: mend line 5"),
        ("3", "seed: has no reason (mine.py)"),
        ('"x", "a reason"', "seed: takes a whole number"),
    ],
)
def test_a_decision_that_fails_is_the_files_mistake(files, decision, expected):
    text = "\n\ndef _seed(run):\n    return {}\n\ndef mine():\n    return fast().but('ours', 'b', seed=_seed)\n"
    files(mine_py=_IMPORT + text.format(decision))
    run = run_of("mine.py")
    assert [str(problem) for problem in check(run) if expected in str(problem)]
    with pytest.raises(UserError):
        require_legal(run)


def test_a_function_that_is_not_there_has_a_nearest_name(files):
    files(mine_py=PYTHON)
    assert problems_of("mine.py:mime") == ["recipe: mine.py has no function 'mime'. Fix: mine."]


@pytest.mark.parametrize("name", ["missing.yaml", "missing.py", "missing.py:mine", "", "a b"])
def test_a_file_that_is_not_there_is_one_line(files, name):
    assert len(problems_of(name)) == 1


def test_a_shipped_recipe_cannot_be_hidden_by_a_file(files):
    files(fast_yaml=_HEAD)
    assert "is the name of a shipped recipe" in problems_of("fast.yaml")[0]
    assert find_recipe("fast") == RECIPES["fast"]()


def test_a_recipe_given_as_a_configuration_says_which_flag_takes_it(files):
    files(mine_yaml=MINE)
    with pytest.raises(UserError, match=r"mine.yaml is a recipe. Fix: --recipe mine.yaml"):
        resolved("--config mine.yaml")


def test_a_fix_is_written_in_the_language_of_the_file(files):
    files(
        a_py=_IMPORT + "def a():\n    return fast().but('a', 'x', learning_rate=1e-4)\n",
        a_yaml="base: fast\npurpose: x\nchanges:\n  learning_rate: 0.0001\n",
    )
    with pytest.raises(UserError, match=r'Fix: learning_rate=\(0.0001, "the reason"\)'):
        find_recipe("a.py")
    with pytest.raises(UserError, match=r'Fix: learning_rate: \[0.0001, "the reason"\]'):
        find_recipe("a.yaml")


def test_an_engine_that_does_not_exist_is_not_guessed(files):
    files(a_yaml="base: fast\npurpose: x\nengine: nothere.yaml\n")
    with pytest.raises(UserError, match=r"there is no nothere.yaml.*Fix: one of fast.yaml, memory.yaml"):
        find_recipe("a.yaml")
