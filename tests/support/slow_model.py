"""A model whose forward pass takes a known time, so that a signal arrives during a step."""

import shutil
from pathlib import Path
from textwrap import indent

from tests.support.models import change

_CODE = """\
import os
import time

from transformers import LlamaForCausalLM


class SlowLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
{pause}
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
"""


def write_model_with(pause: str, folder: Path, tiny_model: Path) -> list[str]:
    """The tiny model that runs these statements before its forward pass; the flags to load it."""
    shutil.copytree(tiny_model, folder)
    (folder / "modeling_slow.py").write_text(_CODE.format(pause=indent(pause, " " * 8)))
    change(folder, auto_map={"AutoModelForCausalLM": "modeling_slow.SlowLlamaForCausalLM"})
    return ["--model_name_or_path", str(folder), "--trust_remote_code"]
