"""Mistakes that are found before, during and after the libraries' imports, under each launcher: a
terminal of 24 lines ends with our lines, whole; and under our own launcher nothing else is printed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from launch.train import main
from tests.support.running import ROOT, SCRIPT, Outcome, run

COLUMNS, ROWS = 100, 24
CONFIGS = ROOT / "accelerate_configs"
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
TWO = ["--config_file", str(CONFIGS / "standard.yaml"), "--num_processes", "2", "--main_process_port", "0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
OUR_LAUNCHER = [sys.executable, str(ROOT / "launch" / "host" / "launcher.py")]
RECIPES = [sys.executable, "-m", "launch"]

LAUNCHERS = {
    "python": [sys.executable, str(SCRIPT)],
    "accelerate launch": [*ACCELERATE, "--config_file", str(CONFIGS / "single.yaml"), str(SCRIPT)],
    "accelerate launch, 2 processes": [*ACCELERATE, *TWO, str(SCRIPT)],
    "torchrun": [*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(SCRIPT)],
    "our launcher": [*OUR_LAUNCHER, *TWO, str(SCRIPT)],
    "recipes train": [*RECIPES, "train", "--num_processes", "2"],
    "recipes submit local": [*RECIPES, "submit", "local", "--processes_per_node", "2", "--"],
}
OURS = ("python", "our launcher", "recipes train", "recipes submit local")


@dataclass(frozen=True)
class Mistake:
    """`files` are written beside the run, and {folder} in flags and files is where they are.

    `printed` is a part of what train.py prints.
    """

    flags: str
    printed: str
    files: dict[str, str] | None = None


TEXT = '{"text": "some words to learn"}\n'
DATA = "--model_name_or_path {model} --dataset_name {folder}/data.jsonl"

MISTAKES = {
    "an unknown recipe": Mistake("--recipe fats", "Fix: fast"),
    "a misspelt flag": Mistake("--lerning_rate 1e-4", "--learning_rate"),
    "a word that is not a flag": Mistake("fast", "is not a flag"),
    "text for a number": Mistake("--learning_rate high", "takes a number"),
    "a value that is none of the choices": Mistake("--eval_strategy always", "one of no, steps"),
    "JSON that is not valid": Mistake("--accelerator_config {{even_batches:1}}", "JSON"),
    "a batch that does not divide": Mistake("--per_device_train_batch_size 5", "global_batch_size"),
    "a value that torch refuses": Mistake("--adam_beta1 1.0", "Invalid beta parameter"),
    "a batch of nothing": Mistake("--global_batch_size 0", "from 1 up"),
    "settings that exclude each other": Mistake("--packing --padding_free", "--packing false"),
    "several at once": Mistake("--recipe fats --lerning_rate 1 --seed x", "a whole number"),
    "a configuration that is not there": Mistake("--config {folder}/mine.yaml", "cannot be read"),
    "a configuration that is not YAML": Mistake("--config {folder}/mine.yaml", "line 2", {"mine.yaml": "a: [\nb: }"}),
    "a misspelt setting in it": Mistake("--config {folder}/mine.yaml", "seed", {"mine.yaml": "sead: 1\n"}),
    "a recipe of one's own without its base": Mistake(
        "--recipe {folder}/mine.yaml", "base", {"mine.yaml": "base: fats\npurpose: x\nchanges: {{}}\n"}
    ),
    "a DeepSpeed JSON that is not there": Mistake("--deepspeed {folder}/ds.json", "ds.json"),
    "a model that is not there": Mistake(
        "--model_name_or_path {folder}/nowhere --dataset_name {folder}/data.jsonl", "nowhere", {"data.jsonl": TEXT}
    ),
    "data that are not there": Mistake(DATA, "data.jsonl"),
    "data without the column": Mistake(DATA, "words", {"data.jsonl": '{{"words": "x"}}\n'}),
    "data without labels": Mistake(f"{DATA} --task sequence_classification", "label", {"data.jsonl": TEXT}),
    "a split that is not there": Mistake(f"{DATA} --dataset_train_split validation", "train", {"data.jsonl": TEXT}),
    "data without a line": Mistake(DATA, "empty", {"data.jsonl": ""}),
    "an output folder that is a file": Mistake(
        f"{DATA} --output_dir {{folder}}/data.jsonl/out", "output_dir", {"data.jsonl": TEXT}
    ),
}


# Found on resolving, several at once; by the probe, after the imports; once the data are read.
UNDER_EVERY_LAUNCHER = ("several at once", "a value that torch refuses", "data without the column")


@pytest.fixture
def flags(tiny_model, tmp_path):
    """Writes the files of a mistake, and returns its flags."""

    def written(mistake: Mistake) -> list[str]:
        for name, content in (mistake.files or {}).items():
            (tmp_path / name).write_text(content.format() if "{{" in content else content)
        words = mistake.flags.format(folder=tmp_path, model=tiny_model).split()
        return words if "--output_dir" in words else [*words, "--output_dir", str(tmp_path / "out")]

    return written


def started(launcher: str, flags: list[str], folder: Path) -> Outcome:
    return run([*LAUNCHERS[launcher], *flags], folder, {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, cwd=folder)


def screen(output: str) -> list[str]:
    """The lines that a terminal shows whole at the end of an output. A long one takes more rows."""
    shown, rows = [], ROWS - 1  # the last one is the prompt's
    for line in reversed(output.rstrip("\n").split("\n")):
        rows -= max(1, -(-len(line) // COLUMNS))
        if rows < 0:
            break
        shown.insert(0, line)
    return shown


def our_lines(output: str) -> list[str]:
    """The distinct problems in an output, wherever they stand in it."""
    lines = [line.strip() for line in output.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("error  ")))


def assert_ends_with_our_lines(outcome: Outcome, mistake: Mistake, launcher: str) -> None:
    lines = our_lines(outcome.output)
    assert any(mistake.printed in line for line in lines), outcome.output
    assert set(lines) <= {line.strip() for line in screen(outcome.output)}, outcome.output
    if launcher in OURS:
        foreign = [
            line for line in outcome.output.splitlines() if not line.startswith(("error  ", "advice  ", "no GPU here"))
        ]
        assert (outcome.code, foreign) == (2, []), outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", UNDER_EVERY_LAUNCHER)
def test_a_mistake_has_the_last_word(name, launcher, flags, tmp_path):
    outcome = started(launcher, flags(MISTAKES[name]), tmp_path)
    assert_ends_with_our_lines(outcome, MISTAKES[name], launcher)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_rank_prints_nothing_else(name, flags, capsys):
    """One rank, in this process: everything is imported already."""
    code, printed = main(flags(MISTAKES[name])), capsys.readouterr()
    lines = printed.err.splitlines()
    assert (code, printed.out) == (2, "")
    assert lines == our_lines(printed.err) and any(MISTAKES[name].printed in line for line in lines), printed.err


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("a misspelt flag", "recipes train"),
        ("several at once", "recipes submit local"),
        ("an unknown recipe", "our launcher"),
        ("several at once", "torchrun"),
        ("several at once", "accelerate launch"),
    ],
)
def test_some_of_them_at_every_commit(name, launcher, flags, tmp_path):
    outcome = started(launcher, flags(MISTAKES[name]), tmp_path)
    assert_ends_with_our_lines(outcome, MISTAKES[name], launcher)
