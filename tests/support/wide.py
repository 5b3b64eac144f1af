"""A tiny model whose memory is nearly all logits: a micro-batch takes much memory, little time."""

import json
from functools import cache
from pathlib import Path

from tests.support.running import python

LENGTH = 512  # tokens of a long text


@cache
def imported_gb() -> float:
    """GB of RAM that a new process needs before its model: 0.5, or 0.9 with CUDA's libraries."""
    code = "import deepspeed, launch.training.trainer, psutil; print(psutil.Process().memory_info().rss)"
    return float(python("-c", code).stdout.split()[-1]) / 1e9


def wide_model(folder: Path) -> Path:
    """About 0.4 GB for each example of `LENGTH` tokens in a micro-batch."""
    from tests.support.models import write_llama

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 64_000, "max_position_embeddings": LENGTH}
    return write_llama(folder, tie_word_embeddings=True, **sizes)


def texts_of(file: Path, lengths: list[int]) -> Path:
    """Texts of just so many tokens, the last of which ends them."""
    lines = [{"text": (f"{n} " + "words " * length)[: length - 1]} for n, length in enumerate(lengths)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
