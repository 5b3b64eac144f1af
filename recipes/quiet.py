"""Silences the libraries, so that our own lines are seen. Importing this module imports none."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """No log records and no warnings from any library inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def quiet_libraries(verbose: bool) -> None:
    """Errors only, and no progress bars, from now on. Call it before the heavy imports, which read
    these variables and make most of the noise.
    """
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads it too
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's reducer warns in C++
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "deepspeed", "accelerate", "torch.distributed", "datasets", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
