"""`recipes submit`: its flags. What submitting does is in `launch.jobs.submit`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

from launch.flags import Commands, add_fields, count, given, spellings
from launch.jobs import site
from launch.jobs.submit import submit
from launch.jobs.targets import TARGETS, Target
from recipes.errors import UserError


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "submit",
        allow_abbrev=False,
        usage=f"recipes submit {'|'.join(TARGETS)} [--recipe NAME] [--accelerate_config FILE|NAME] [--nodes N] "
        "[--processes_per_node G] [--dry_run] [--output FILE] [target flags] -- [train.py flags]",
    )
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, target in TARGETS.items():
        _add_target(targets, name, target)


def _add_target(targets: Commands, name: str, target: Target) -> None:
    parser = targets.add_parser(
        name,
        prog=f"recipes submit {name}",
        help=target.HELP,
        description=target.HELP,
        epilog=f"Defaults of the target's own flags, from --{fields(target.FLAGS)[0].name} on, can stand under "
        f"`{name}:` in {site.path()}; the command line wins.",
        usage=f"recipes submit {name} [flags] -- [train.py flags]",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", help="one of `recipes list`, or a file of your own [--config's, or standard]")
    parser.add_argument(*spellings("accelerate_config"), metavar="FILE|NAME", help="instead of the recipe's own YAML")
    parser.add_argument("--nodes", type=count, default=1, help="[1]")
    parser.add_argument(*spellings("processes_per_node"), type=count, help="one per GPU")
    parser.add_argument(*spellings("dry_run"), action="store_true", help="print what would be sent, send nothing")
    parser.add_argument("--output", metavar="FILE", help="with --dry_run: write it to a file, and its code beside it")
    preflight = "`recipes doctor` on every node first: a failed check ends the job"
    parser.add_argument("--preflight", action="store_true", help=preflight)
    add_fields(parser, target.FLAGS)
    parser.set_defaults(run=submit_run)


def submit_run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    target = TARGETS[options.target]
    defaults, written = site.defaults(options.target), given(target.FLAGS, options)
    try:
        return submit(
            target,
            target.FLAGS(**{**defaults, **written}),
            argv,
            recipe=options.recipe,
            accelerate_config=options.accelerate_config,
            nodes=options.nodes,
            processes_per_node=options.processes_per_node,
            preflight=options.preflight,
            dry_run=options.dry_run,
            output=options.output,
            comment=site.origins(defaults, written),
        )
    except UserError as error:
        source = {name: str(site.path()) for name in defaults.keys() - written.keys()}
        problems = [replace(one, source=one.source or source.get(one.subject, "")) for one in error.problems]
        raise UserError(*problems) from None
