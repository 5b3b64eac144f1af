"""Recipes of a user's own: the settings of a YAML or a Python file; a mistake is one line."""

import pytest

from recipes import legal
from recipes import recipe as factory
from recipes.errors import UserError
from recipes.rules.check import check, require_legal
from recipes.run import find_recipe
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
    run = resolved(["--recipe", name, *argv], trained_by="nobody", **keywords)
    assert not run.problems
    return run


def problems_of(name):
    with pytest.raises(UserError) as raised:
        find_recipe(name)
    return [str(problem) for problem in raised.value.problems]


def test_a_recipe_yaml_is_its_base_recipe_plus_its_changes_with_their_reasons(files):
    files(mine_yaml=MINE)
    run, base = run_of("mine.yaml"), run_of("fast")
    changed = {name for name in run if run[name] != base[name]}
    batch = {"per_device_train_batch_size", "gradient_accumulation_steps"}
    assert changed == {"recipe", "output_dir", "learning_rate", "logging_steps", *batch}
    setting = run.setting("learning_rate")
    assert (setting.value, setting.source) == (2e-5, "recipe mine.yaml")
    assert setting.reason == "best of three, by evaluation loss"
    assert (run["per_device_train_batch_size"], run["output_dir"]) == (2, "outputs/mine")


def test_the_command_line_and_a_config_file_win_over_a_users_recipe(files):
    files(mine_yaml=MINE, run_yaml="recipe: mine.yaml\nlearning_rate: 1e-4\n")
    run = resolved("--config run.yaml --logging_steps 7", trained_by="nobody")
    assert (run["learning_rate"], run["logging_steps"], run.recipe.name) == (1e-4, 7, "mine")


def test_changes_of_a_users_recipe_win_over_values_that_its_base_recipe_would_choose(files):
    """Otherwise its base would choose bf16 beside it, or the batch arithmetic win over it."""
    changes = "{fp16: [true, as published], global_batch_size: [64, as published], output_dir: [there, by habit]}"
    files(mine_yaml=f"base: standard\npurpose: x\nchanges: {changes}\n")
    run = run_of("mine.yaml", hardware=machine(A100))
    assert (run["fp16"], run["bf16"], run.batch.total, run["output_dir"]) == (True, False, 64, "there")
    assert not [problem for problem in check(run) if problem.severity == "error"]


def test_the_engine_of_a_users_recipe_is_an_accelerate_yaml_beside_it_or_a_shipped_one(files):
    files(zero_yaml="compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 1\n")
    files(a_yaml="base: fast\npurpose: x\nengine: zero.yaml\n", b_yaml="base: fast\npurpose: x\nengine: single.yaml\n")
    assert (run_of("a.yaml").engine.title, run_of("b.yaml").engine.title) == ("DeepSpeed ZeRO-2", "one process")


def test_a_function_in_a_python_file_can_be_a_recipe(files):
    files(mine_py=PYTHON)
    run = run_of("mine.py:mine", world_size=2)
    assert (run["learning_rate"], run["logging_steps"], run.recipe.name) == (2e-5, 20, "ours")
    assert run.setting("logging_steps").reason == "ten for each process"
    assert run.explicit("learning_rate") and not run.explicit("save_total_limit")  # its base's


def test_a_recipe_function_may_build_on_another_recipe_function(files):
    files(mine_py=PYTHON + "def cold():\n    return mine().but('cold', 'Slow.', learning_rate=(1e-6, 'low'))\n")
    run = run_of("mine.py:cold")
    assert (run["learning_rate"], run["logging_steps"], run.recipe.name) == (1e-6, 10, "cold")
    assert run.setting("logging_steps").source == "recipe mine.py"


def test_the_function_named_recipe_builds_training_arguments_from_a_users_recipe_file(files, tmp_path):
    files(mine_yaml=MINE)
    args = factory("mine.yaml")(output_dir=str(tmp_path / "out"), seed=3)
    assert (args.learning_rate, args.logging_steps, args.seed) == (2e-5, 20, 3)


def test_null_in_a_recipe_file_gives_a_setting_the_librarys_default(files):
    files(mine_yaml=_HEAD + "changes: {learning_rate: null, optim: null}")
    run = run_of("mine.yaml")
    assert (run["learning_rate"], run["optim"]) == (5e-5, legal.settings()["optim"].default)
    assert run.setting("optim").source == "library default"


# --- Mistakes -------------------------------------------------------------------------------------

_HEAD = "base: fast\npurpose: x\n"
_BUT = "from recipes.catalog import fast\ndef mine():\n    return fast().but("
MISTAKES = {
    "a misspelt setting": ("mine.yaml", _HEAD + "changes: {lerning_rate: [1, a reason]}", "Fix: learning_rate"),
    "no reason": ("mine.yaml", _HEAD + "changes: {seed: 3}", 'Fix: write [3, "the reason"]'),
    "a list, no pair": ("mine.yaml", _HEAD + "changes: {lora_target_modules: [q_proj, v_proj]}", "and its reason"),
    "another type": ("mine.yaml", _HEAD + "changes: {max_steps: [many, x]}", "Fix: max_steps with a whole number"),
    "a recipe in it": ("mine.yaml", _HEAD + "changes: {recipe: [fast, x]}", "recipe: cannot be changed by a recipe"),
    "changes as text": ("mine.yaml", _HEAD + "changes: none", "changes: is not a mapping"),
    "a misspelt key": ("mine.yaml", _HEAD + "chnages: {seed: [3, a reason]}", "Fix: changes"),
    "a setting beside changes": ("mine.yaml", _HEAD + "seed: 3", "Fix: in changes, write seed"),
    "no purpose": ("mine.yaml", "base: fast", "purpose: is missing"),
    "an unknown base": ("mine.yaml", "base: fats\npurpose: x", "Fix: fast"),
    "another file as its base": ("mine.yaml", "base: ours.yaml\npurpose: x", "ours.yaml is not a shipped recipe"),
    "no base": ("mine.yaml", "seed: 3", "give a settings file to --config"),
    "an unknown engine": ("mine.yaml", _HEAD + "engine: fats.yaml", "Fix: fast"),
    "no micro-batch": ("mine.yaml", _HEAD + "micro_batch_cap: 0", "micro_batch_cap: is 0"),
    "a taken name": ("fast.yaml", _HEAD, "'fast' is the name of a shipped recipe"),
    "a name that is not defined": ("mine.py:mine", "def mine():\n    return fsat()\n", "raises NameError"),
    "an end": ("mine.py:mine", "raise SystemExit(3)\n", "raises SystemExit"),
    "no recipe returned": ("mine.py:mine", "def mine():\n    return 3\n", "no function 'mine' that returns a Recipe"),
    "no function named": ("mine.py:", "def mine(): ...\n", "Fix: use mine.py:NAME"),
    "a bare value": ("mine.py:mine", _BUT + "'a', 'b', seed=3)\n", 'Fix: write [3, "the reason"]'),
    "a name with a blank": ("mine.py:mine", _BUT + "'a b', 'b')\n", "'a b' cannot name a recipe"),
    "a batch that depends on the run": (
        "mine.py:mine",
        _BUT + "'a', 'b', global_batch_size=lambda run: (3, 'c'))\n",
        "global_batch_size: cannot be computed from the run",
    ),
}


@pytest.mark.parametrize(("name", "text", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_a_single_mistake_in_a_recipe_file_is_reported_once_with_the_files_name(files, name, text, expected):
    file = name.partition(":")[0]
    files(**{file: text})
    (line,) = problems_of(name)
    assert expected in line and file in line


def test_all_mistakes_of_a_recipe_file_are_reported_at_once(files):
    files(mine_yaml=_HEAD + "engine: fats.yaml\nchanges: {seed: 3, lerning_rate: [1, a reason]}")
    assert len(problems_of("mine.yaml")) == 3


@pytest.mark.parametrize(
    ("decision", "expected"),
    [
        ('run["sed"], "c"', "KeyError: 'sed' (mine.py). Fix: correct the file"),
        ("3", "seed: needs a value and its reason (mine.py)"),
        ('"x", "a reason"', "seed: needs a whole number"),
    ],
)
def test_a_recipe_value_whose_function_fails_or_returns_a_wrong_value_is_refused(files, decision, expected):
    text = "from recipes.catalog import fast\n\n\ndef _seed(run):\n    return {}\n\ndef mine():\n    {}\n"
    files(mine_py=text.format(decision, "return fast().but('ours', 'b', seed=_seed)"))
    run = run_of("mine.py:mine")
    assert [str(problem) for problem in check(run) if expected in str(problem)]
    with pytest.raises(UserError):
        require_legal(run)


@pytest.mark.parametrize("name", ["missing.yaml", "missing.py", "missing.py:mine", "mine.py:mime", "", "a b"])
def test_a_missing_recipe_file_or_function_is_reported_in_one_line(files, name):
    files(mine_py=PYTHON)
    assert [str(problem).count("\n") for problem in problems_of(name)] == [0]


def test_a_recipe_file_given_to_config_is_refused_with_the_recipe_flag_as_the_fix(files):
    files(mine_yaml=MINE)
    with pytest.raises(UserError, match=r"mine.yaml is a recipe. Fix: --recipe mine.yaml"):
        resolved("--config mine.yaml")
