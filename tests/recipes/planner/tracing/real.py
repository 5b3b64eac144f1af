"""A real micro-batch on this CPU, whose allocations are counted as those of a trace are."""

import contextlib
import copy

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from recipes.planner.shapes import Case
from recipes.planner.tracing.live_bytes import LiveBytes
from tests.recipes.planner.small import peak


def real_peak(config, case: Case, padding: int = 0) -> int:
    """Peak bytes of a real forward and backward, of which nothing is replaced."""
    classifies = case.task == "sequence_classification"
    config = copy.deepcopy(config)
    auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    asked = {} if case.attention is None else {"attn_implementation": case.attention}
    model = auto.from_config(config, dtype=getattr(torch, case.dtype), **asked).train()
    model.config.use_cache = model.config.get_text_config().use_cache = False
    ids = torch.ones(case.batch, case.length, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": torch.zeros(case.batch, dtype=torch.long) if classifies else ids.clone()}
    if case.mask:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][:, case.length - padding :] = 0
    live = LiveBytes()
    live.ignore([*model.parameters(), *model.buffers()])
    cast = torch.autocast("cpu", getattr(torch, case.autocast)) if case.autocast else contextlib.nullcontext()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(live.gradient)
    with live:
        with cast:
            loss = model(**inputs).loss
        loss.backward()
    return peak(live)
