"""Imported once by the process from which the tests fork ranks: what takes each of them ten
seconds otherwise.
"""

import gc

import deepspeed  # noqa: F401
import torch.distributed  # noqa: F401

# It is all still there at the end of a rank: no collection need look at it, nor copy its pages.
gc.freeze()
