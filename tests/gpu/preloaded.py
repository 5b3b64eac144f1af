"""Imported once by the process that cases are forked from. Nothing here may start CUDA."""

import gc
import importlib

from recipes.quiet import quiet_libraries

quiet_libraries(verbose=False)  # train.py's first step, which these imports read
for name in ("torch.distributed", "datasets", "launch.train", "launch.data.load", "launch.training.trainer"):
    importlib.import_module(name)
gc.freeze()
