"""The libraries' noise, turned down unless --verbose: our own lines are what a person came for."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries(verbose: bool) -> None:
    """Before the heavy imports: most of the noise is made while importing."""
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
    """After the imports: what can only be turned off through the libraries themselves."""
    if verbose:
        return
    import datasets
    from transformers.utils import logging as transformers_logging

    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
