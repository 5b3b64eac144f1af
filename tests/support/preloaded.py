"""Imported once by the process that tests fork ranks from: it saves each of them ten seconds."""

import gc
import importlib

LAUNCH = ("launch.output.resume", "launch.training.build", "launch.training.model")
for name in ("deepspeed", "torch.distributed", *LAUNCH):
    importlib.import_module(name)

# It is all still there at the end of a rank: no collection need look at it, nor copy its pages.
gc.freeze()
