"""What the processes that cases are forked from import once: it saves each case seconds."""

import gc
from importlib import import_module

_HEAVY = "launch.train launch.training.build launch.training.model launch.data.load launch.output.resume peft "
_HEAVY += "scipy.io sklearn.metrics launch.commands.plan launch.scaling.report"
_LIGHT = "catalogue check compare rerun train"


def preload(heavy: bool) -> None:
    from recipes.rules.check import check
    from recipes.run import resolve

    names = (
        _HEAVY.split()
        if heavy
        else ["launch.cli", "launch.train", *(f"launch.commands.{name}" for name in _LIGHT.split())]
    )
    for name in names:
        import_module(name)
    check(resolve([]))  # it keeps what it has read of the libraries' source
    # No collection in a fork need look at what is imported, nor copy its pages.
    gc.collect()
    gc.disable()
