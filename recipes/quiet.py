"""Silences the libraries, so that our own lines are seen. This module imports no library."""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress the log records and warnings of all libraries inside the block."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def quiet_libraries(verbose: bool) -> None:
    """Unless `verbose`, let libraries print errors only, and no progress bars. Call this before you
    import the libraries, because an import reads the environment variables that are set here.
    """
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers reads this variable too
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # without a network, it would print every retry
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # datasets also raises each error that it logs
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP's reducer warns in C++
    warnings.filterwarnings("ignore")
    names = "DeepSpeed deepspeed accelerate torch.distributed torch.utils.cpp_extension bitsandbytes"
    for name in names.split():
        logging.getLogger(name).setLevel(logging.ERROR)
