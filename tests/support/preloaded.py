"""Imported once by the process that tests fork ranks from: it saves each of them ten seconds."""

import gc
import importlib

for name in (
    "deepspeed",
    "torch.distributed",
    "launch.training.build",
    "launch.training.model",
    "launch.output.resume",
):
    importlib.import_module(name)

# It is all still there at the end of a rank: no collection need look at it, nor copy its pages.
gc.freeze()
