"""README and the pages of the folders are true: CI runs README's second command, the others work,
and files that they name exist.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running import ROOT

README = (ROOT / "README.md").read_text()
FOLDERS = ("", "recipes", "launch", "accelerate_configs", "azureml", "tests", "tests/benchmarks")
PAGES = {folder: (ROOT / folder / "README.md").read_text() for folder in FOLDERS}
TEXT = "".join(PAGES.values())
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.S)
MOST_WORDS = 1400  # of README, which a person reads before the first training


def test_the_first_code_block_of_the_readme_has_exactly_two_commands():
    assert len(BLOCKS[0][1].strip().splitlines()) == 2


def test_the_readme_stays_within_its_word_limit():
    assert len(README.split()) <= MOST_WORDS


@pytest.mark.parametrize("folder", FOLDERS)
def test_relative_links_in_each_readme_lead_to_existing_files(folder):
    links = re.findall(r"\]\(([\w./]+)\)", PAGES[folder])
    assert not [link for link in links if not (ROOT / folder / link).exists()]


@pytest.mark.parametrize(
    "file", sorted(set(re.findall(r"\b(?:accelerate_configs|launch|recipes|tests)/[\w/.]+\.\w+", TEXT)))
)
def test_every_file_path_in_a_readme_exists(file):
    assert (ROOT / file).exists()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python3? -m (tests[\w.]*)", TEXT))))
def test_each_module_of_tests_that_a_readme_runs_exists(module):
    spec = importlib.util.find_spec(module)
    assert spec is not None and (not spec.submodule_search_locations or importlib.util.find_spec(f"{module}.__main__"))


QUICK = re.findall(r"^recipes (check .*|show .*|list|plan .*|submit .*--dry_run.*)$", TEXT, flags=re.M)


@pytest.mark.parametrize("words", sorted(set(QUICK)))
def test_all_check_show_list_plan_and_submit_dry_run_commands_in_readmes_exit_with_0(words, capsys):
    from launch.cli import main

    assert main(shlex.split(words)) == 0


def in_bash(script: str, folder) -> str:
    """What a script prints in which `recipes` is this checkout's command. Any failure ends it."""
    start = f'set -e\nrecipes() {{ {sys.executable} -m launch "$@"; }}\n'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(["bash", "-c", start + script], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_readmes_chat_example_trains_generates_evaluates_loads_and_merges(tiny_model, tmp_path):
    """Word for word, with a tiny model in place of the Hub's."""
    chats, train, use, merge, load = [content for kind, content in BLOCKS if kind in ("json", "bash", "python")][1:6]
    (tmp_path / "chats.jsonl").write_text(chats)
    (tmp_path / "load.py").write_text(load)
    commands = train.replace("Qwen/Qwen3-0.6B", str(tiny_model)).replace("source .venv/bin/activate\n", "")
    said = in_bash(f"{commands}{use}{merge}{sys.executable} load.py > answer.txt", tmp_path)
    assert "the best by eval_loss" in said and "metric" in said and (tmp_path / "answer.txt").read_text()
    assert (tmp_path / "outputs" / "chats" / "merged" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_readmes_commands_that_repeat_compare_explain_diagnose_and_report_exit_with_0(tmp_path):
    """Word for word, after two short runs, but for a target that such runs reach."""
    commands = re.findall(r"^recipes (?:rerun|compare|diff|explain|doctor|scale)\b.*", TEXT, flags=re.M)
    runs = [
        f"recipes train --max_steps 12 --recipe {name} --output_dir outputs/{name}" for name in ("fast", "standard")
    ]
    said = in_bash("\n".join([*runs, *commands]).replace("train_loss 2.5", "train_loss 9"), tmp_path)
    assert len(commands) == 7 and "train_loss" in said and (tmp_path / "outputs/fast-rerun/run.json").exists()


LAUNCHES = re.findall(r"^(?:accelerate launch|recipes train --recipe|recipes fit) .*$", TEXT, flags=re.M)


@pytest.mark.slow
@pytest.mark.parametrize("command", LAUNCHES)
def test_the_readmes_launches_of_two_processes_exit_with_0(command, tiny_model, texts, tmp_path):
    """Word for word, but for two steps, and a tiny model in place of the Hub's."""
    for name in ("accelerate_configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = command.replace("Qwen/Qwen3-0.6B", str(tiny_model)).replace("texts.jsonl", str(texts))
    in_bash(f"{words} --max_steps 2", tmp_path)
    assert "--num_processes 2" in command
