"""The `recipes` command itself: help, mistakes, and that each command imports only itself."""

import os
import subprocess
import sys

import pytest

from launch import train
from launch.cli import COMMANDS, main
from recipes import __version__, legal
from tests.support.running import python, read_record


def test_help_lists_every_command_once_in_its_group(capsys):
    assert main(["--help"]) == 0
    groups = [block.splitlines() for block in capsys.readouterr().out.split("\n\n")[2:-1]]
    assert [heading for heading, *_ in groups] == ["choose:", "check:", "run:", "understand:"]
    assert [line.split()[0] for _, *lines in groups for line in lines] == list(COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accelerate-recipes {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: recipes {name}")


def test_a_command_ignores_rank_world_size_and_engine_variables_that_another_launcher_has_set(monkeypatch, capsys):
    engines = {f"ACCELERATE_USE_{name}" for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM")}
    left = {"RANK", "LOCAL_RANK", "WORLD_SIZE", *engines}
    for name in left:
        monkeypatch.setenv(name, "2")
    assert main(["train"]) == 2 and "Fix: unset RANK LOCAL_RANK WORLD_SIZE" in capsys.readouterr().err
    assert main(["list"]) == 0 and not left & {*os.environ}


def test_train_py_help_lists_every_setting(capsys):
    assert train.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert [name for name in legal.settings() if f"--{name}" not in printed] == []
    assert "rank of the LoRA matrices [16]\n" in printed


@pytest.mark.parametrize("words", ["--gpu_memory nan", "--gpu_memory -5", "--bandwidth inf", "--mfu 1.1", "--mfu x"])
def test_plan_refuses_a_flag_value_that_is_not_a_number_above_0(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--model", "7B", *words.split()])
    assert "is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("start", ["import accelerate_recipes as a; sys.exit(a.main())", "import launch.__main__"])
def test_a_keyboard_interrupt_while_launch_cli_is_imported_prints_one_line(start):
    """A module that raises stands for a signal while `launch.cli` is imported."""
    code = f"""
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "launch.cli": raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
{start}"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


# --- Imports --------------------------------------------------------------------------------------

LIBRARIES = {"torch", "transformers", "accelerate", "numpy", "deepspeed", "peft", "bitsandbytes", "datasets"}
OTHER_COMMANDS = {
    *("launch.jobs", "launch.doctor", "launch.scaling", "launch.explain", "launch.fit", "launch.training"),
    *("launch.commands.plan", "launch.commands.use", "launch.commands.train", "recipes.planner"),
}
UNUSED = {
    "list": {*LIBRARIES, *OTHER_COMMANDS, "recipes.rules", "recipes.run", "recipes.legal", "yaml"},
    "show fast": {*LIBRARIES, *OTHER_COMMANDS},
    "check --recipe memory": {*LIBRARIES, *OTHER_COMMANDS, "rich"},
    "check --recipe fast --accelerate_config memory --report_to wandb --optim adamw_8bit --deepspeed x.json": LIBRARIES,
    "--help": {*LIBRARIES, *OTHER_COMMANDS, "launch.commands.catalogue", "launch.commands.compare"},
    "plan --model 7B --gpu L4 --optim nine": {"torch", "transformers"},
    "scale report --help": LIBRARIES,
}


@pytest.mark.parametrize("words", UNUSED)
def test_a_command_imports_no_library_or_module_that_it_does_not_use(words):
    code = (
        "import sys\nfrom launch.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules)"
    )
    done = python("-c", code, *words.split())
    assert done.returncode == 0 and not {*done.stdout.splitlines()[-1].split()} & UNUSED[words]


def end_without_reader(*words: str) -> tuple[int, str]:
    """The exit code and stderr of a command whose reader has closed the pipe."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as pipe:  # noqa: PTH123 # a descriptor
        done = subprocess.run([sys.executable, *words], stdout=pipe, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("words", "code"), [("list", 1), ("--help", 0)])
def test_a_command_whose_stdout_pipe_is_closed_prints_no_error(words, code):
    assert end_without_reader("-m", "launch", words) == (code, "")


@pytest.mark.slow
def test_a_training_whose_stdout_pipe_is_closed_still_finishes(tmp_path):
    words = "launch train --recipe standard --use_cpu --num_processes 1 --max_steps 2 --output_dir"
    assert end_without_reader("-m", *words.split(), str(tmp_path))[0] == 0
    assert read_record(tmp_path)["status"] == "finished"
