"""Published readings of the memory of one Trainer run, beside the plan of the same run.

    python -m tests.benchmarks.published [development|held_out]

Rebuilt here are the loops of their time: what the losses of transformers 4.45 (Granite) and 4.48
copied, the cache that GPTBigCode filled while it trained, gradients that zero_grad kept, the
context that the same source names, and a softmax that kept its input: derivatives.yaml of torch
1.10 has `_softmax_backward_data(grad, result, dim, self)`, where later ones pass the input's dtype
alone. A fixed seed draws the development half. No constant was fitted to either half.

Left out: readings with experts (modules of their own then, which bitsandbytes packed; parameters in
three dimensions since transformers 5, which it leaves), and those of FSDP's version 1.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    BertConfig,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    PreTrainedConfig,
)
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast

from recipes.planner.allocator import with_cached
from recipes.planner.fits import Estimator
from recipes.planner.footprint import Memory
from recipes.planner.shapes import Components
from recipes.planner.tracing.kernels import _Softmax
from recipes.planner.tracing.trace import trace
from recipes.run import RunSpec, here, resolve
from recipes.run.hardware import Gpu, Hardware

MIB = 2**20
V100, RTX_3090, A100 = (Gpu("V100", (7, 0), 16 << 30), Gpu("RTX 3090", (8, 6), 24 << 30), Gpu("A100", (8, 0), 80 << 30))


@dataclass(frozen=True)
class Reading:
    """MiB that were read: of the process by nvidia-smi, or the peak that torch had allocated.

    `hfdoc`: "Methods and tools for efficient training on a single GPU", Hugging Face, 2022: a V100,
    1343 MiB of it in use before the model is loaded. `mscherrmann`: testGPUMemoryBertTraining.ipynb
    of mscherrmann.github.io. `fms`: scripts/benchmarks/refs/a100_80gb.csv of
    foundation-model-stack/fms-acceleration, packed to 4,096 tokens (SantaCoder 2,048), with
    transformers 4.48.1; PowerLM's of a100_80gb_granite.csv, with 4.45.2.
    """

    name: str
    card: Gpu
    config: PreTrainedConfig
    flags: str
    mib: float

    def __str__(self) -> str:
        return self.name

    @property
    def of_process(self) -> bool:
        return self.name.startswith("hfdoc")


def bert_large() -> BertConfig:
    return BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def _decoder(kind: type, width: int, layers: int, heads: int, groups: int, inner: int, words: int, **more: object):
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": words}
    return kind(**sizes, num_key_value_heads=groups, intermediate_size=inner, **more)


MISTRAL = _decoder(MistralConfig, 4096, 32, 32, 8, 14336, 32_000, sliding_window=4096)
POWERLM = _decoder(
    GraniteConfig, 2304, 40, 36, 36, 9216, 49_152, tie_word_embeddings=True, max_position_embeddings=4096
)
SANTACODER = GPTBigCodeConfig(n_embd=2048, n_layer=24, n_head=16, n_inner=8192, vocab_size=49_280, n_positions=2048)

_ROW = "--task sequence_classification --max_length 512 --attn_implementation eager"
_FUSED = "--optim adamw_torch_fused"  # as transformers' own AdamW then: one parameter at a time
_FMS = "--max_length 4096 --gradient_checkpointing true --optim adamw_torch --dtype bfloat16"
_LORA = "--use_peft true --lora_r 16 --lora_dropout 0.1 --lora_target_modules q_proj k_proj v_proj o_proj"
_QLORA = f"{_LORA} --load_in_4bit true --use_bnb_nested_quant true --bf16 true"


def _hfdoc(what: str, flags: str, mib: int) -> Reading:
    return Reading(f"hfdoc-bertlarge-v100-{what}", V100, bert_large(), f"{_ROW} {flags}", mib)


def _fms(model: str, config: PreTrainedConfig, method: str, batch: int, allocated: int) -> Reading:
    more = {"full": "", "lora": _LORA, "qlora": _QLORA}[method]
    flags = f"{_FMS} {more} --per_device_train_batch_size {batch} --gradient_accumulation_steps 1"
    return Reading(f"fms-{model}-{method}-g1-b{batch}", A100, config, flags, allocated / MIB)


_4, _1X4 = (
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 1",
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 4",
)
_GC, _FP16, _ADAFACTOR, _8BIT = "--gradient_checkpointing true", "--fp16", "--optim adafactor", "--optim adamw_bnb_8bit"
READINGS = (
    _hfdoc("b4-fp32", f"{_4} {_FUSED}", 14949),
    _hfdoc("b1-fp32-ga4", f"{_1X4} {_FUSED}", 8681),
    _hfdoc("b1-fp32-ga4-gc", f"{_1X4} {_FUSED} {_GC}", 6775),
    _hfdoc("b4-fp16", f"{_4} {_FUSED} {_FP16}", 13939),
    _hfdoc("b1-fp16-ga4-gc", f"{_1X4} {_FUSED} {_GC} {_FP16}", 7275),
    _hfdoc("b4-fp32-adafactor", f"{_4} {_ADAFACTOR}", 12295),
    _hfdoc("b1-fp16-ga4-gc-adafactor", f"{_1X4} {_ADAFACTOR} {_GC} {_FP16}", 4847),
    _hfdoc("b4-fp32-adam8bit", f"{_4} {_8BIT}", 13085),
    _hfdoc("b1-fp16-ga4-gc-adam8bit", f"{_1X4} {_8BIT} {_GC} {_FP16}", 5363),
    Reading("mscherrmann-bertlarge-3090-b4-s512", RTX_3090, bert_large(), f"{_ROW} {_4} --optim adamw_torch", 10562.79),
    _fms("gpt_bigcode-santacoder", SANTACODER, "full", 4, 11267745280),
    _fms("gpt_bigcode-santacoder", SANTACODER, "full", 8, 15193274880),
    _fms("mistral-7b-v0.1", MISTRAL, "full", 4, 72434837504),
    _fms("mistral-7b-v0.1", MISTRAL, "full", 8, 72435230720),
    _fms("mistral-7b-v0.1", MISTRAL, "lora", 4, 26704571904),
    _fms("mistral-7b-v0.1", MISTRAL, "lora", 8, 38742912512),
    _fms("mistral-7b-v0.1", MISTRAL, "qlora", 4, 20669338112),
    _fms("mistral-7b-v0.1", MISTRAL, "qlora", 8, 37002646016),
    _fms("powerlm-3b", POWERLM, "full", 4, 35134836736),
    _fms("powerlm-3b", POWERLM, "full", 8, 47059390976),
    _fms("powerlm-3b", POWERLM, "lora", 4, 20169870848),
    _fms("powerlm-3b", POWERLM, "lora", 8, 33152880128),
    _fms("powerlm-3b", POWERLM, "qlora", 4, 18174161920),
)


BERT_LARGE = tuple(reading for reading in READINGS if reading.of_process and _FUSED in reading.flags)
_DRAWN_BUT_LEFT_OUT = "fms-mixtral-8x7b-instruct-v0.1-qlora-g1-b4"


def development_half() -> set[str]:
    names = sorted([*(reading.name for reading in READINGS), _DRAWN_BUT_LEFT_OUT])
    return set(random.Random(17).sample(names, len(names) // 2))


def run_of(reading: Reading) -> RunSpec:
    argv = ["--recipe", "baseline", *reading.flags.split()]
    return resolve(argv, here(1, hardware=Hardware((reading.card,), cores=8), environment={}, trained_by="nobody"))


def planned(reading: Reading) -> Components:
    run = run_of(reading)
    micro, accumulation = run.batch.micro, run.batch.accumulation
    estimator = Estimator(reading.config)
    # As zero_grad kept gradients then, they exist from the second step's start. BERT made a mask of
    # ones if it was given none.
    kept = max(accumulation, 2) if reading.of_process else accumulation
    with _as_then(reading):
        case = replace(estimator.case(run, micro), mask=not reading.name.startswith("fms"))
        traced = trace(estimator.config, case)
    weights = estimator.weights(run)
    context = 1343 * MIB if reading.of_process else 0
    memory = Memory(run, weights, traced, kept, context=context)
    found, _ = with_cached(memory, reading.card.memory_bytes)
    return found


@contextmanager
def _as_then(reading: Reading) -> Iterator[None]:
    softmax = _OldSoftmax if reading.of_process else _Softmax
    with (
        patch.dict(LOSS_MAPPING, {"ForCausalLM": _loss_of_4_48}),
        patch.object(GPTBigCodeForCausalLM, "forward", _gpt_bigcode_of_4_48),
        patch.object(GraniteForCausalLM, "forward", _granite_of_4_45),
        patch("recipes.planner.tracing.kernels._Softmax", softmax),
    ):
        yield


class _OldSoftmax(_Softmax):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty_like(scores, dtype=dtype)
        ctx.save_for_backward(out, scores)
        ctx.dtype = scores.dtype
        return out


def _loss_of_4_48(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object) -> torch.Tensor:
    """ForCausalLMLoss of transformers 4.48, which copies the logits twice."""
    return _loss_of_shifted(logits.float(), labels)


def _loss_of_shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    before_the_last = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(before_the_last, labels[..., 1:].contiguous().view(-1))


def _gpt_bigcode_of_4_48(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> CausalLMOutputWithPast:
    """Logits in 16 bits. Its cache stays on while it trains: views of what each `c_attn` made."""
    cached: list[torch.Tensor] = []
    hooks = [
        layer.attn.c_attn.register_forward_hook(lambda *call: cached.append(call[-1].detach()))
        for layer in self.transformer.h
    ]
    hidden = self.transformer(input_ids)[0]
    for hook in hooks:
        hook.remove()
    logits = self.lm_head(hidden)
    return CausalLMOutputWithPast(_loss_of_shifted(logits, labels), logits, cached)


def _granite_of_4_45(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> CausalLMOutputWithPast:
    """No logits in 16 bits are left while it computes its loss."""
    logits = self.lm_head(self.model(input_ids)[0]) / self.config.logits_scaling
    logits = logits.float()
    return CausalLMOutputWithPast(_loss_of_shifted(logits, labels), logits)


def main(half: str) -> None:
    development, errors = development_half(), []
    print("| reading | read | MiB | planned | error |\n|---|---|---|---|---|")
    for reading in READINGS:
        if (reading.name in development) != (half == "development"):
            continue
        found = planned(reading)
        mib = (found.total if reading.of_process else found.allocated) / MIB
        errors.append(mib / reading.mib - 1)
        counter = "process" if reading.of_process else "allocated"
        print(f"| {reading.name} | {counter} | {reading.mib:,.0f} | {mib:,.0f} | {errors[-1]:+.1%} |", flush=True)
    middle = sorted(map(abs, errors))[len(errors) // 2]
    print(f"\nmedian {middle:.1%} off; from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "development")
