"""Imported once by the process that tests fork ranks from: it saves each of them ten seconds."""

import gc

import deepspeed  # noqa: F401
import torch.distributed  # noqa: F401

# It is all still there at the end of a rank: no collection need look at it, nor copy its pages.
gc.freeze()
