"""Imported once by the process that cases are forked from: it saves each of them seconds."""

import gc
from importlib import import_module

from launch import cli
from recipes.rules.check import check
from recipes.run import resolve

MODULES = "launch.train launch.training.build launch.training.model launch.training.data launch.output.resume peft"
MODULES += " scipy.io sklearn.metrics"
for name in [*MODULES.split(), *{module for command in cli.COMMANDS.values() for module in command.modules}]:
    import_module(name)

check(resolve([]))  # it keeps what it has read of the libraries' source

# No collection in a fork need look at what is imported, nor copy its pages.
gc.collect()
gc.disable()
