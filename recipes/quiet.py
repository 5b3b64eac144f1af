"""Less noise from the libraries, so that our own lines are seen. Importing this imports none of them."""

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
    """Errors only, for the rest of the process. Call it before the heavy imports: most of the noise is theirs."""
    if verbose:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "deepspeed", "accelerate", "torch.distributed", "datasets", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quiet_progress_bars(verbose: bool) -> None:
    """No progress bars. Only the imported libraries themselves can turn theirs off."""
    if verbose:
        return
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
