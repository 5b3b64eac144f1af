"""The `recipes` command, which starts fast: it imports only the command that is called.

The module of a command has a function `add_parser(commands)`, which adds the command's parser to
argparse's `commands`. This parser sets `run`, the function that carries out the command. `run` gets
the parsed options and train.py's flags, which follow `--` or are unknown to the parser.
"""

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from launch.flags import Parser
from launch.host.files import print_without_reader
from launch.host.signals import Preempted
from launch.terminal import console, finish_printing, print_problems
from recipes import __version__
from recipes.errors import UserError, mistake


class Command(NamedTuple):
    """A command: its line in `recipes --help`, and the modules that hold its parser. If there are
    several modules, each one holds a subcommand, such as `recipes scale run`.
    """

    summary: str
    modules: tuple[str, ...]
    train_flags: bool = False  # the command accepts train.py's flags too
    as_train: bool = False  # the command does its work in this process, and reports a failure as train.py does


_USAGE = "recipes [-h] [--version] COMMAND ..."
_CATALOGUE, _COMPARE = ("launch.commands.catalogue",), ("launch.commands.compare",)
_TRAIN, _USE = ("launch.commands.train",), ("launch.commands.use",)
# Names that TRL, axolotl and other tools give to our commands.
_SYNONYMS = dict.fromkeys(("sft", "run", "finetune", "fine-tune", "launch"), "train") | {"chat": "generate"}

GROUPS = {
    "choose": {
        "list": Command("print the recipes, one line each", _CATALOGUE),
        "show": Command("print the settings that a recipe or a run sets, each with its reason", _COMPARE),
        "where": Command("print the paths of train.py and of the YAMLs in the installed package", _CATALOGUE),
        "plan": Command("find the recipe that fits a GPU, before anything runs", ("launch.commands.plan",), True),
    },
    "check": {
        "check": Command("report the mistakes in a run before it starts", ("launch.commands.check",), True),
        "fit": Command("find the largest micro-batch that really runs here", _TRAIN, True),
        "doctor": Command("test this machine and its network for training", ("launch.doctor.command",)),
    },
    "run": {
        "prepare": Command("tokenize the data ahead of time, without a GPU", _TRAIN, True, as_train=True),
        "train": Command("train here: accelerate launch with the recipe's YAML", _TRAIN, True),
        "rerun": Command("repeat a recorded run, and list what differs here", ("launch.commands.rerun",), True),
        "submit": Command("run a recipe here, on Slurm or on Azure ML", _TRAIN),
        "status": Command("show the state of runs, submitted or not", _TRAIN),
        "logs": Command("print the log of a submitted run", _TRAIN),
        "evaluate": Command("measure the model of a run on its held-out or other data", _USE, True, as_train=True),
        "generate": Command("answer a prompt with the model of a run", _USE, as_train=True),
        "merge": Command("merge a trained adapter into its base model, and check the result", _USE, as_train=True),
    },
    "understand": {
        "compare": Command("put runs side by side: settings, speed, memory, results", _COMPARE),
        "diff": Command("show the differences between two runs or recipes", _COMPARE),
        "scale": Command(
            "measure multi-GPU scaling, and name the bottleneck", ("launch.scaling.run", "launch.scaling.report"), True
        ),
        "explain": Command(
            "measure the effects of accumulation and mixed precision", ("launch.explain.tables",), as_train=True
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 done, 1 failed or target missed, 2 mistake, 75 signal, 130 Ctrl-C."""
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # Ctrl-C may also come while a command is being imported
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the program that reads our output, such as `head`, has ended
        return 0
    finally:
        finish_printing()


def _main(argv: list[str]) -> int:
    border = argv.index("--") if "--" in argv else len(argv)
    own, passed_on = argv[:border], argv[border + 1 :]
    name = own[0] if own else ""
    if name in ("-h", "--help", "--version"):
        print(f"accelerate-recipes {__version__}" if name == "--version" else _help())
        return 0
    command = COMMANDS.get(name)
    try:
        if command is None:
            raise _no_command(name)
        if name in ("train", "fit", "submit", "rerun"):
            print_without_reader()  # a training continues when nobody reads its output
        _forget_launcher(name)
        parser = _parser(name, command)
        options, rest = parser.parse_known_args(own)
        _require_known(rest, options.parser, command)
        return options.run(options, [*rest, *passed_on])
    except (KeyboardInterrupt, Preempted, Exception) as error:
        if command and command.as_train:
            from launch.host.world import World
            from launch.training import failure

            return failure.report(error, World())
        if not isinstance(error, UserError):
            raise
        print_problems(error.problems, console(stderr=True))
        return 2


def _forget_launcher(name: str) -> None:
    """Delete the environment variables in which another launcher names its engine and its ranks.
    Raises `UserError` if that launcher started several processes of `train`, `fit` or `rerun`.
    """
    count = os.environ.get("WORLD_SIZE", "")
    if name in ("train", "fit", "rerun") and count not in ("", "1"):
        what = f"is {count}: another launcher announced several processes, and `recipes {name}` starts its own"
        fix = "unset RANK LOCAL_RANK WORLD_SIZE; on several nodes, start `accelerate launch` on each node"
        raise mistake("WORLD_SIZE", what, fix, "environment")
    engines = (f"ACCELERATE_USE_{name}" for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM"))
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", *engines):
        os.environ.pop(variable, None)


def _require_known(rest: list[str], parser: Parser, command: Command) -> None:
    """Raise `UserError` for an argument of `rest` that the command does not know.

    If the command accepts train.py's flags too, a later check reports all mistakes in those flags.
    So this function then refuses a flag only if the most similar flag is one of the command's own.
    """
    known, is_submit = set[str](), "submit" in parser.prog
    if rest and (command.train_flags or is_submit):
        from recipes.run.command_line import name_of, names_with_a_fix  # only here, because reading them takes time

        known = names_with_a_fix()
    for flag in (word.partition("=")[0] for word in rest):
        if command.train_flags and (not flag.startswith("--") or name_of(flag)[0] in known):
            continue
        similar = get_close_matches(flag[2:].replace("-", "_"), [*parser.flags, *known], n=1, cutoff=0.7)
        fix = f"--{similar[0]}" if similar and similar[0] in parser.flags else ""
        if fix or not command.train_flags:
            other = f"see `{parser.prog} --help`" + "; train.py's flags come after --" * is_submit
            other = f"put the prompt in quotes, or {other}" if parser.prog.endswith("generate") else other
            raise mistake(flag, f"is not an argument of `{parser.prog}`", fix or other)


def _help() -> str:
    lines = [f"usage: {_USAGE}", "", "Explained recipes for Hugging Face Trainer and Accelerate."]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<9}{command.summary}" for name, command in commands.items())]
    return "\n".join([*lines, "", "`recipes COMMAND --help` lists the flags of a command."])


def _no_command(name: str) -> UserError:
    similar = get_close_matches(_SYNONYMS.get(name, name), COMMANDS, n=1, cutoff=0.7)
    fix = f"recipes {similar[0]}" if similar else "one of " + ", ".join(COMMANDS)
    return mistake(name or "recipes", "is not a command" if name else "needs a command", fix)


def _parser(name: str, command: Command) -> Parser:
    """Return the parser of `recipes`, with the commands that the modules of `command` add."""
    parser = Parser("recipes", usage=_USAGE)
    commands = parser.add_subparsers(prog="recipes", required=True, metavar="COMMAND")
    modules = [import_module(module) for module in command.modules]
    if len(modules) > 1:
        nested = commands.add_parser(name, description=command.summary)
        names = "|".join(module.rpartition(".")[2] for module in command.modules)
        commands = nested.add_subparsers(required=True, metavar=names)
    for module in modules:
        module.add_parser(commands)
    if command.train_flags and len(modules) == 1:
        own = commands.choices[name]
        own.usage = f"{own.format_usage().removeprefix('usage: ').rstrip()} [any train.py flags]"
    return parser
