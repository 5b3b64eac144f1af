"""`recipes submit`: its flags. What submitting does is in `launch.jobs.submit`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace

from launch.flags import Commands, add_fields, count, given, spellings
from launch.jobs.job import Target
from launch.jobs.submit import TARGETS, from_site, site_defaults, site_file, submit
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


def _add_target(targets: Commands, name: str, target: type[Target]) -> None:
    parser = targets.add_parser(
        name,
        prog=f"recipes submit {name}",
        help=target.HELP,
        description=target.HELP,
        epilog=f"Defaults of the target's own flags, from --{fields(target)[0].name} on, can stand under "
        f"`{name}:` in {site_file()}; the command line wins.",
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
    add_fields(parser, target)
    parser.set_defaults(run=submit_run)


def submit_run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    target = TARGETS[options.target]
    written = given(target, options)
    defaults = {name: value for name, value in site_defaults(options.target).items() if name not in written}
    try:
        return submit(
            target(**defaults, **written),
            argv,
            recipe=options.recipe,
            accelerate_config=options.accelerate_config,
            nodes=options.nodes,
            processes_per_node=options.processes_per_node,
            preflight=options.preflight,
            dry_run=options.dry_run,
            output=options.output,
            comment=from_site(defaults),
        )
    except UserError as error:
        source = str(site_file())
        problems = [replace(one, source=source) if one.subject in defaults else one for one in error.problems]
        raise UserError(*problems) from None
