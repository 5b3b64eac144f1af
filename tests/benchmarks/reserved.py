"""Published readings of what torch allocated and reserved in one training, beside a replay.

    python -m tests.benchmarks.reserved [development|held_out]

Each reading is of a training loop of its own, rebuilt here: LoRA or QLoRA on the attention's four
matrices, without autocast. The model's outputs stay bound to a name until the next forward ends, on
the T4 until the step ends. A fixed seed draws the development half. No constant was fitted to
either half.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace
from unittest.mock import patch

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from recipes.planner.allocator import MIB, Requests, workspace_bytes
from recipes.planner.footprint import NF4, NF4_NESTED
from recipes.planner.shapes import COMPLETE, FREED, NEVER, SIZE, TRAINED, Adapters, Case, Traced
from recipes.planner.tracing import trace as tracing

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_T4 = (7, 5)
_BEFORE_FLASH = (7, 9)  # the RTX 4080's torch 2.6 is for Windows, where it has no flash kernel


def _llama(width: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(**_shape(width, layers, heads, groups, inner, vocabulary, tied))


def _qwen(width: int, layers: int, heads: int, inner: int, groups: int = 2, tied: bool = True) -> Qwen2Config:
    return Qwen2Config(**_shape(width, layers, heads, groups, inner, 151_936, tied))


def _shape(
    width: int, layers: int, heads: int, groups: int, inner: int, vocabulary: int, tied: bool
) -> dict[str, int | bool]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768,
    }


TINYLLAMA = _llama(2048, 22, 32, 4, 5632, 32_000, False)
SMOLLM = _llama(2048, 24, 32, 32, 8192, 49_152, True)
QWEN_05, QWEN_15 = _qwen(896, 24, 14, 4864), _qwen(1536, 28, 12, 8960)
QWEN_3, QWEN_7 = _qwen(2048, 36, 16, 11008), _qwen(3584, 28, 28, 18944, groups=4, tied=False)


@dataclass(frozen=True)
class Reading:
    """MiB that torch reported as its peaks.

    `fitcheck`: of fitcheck-llm 0.2.0 (its notebook fitcheck.ipynb), on a T4 in fp16. Else of
    can-i-finetune-this (its results/*.json), on an RTX 4080 in bf16.
    """

    name: str
    config: PreTrainedConfig
    batch: int
    length: int
    allocated: float
    reserved: float
    eager: bool = False
    four_bits: bool = True
    checkpointing: bool = True
    fitcheck: bool = False

    @property
    def steps(self) -> int:
        return 3 if "steps3" in self.name else 2


def _t4(
    name: str, config: PreTrainedConfig, batch: int, length: int, allocated: int, reserved: int, eager: bool
) -> Reading:
    return Reading(name, config, batch, length, allocated, reserved, eager, fitcheck=True)


def _4080(
    name: str, config: PreTrainedConfig, batch: int, length: int, allocated: float, reserved: float, **other: bool
):
    return Reading(name, config, batch, length, allocated * 1024, reserved * 1024, **other)


READINGS = (
    _t4("fitcheck-t4-tinyllama-1.1b-chat-v1.0-b2-s512-eager", TINYLLAMA, 2, 512, 1849, 2070, True),
    _t4("fitcheck-t4-tinyllama-1.1b-chat-v1.0-b2-s1024-eager", TINYLLAMA, 2, 1024, 2876, 3532, True),
    _t4("fitcheck-t4-tinyllama-1.1b-chat-v1.0-b2-s2048-eager", TINYLLAMA, 2, 2048, 6655, 7640, True),
    _t4("fitcheck-t4-tinyllama-1.1b-chat-v1.0-b2-s512-sdpa", TINYLLAMA, 2, 512, 1847, 2126, False),
    _t4("fitcheck-t4-tinyllama-1.1b-chat-v1.0-b2-s1024-sdpa", TINYLLAMA, 2, 1024, 2528, 2892, False),
    _t4("fitcheck-t4-tinyllama-1.1b-chat-v1.0-b2-s2048-sdpa", TINYLLAMA, 2, 2048, 3897, 4640, False),
    _t4("fitcheck-t4-smollm2-1.7b-b4-s1024-eager", SMOLLM, 4, 1024, 5297, 6932, True),
    _t4("fitcheck-t4-smollm2-1.7b-b4-s1024-sdpa", SMOLLM, 4, 1024, 5281, 5908, False),
    _t4("fitcheck-t4-qwen2.5-1.5b-instruct-b2-s1024-eager", QWEN_15, 2, 1024, 6831, 7372, True),
    _t4("fitcheck-t4-qwen2.5-1.5b-instruct-b2-s1024-sdpa", QWEN_15, 2, 1024, 6823, 7232, False),
    _4080(
        "canift-4080-qwen2.5-0.5b-instruct_lora_s1024_b1_r16_steps3", QWEN_05, 1, 1024, 3.0324, 3.7949, four_bits=False
    ),
    _4080("canift-4080-qwen2.5-0.5b-instruct_qlora_s1024_b1_r16_steps3", QWEN_05, 1, 1024, 3.1158, 3.3027),
    _4080("canift-4080-qwen2.5-0.5b-instruct_qlora_s2048_b1_r16_steps3", QWEN_05, 1, 2048, 5.522, 6.2812),
    _4080("canift-4080-qwen2.5-1.5b-instruct_qlora_s1024_b1_r16_steps3", QWEN_15, 1, 1024, 4.0413, 4.3574),
    _4080(
        "canift-4080-qwen2.5-1.5b-instruct_qlora_s1024_b1_r16_steps3_nockpt",
        QWEN_15,
        1,
        1024,
        9.3413,
        9.5527,
        checkpointing=False,
    ),
    _4080("canift-4080-qwen2.5-1.5b-instruct_qlora_s1024_b2_r16_steps2", QWEN_15, 2, 1024, 6.5311, 6.8809),
    _4080("canift-4080-qwen2.5-1.5b-instruct_qlora_s2048_b1_r16_steps3", QWEN_15, 1, 2048, 6.5324, 7.0977),
    _4080("canift-4080-qwen2.5-1.5b-instruct_qlora_s4096_b1_r16_steps2", QWEN_15, 1, 4096, 11.5068, 13.5566),
    _4080("canift-4080-qwen2.5-1.5b-instruct_qlora_s512_b1_r16_steps3", QWEN_15, 1, 512, 2.7943, 2.9062),
    _4080("canift-4080-qwen2.5-3b-instruct_qlora_s1024_b1_r16_steps2", QWEN_3, 1, 1024, 5.1719, 5.5371),
    _4080("canift-4080-qwen2.5-7b-instruct_qlora_s1024_b1_r16_steps2", QWEN_7, 1, 1024, 10.0023, 11.2324),
)


def development_half() -> set[str]:
    names = sorted(reading.name for reading in READINGS)
    return set(random.Random(17).sample(names, len(names) // 2))


def requests_of(reading: Reading) -> Requests:
    """All that the loop of this reading asks the allocator for: loading, and two steps."""
    compute = "float16" if reading.fitcheck else "bfloat16"
    rank = 32 if reading.fitcheck else 16
    adapters = Adapters(rank, _ATTENTION, four_bits=compute if reading.four_bits else None)
    case = Case(
        reading.batch,
        reading.length,
        dtype=compute,
        checkpointing=reading.checkpointing,
        attention="eager" if reading.eager else "sdpa",
        mask=False,
        adapters=adapters,
        capability=_T4 if reading.fitcheck else _BEFORE_FLASH,
    )
    # The T4's transformers repeats keys and values for groups of heads, whatever the kernel.
    with patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", lambda *_: not reading.fitcheck):
        traced = tracing.trace(reading.config, case)
    requests = Requests()
    trained = _load(requests, reading, adapters)
    requests.loaded = len(requests.events)
    workspace = workspace_bytes(_T4 if reading.fitcheck else (8, 9))
    paged = not reading.fitcheck  # PagedAdamW8bit: its states are not torch's
    traced = _with_outputs(traced, reading)
    outputs: list[int] = []
    for step in range(reading.steps):
        first, before = requests.made, len(requests.events)
        survivors = requests.micro_batch(traced, workspace=0 if step else workspace)
        end_of_forward = _place_of(requests, first + _made(traced), before)
        requests.events[end_of_forward:end_of_forward] = [-1 - number for number in outputs]
        rows = traced.allocations
        sizes = rows[(rows[:, SIZE] > 0) & (rows[:, FREED] == NEVER) & (rows[:, COMPLETE] != NEVER), SIZE]
        outputs = [number for number, size in zip(survivors, sizes, strict=True) if size == _logits(reading)]
        gradients = [number for number in survivors if number not in outputs]
        if step == 0 and not paged:
            for size in (size for size in trained for _ in range(2)):
                requests.allocate(size)
        if not paged:
            requests.free([requests.allocate(size) for size in trained])
        if reading.fitcheck:
            requests.free(outputs)
            outputs = []
        requests.free(gradients)
    return requests


def _logits(reading: Reading) -> int:
    width = 4 if reading.four_bits else 2
    return reading.batch * reading.length * reading.config.vocab_size * width


def _with_outputs(traced: Traced, reading: Reading) -> Traced:
    """The same micro-batch, whose logits stay: the loop binds the model's outputs to a name."""
    kept = traced.allocations.copy()
    logits = (kept[:, SIZE] == _logits(reading)).argmax()
    kept[logits, [FREED, COMPLETE]] = NEVER, 0
    return replace(traced, allocations=kept)


def _made(traced: Traced) -> int:
    return int((traced.allocations[: traced.made_forward, SIZE] > 0).sum())


def _place_of(requests: Requests, number: int, start: int) -> int:
    """Where in the events this allocation is made."""
    made = requests.made - sum(event >= 0 for event in requests.events[start:])
    for place in range(start, len(requests.events)):
        if requests.events[place] >= 0:
            if made == number:
                return place
            made += 1
    return len(requests.events)


def _load(requests: Requests, reading: Reading, adapters: Adapters) -> list[int]:
    """from_pretrained, prepare_model_for_kbit_training and peft. Returns the adapters' bytes."""
    sizes = tracing.weigh(reading.config, "causal_lm", adapters).sizes
    if reading.four_bits:
        nested = not reading.fitcheck
        requests.load_in_4_bits(sizes, NF4_NESTED if nested else NF4, 4)
    else:
        base = [2 * size for size, kind in sizes if kind != TRAINED]
        requests.free([requests.allocate(sum(base))])
        for size in base:
            requests.allocate(size)
    trained = [4 * size for size, kind in sizes if kind == TRAINED]
    for size in trained:
        requests.allocate(size)
    return trained


def main(half: str) -> None:
    development = development_half()
    print("| reading | allocated | error | reserved | error | ratio | error |\n|---|---|---|---|---|---|---|")
    for reading in READINGS:
        if (reading.name in development) != (half == "development"):
            continue
        requests = requests_of(reading)
        allocated, reserved = requests.peak() / MIB, requests.reserved() / MIB
        ratio, read = reserved / allocated, reading.reserved / reading.allocated
        print(
            f"| {reading.name} | {reading.allocated:,.0f} | {allocated / reading.allocated - 1:+.1%} "
            f"| {reading.reserved:,.0f} | {reserved / reading.reserved - 1:+.1%} "
            f"| {read:.3f} | {ratio / read - 1:+.1%} |"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "development")
