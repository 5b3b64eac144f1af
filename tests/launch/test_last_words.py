"""Mistakes that are found before, during and after the libraries' imports, under each launcher:
they are printed whole, and under our own launcher nothing else is.
"""

import sys

import pytest

from launch.host.launcher import LAUNCHER
from launch.train import main
from tests.launch.host.test_launcher import ACCELERATE, ONE, TORCHRUN, TWO
from tests.support.rows import jsonl
from tests.support.running import ROOT, SCRIPT, launch, python, run

RECIPES = [sys.executable, "-m", "launch"]

LAUNCHERS = {
    "python": [sys.executable, str(SCRIPT)],
    "accelerate launch": [*ACCELERATE, *ONE, str(SCRIPT)],
    "accelerate launch, 2 processes": [*ACCELERATE, *TWO, str(SCRIPT)],
    "torchrun": [*TORCHRUN, str(SCRIPT)],
    "our launcher": [sys.executable, str(LAUNCHER), *TWO, str(SCRIPT)],
    "recipes train": [*RECIPES, "train", "--num_processes", "2"],
    "recipes submit local": [*RECIPES, "submit", "local", "--processes_per_node", "2", "--"],
}
OURS = ("python", "our launcher", "recipes train", "recipes submit local")

TEXT = '{"text": "some words to learn"}\n'
DATA = "--model_name_or_path {model} --dataset_name {folder}/data.jsonl"
# Flags, a part of what train.py prints, and the files beside the run. {folder} is where they are.
MISTAKES: dict[str, tuple[str, str, dict[str, str]]] = {
    "an unknown recipe": ("--recipe fats", "Fix: fast", {}),
    "a value that torch refuses": ("--adam_beta1 1.0", "Invalid beta parameter", {}),
    "several at once": ("--recipe fats --lerning_rate 1 --seed x", "a whole number", {}),
    "a configuration that is not YAML": ("--config {folder}/mine.yaml", "line 2", {"mine.yaml": "a: [\nb: }"}),
    "a model that is not there": (DATA.replace("{model}", "{folder}/nowhere"), "nowhere", {"data.jsonl": TEXT}),
    "data that are not there": (DATA, "data.jsonl", {}),
    "data without the column": (DATA, "words", {"data.jsonl": '{"words": "x"}\n'}),
    "a broken line": (DATA, "line 2 of data.jsonl", {"data.jsonl": TEXT + '{"text": "cut\n' + TEXT}),
    "an output folder in a file": (
        f"{DATA} --output_dir {{folder}}/data.jsonl/out", "cannot be written: Not a directory", {"data.jsonl": TEXT}
    ),
}  # fmt: skip

# Found on resolving, several at once; by the probe, after the imports; once the data are read.
UNDER_EVERY_LAUNCHER = ("several at once", "a value that torch refuses", "a broken line")
AT_EVERY_COMMIT = ("recipes train", "torchrun")


@pytest.fixture
def flags(tiny_model, tmp_path):
    """Writes the files of a mistake, and returns its flags."""

    def written(name: str) -> list[str]:
        words, _, files = MISTAKES[name]
        for file, content in files.items():
            (tmp_path / file).write_text(content)
        chosen = words.format(folder=tmp_path, model=tiny_model).split()
        return chosen if "--output_dir" in chosen else [*chosen, "--output_dir", str(tmp_path / "out")]

    return written


def our_lines(output: str) -> list[str]:
    """The distinct problems in an output, wherever they stand in it."""
    lines = [line.strip() for line in output.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("error  ")))


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        pytest.param(
            name, launcher, marks=[pytest.mark.slow] * (name != "several at once" or launcher not in AT_EVERY_COMMIT)
        )
        for name in UNDER_EVERY_LAUNCHER
        for launcher in LAUNCHERS
    ],
)
def test_a_users_mistake_is_printed_under_every_launcher_and_our_launcher_adds_nothing(name, launcher, flags, tmp_path):
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outcome = run([*LAUNCHERS[launcher], *flags(name)], tmp_path, environment, cwd=tmp_path)
    lines = our_lines(outcome.output)
    assert any(MISTAKES[name][1] in line for line in lines), outcome.output
    if launcher in OURS:
        known = ("error  ", "advice  ", "no GPU here")
        lines = [line for line in outcome.output.splitlines() if not line.endswith(" ...")]  # of the start's progress
        foreign = [line for line in lines if not line.startswith(known)]
        assert (outcome.code, foreign) == (2, []), outcome.output


@pytest.mark.parametrize("name", MISTAKES)
def test_a_single_process_prints_nothing_but_the_users_mistake(name, flags, capsys):
    """One rank, in this process: everything is imported already."""
    code, printed = main(flags(name)), capsys.readouterr()
    lines = printed.err.splitlines()
    other = [line for line in printed.out.splitlines() if not line.startswith("advice  ") and not line.endswith(" ...")]
    assert (code, other) == (2, []), printed.out
    assert lines == our_lines(printed.err) and any(MISTAKES[name][1] in line for line in lines), printed.err


@pytest.mark.parametrize(
    ("flags", "said"), [("--recipe fats", "fats"), ("--model_name_or_path a/b --dataset_name {data}", "has words")]
)
def test_a_mistake_in_flags_or_data_columns_is_found_before_torch_is_imported(flags, said, tmp_path):
    words = flags.format(data=jsonl(tmp_path, [{"words": "x"}])).split()
    code = (
        "import sys; from launch.train import main; code = main(sys.argv[1:]); "
        "print(code, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = python("-c", code, *words)
    assert done.stdout.splitlines()[-1] == "2 []" and said in done.stderr


def test_two_ranks_report_an_unknown_recipe_once(tiny_model, tmp_path):
    outcome = launch("--recipe", "fats", output=tmp_path, processes=2, config="standard.yaml")
    assert outcome.output.count("there is no recipe") == 1, outcome.output


@pytest.mark.parametrize("command", [[str(SCRIPT)], ["-m", "launch", "train"]], ids=["train.py", "recipes train"])
def test_a_training_started_by_srun_without_accelerate_launch_or_torchrun_exits_with_2(command, tmp_path):
    environment = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "PYTHONPATH": str(ROOT)}
    outcome = run([sys.executable, *command, "--output_dir", str(tmp_path)], tmp_path, environment)
    lines = outcome.output.splitlines()
    (line,) = (line for line in lines if not line.startswith("advice") and not line.endswith(" ..."))
    assert outcome.code == 2 and "accelerate launch" in line
