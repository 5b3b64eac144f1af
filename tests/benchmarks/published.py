"""Published readings of the memory of one training, beside the plan of the same training.

    python -m tests.benchmarks.published

published_runs.csv holds Trainer runs, of which one counter was read; published_loops.csv holds
training loops of two other projects, with what torch allocated and what it reserved. Rebuilt here
are the loops of their time: what the losses of transformers 4.45 (Granite) and 4.48 copied,
gradients that zero_grad kept, the context that the same source names, and a softmax that kept its
input: derivatives.yaml of torch 1.10 has `_softmax_backward_data(grad, result, dim, self)`, where
later ones pass the input's dtype alone.
The other loops train LoRA or QLoRA on the attention's four matrices, without autocast; the model's
outputs stay bound to a name until the next forward ends, on the T4 until the step ends. No constant
was fitted to any of them.

Left out: readings with experts (modules of their own then, which bitsandbytes packed; parameters in
three dimensions since transformers 5, which it leaves), and those of FSDP's version 1.
"""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, GraniteForCausalLM, PreTrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast

from recipes.planner import trace as tracing
from recipes.planner.allocator import MIB, Requests, with_cached, workspace_bytes
from recipes.planner.fits import Estimator
from recipes.planner.kernels import _Softmax
from recipes.planner.memory import (
    COMPLETE,
    FREED,
    NEVER,
    NF4,
    NF4_NESTED,
    SIZE,
    TRAINED,
    Adapters,
    Case,
    Components,
    Memory,
)  # fmt: skip
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware

_CARDS = {
    card.name: card
    for card in (Gpu("V100", (7, 0), 16 << 30), Gpu("RTX 3090", (8, 6), 24 << 30), Gpu("A100", (8, 0), 80 << 30))
}

# The models of the readings, by their names in the tables.
_MODELS = json.loads(Path(__file__).with_name("published_models.json").read_text())
CONFIGS = {name: AutoConfig.for_model(**shape) for name, shape in _MODELS.items()}
_IN_MIB = {"B": 1 / MIB, "MiB": 1, "GiB": 1024}


def _table(name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


# --- Trainer runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfTrainer:
    """MiB that were read: of the process by nvidia-smi, or the peak that torch had allocated.

    `hfdoc`: "Methods and tools for efficient training on a single GPU", Hugging Face, 2022: a V100,
    1343 MiB of it in use before the model is loaded. `mscherrmann`: testGPUMemoryBertTraining.ipynb
    of mscherrmann.github.io. `fms`: scripts/benchmarks/refs/a100_80gb.csv of
    foundation-model-stack/fms-acceleration, packed to 4,096 tokens, with transformers 4.48.1;
    PowerLM's of a100_80gb_granite.csv, with 4.45.2.
    """

    name: str
    card: Gpu
    config: PreTrainedConfig
    flags: str
    mib: float

    @property
    def of_process(self) -> bool:
        return self.name.startswith("hfdoc")


_SEGMENTS = "--expandable_segments false"  # nobody had asked for them
_BERT = "--task sequence_classification --max_length 512 --attn_implementation eager"
_FMS = "--max_length 4096 --gradient_checkpointing true --optim adamw_torch --dtype bfloat16"
_LORA = "--use_peft true --lora_r 16 --lora_dropout 0.1 --lora_target_modules q_proj k_proj v_proj o_proj"
# The words of the column `how`.
_FLAGS = {
    "fused": "--optim adamw_torch_fused",  # as transformers' own AdamW then: one parameter at a time
    "foreach": "--optim adamw_torch",
    "adafactor": "--optim adafactor",
    "8bit": "--optim adamw_bnb_8bit",
    "checkpointing": "--gradient_checkpointing true",
    "fp16": "--fp16",
    "full": "",
    "lora": _LORA,
    # These trainers let peft prepare the model, which turns what is not in 4 bits to float32.
    "qlora": f"{_LORA} --load_in_4bit true --use_bnb_nested_quant true --bf16 true --dtype float32",
}


def _of_trainer(row: dict[str, str]) -> OfTrainer:
    flags = [_BERT if row["model"] == "bert" else _FMS, *(_FLAGS[word] for word in row["how"].split())]
    flags[0] = flags[0].replace("--dtype bfloat16", "") if "qlora" in row["how"] else flags[0]
    flags += [_SEGMENTS, f"--per_device_train_batch_size {row['batch']}"]
    flags.append(f"--gradient_accumulation_steps {row['accumulation']}")
    mib = float(row["read"]) * _IN_MIB[row["unit"]]
    return OfTrainer(row["name"], _CARDS[row["card"]], CONFIGS[row["model"]], " ".join(flags), mib)


OF_TRAINER = tuple(map(_of_trainer, _table("published_runs.csv")))


def planned(reading: OfTrainer) -> Components:
    place = here(1, hardware=Hardware((reading.card,), cores=8), environment={}, trained_by="nobody")
    run = resolve(["--recipe", "baseline", *reading.flags.split()], place)
    estimator, accumulation = Estimator(reading.config), run.batch.accumulation
    # As zero_grad kept gradients then, they exist from the second step's start. BERT made a mask of
    # ones if it was given none.
    kept = max(accumulation, 2) if reading.of_process else accumulation
    with _as_then(reading):
        case = replace(estimator.case(run, run.batch.micro), mask=not reading.name.startswith("fms"))
        traced = tracing.trace(estimator.config, case)
    memory = Memory(run, estimator.weights(run), traced, kept)
    memory.context = 1343 * MIB if reading.of_process else 0
    return with_cached(memory, reading.card.memory_bytes)


@contextmanager
def _as_then(reading: OfTrainer) -> Iterator[None]:
    with (
        patch.dict(LOSS_MAPPING, {"ForCausalLM": _loss_of_4_48}),
        patch.object(GraniteForCausalLM, "forward", _granite_of_4_45),
        patch("recipes.planner.kernels._Softmax", _OldSoftmax if reading.of_process else _Softmax),
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


def _granite_of_4_45(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: object) -> CausalLMOutputWithPast:
    """No logits in 16 bits are left while it computes its loss."""
    logits = (self.lm_head(self.model(input_ids)[0]) / self.config.logits_scaling).float()
    return CausalLMOutputWithPast(_loss_of_shifted(logits, labels), logits)


# --- Loops of their own ---------------------------------------------------------------------------


def requests_of(row: dict[str, str]) -> Requests:
    """All that the loop of a row asks the allocator for: loading, and its 2 or 3 steps.

    `t4`: fitcheck-llm 0.2.0 (its notebook fitcheck.ipynb), in fp16. `4080`: can-i-finetune-this
    (its results/*.json), in bf16, on Windows, where torch 2.6 has no flash kernel.
    """
    on_t4, four_bits, config = row["name"].startswith("t4"), row["four_bits"] == "yes", CONFIGS[row["model"]]
    batch, length = int(row["batch"]), int(row["length"])
    logits = batch * length * config.vocab_size * (4 if four_bits else 2)
    compute, rank, capability = ("float16", 32, (7, 5)) if on_t4 else ("bfloat16", 16, (7, 9))
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapters = Adapters(rank, targets, four_bits=compute if four_bits else None)
    attention = "eager" if row["name"].endswith("eager") else "sdpa"
    dtype, checkpointing = "float32" if four_bits else compute, row["checkpointing"] == "yes"
    how = {"dtype": dtype, "checkpointing": checkpointing, "attention": attention, "mask": False}
    case = Case(batch, length, **how, adapters=adapters, capability=capability)
    # The T4's transformers repeats keys and values for groups of heads, whatever the kernel.
    with patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", lambda *_: not on_t4):
        traced = tracing.trace(config, case)
    rows = traced.allocations.copy()
    # The logits stay: they are freed here, in a way that the steps below name.
    outputs_at = (rows[:, SIZE] == logits).argmax()
    rows[outputs_at, [FREED, COMPLETE]] = NEVER, 0
    traced = replace(traced, allocations=rows)
    made_forward = int((rows[: traced.made_forward, SIZE] > 0).sum())
    requests, outputs = Requests(), []
    trained = _load(requests, config, adapters, NF4 if on_t4 else NF4_NESTED)
    requests.loaded = len(requests.events)
    for step in range(int(row["steps"])):
        first, start = requests.made, len(requests.events)
        workspace = 0 if step else workspace_bytes(capability if on_t4 else (8, 9))
        kept = requests.micro_batch(traced, workspace=workspace)
        place = _place_of(requests, first + made_forward, start)
        requests.events[place:place] = [-1 - number for number in outputs]
        stays = (rows[:, SIZE] > 0) & (rows[:, FREED] == NEVER) & (rows[:, COMPLETE] != NEVER)
        outputs = [number for number, size in zip(kept, rows[stays, SIZE], strict=True) if size == logits]
        if on_t4:  # the other loop's optimizer is PagedAdamW8bit, whose states are not torch's
            if step == 0:
                requests.allocate_all(size for size in trained for _ in range(2))
            requests.free(requests.allocate_all(trained))
            requests.free(outputs)
        requests.free(number for number in kept if number not in outputs)
        outputs = [] if on_t4 else outputs
    return requests


def _place_of(requests: Requests, number: int, start: int) -> int:
    """Where in the events after `start` this allocation is made."""
    made = [place for place in range(start, len(requests.events)) if requests.events[place] >= 0]
    before = requests.made - len(made)
    return made[number - before] if number - before < len(made) else len(requests.events)


def _load(requests: Requests, config: PreTrainedConfig, adapters: Adapters, nf4: int) -> list[int]:
    """from_pretrained, prepare_model_for_kbit_training and peft. Returns the adapters' bytes."""
    sizes = tracing.weigh(config, "causal_lm", adapters).sizes
    if adapters.four_bits:
        requests.load_in_4_bits(sizes, nf4, 4)
    else:
        base = [2 * size for size, kind in sizes if kind != TRAINED]
        requests.free([requests.allocate(sum(base))])
        requests.allocate_all(base)
    trained = [4 * size for size, kind in sizes if kind == TRAINED]
    requests.allocate_all(trained)
    return trained


# --- How far a plan is from what was read ---------------------------------------------------------

Scores = Iterator[tuple[str, str, float, float]]  # name of a reading, its counter, and MiB: read, and planned


def of_trainers() -> Scores:
    for reading in OF_TRAINER:
        found, counter = planned(reading), "process" if reading.of_process else "allocated"
        yield reading.name, counter, reading.mib, (found.total if reading.of_process else found.allocated) / MIB


def of_loops() -> Scores:
    """What torch reported as its peaks in two or three steps."""
    for row in _table("published_loops.csv"):
        requests, unit = requests_of(row), _IN_MIB[row["unit"]]
        yield row["name"], "allocated", float(row["allocated"]) * unit, requests.replay().peak_allocated / MIB
        yield row["name"], "reserved", float(row["reserved"]) * unit, requests.reserved() / MIB


def main() -> None:
    for scores in (of_trainers(), of_loops()):
        errors: dict[str, list[float]] = {}
        print("| reading | read | MiB | planned | error |\n|---|---|---|---|---|")
        for name, counter, read, mib in scores:
            errors.setdefault(counter, []).append(mib / read - 1)
            print(f"| {name} | {counter} | {read:,.0f} | {mib:,.0f} | {mib / read - 1:+.2%} |", flush=True)
        for counter, found in errors.items():
            middle = sorted(map(abs, found))[len(found) // 2]
            print(f"{counter}: median {middle:.1%} off; from {min(found):+.1%} to {max(found):+.1%}")
        print()


if __name__ == "__main__":
    main()
