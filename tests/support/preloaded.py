"""Imported once by the process that tests fork ranks from: it saves each of them ten seconds."""

import gc
import importlib

from recipes.quiet import quiet_libraries

quiet_libraries(verbose=False)  # train.py's first step, which these imports read
LAUNCH = ("launch.output.resume", "launch.training.trainer", "launch.training.model")
for name in ("deepspeed", "torch.distributed", *LAUNCH):
    importlib.import_module(name)

# It is all still there at the end of a rank: no collection need look at it, nor copy its pages.
gc.freeze()
