"""The optimizer steps that both ranks of `recipes explain` take in each variant of a topic."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from launch.explain.tables import RANKS, SEQUENCES, STEPS, TOPICS, Variant
from launch.host import processes
from launch.host.world import leave_group
from recipes.planner.trace import LiveBytes
from recipes.run import Json
from recipes.scaling.timings import of_median

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_NORM = 1.0
_VOCABULARY = 256  # bytes


# --- The lesson: one optimizer step, correct except in the variants that show a mistake -----------


def gradient(trainee: Trainee, batch: torch.Tensor) -> None:
    """Accumulate the gradient of one optimizer step, ready for the optimizer."""
    variant, scaler, micro_batches = trainee.variant, trainee.scaler, batch.chunk(trainee.variant.micro_batches)
    for number, texts in enumerate(micro_batches, start=1):
        waits = variant.no_sync and number < len(micro_batches)
        with trainee.model.no_sync() if waits else contextlib.nullcontext():
            with torch.autocast(texts.device.type, _DTYPES[variant.dtype], enabled=variant.dtype != "fp32"):
                loss = trainee.model(texts, labels=texts).loss
            if variant.divide:  # micro-batches have equal length, so the mean of means is the mean of all
                loss = loss / len(micro_batches)
            scaler.scale(loss / trainee.smaller).backward()
    if variant.clip == "scaled":
        nn.utils.clip_grad_norm_(trainee.model.parameters(), _MAX_NORM)
    scaler.unscale_(trainee.optimizer)
    if variant.clip == "unscaled":
        nn.utils.clip_grad_norm_(trainee.model.parameters(), _MAX_NORM)


def update(trainee: Trainee) -> None:
    """Take the optimizer step. The scaler skips the step if the scaled gradient is not finite."""
    trainee.scaler.step(trainee.optimizer)
    trainee.scaler.update()
    trainee.optimizer.zero_grad()


# --- The model and its data -----------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A device, the sizes of a model that this device trains in seconds, and a learning rate."""

    device: torch.device
    width: int = 128
    layers: int = 2
    tokens: int = 32
    learning_rate: float = 0.05


def decoder(setup: Setup) -> LlamaForCausalLM:
    """Create a byte-level decoder, with the same initial weights for all variants."""
    torch.manual_seed(0)
    sizes = {"hidden_size": setup.width, "intermediate_size": 4 * setup.width, "num_hidden_layers": setup.layers}
    heads = {"num_attention_heads": setup.width // 32, "max_position_embeddings": setup.tokens + 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=_VOCABULARY, **sizes, **heads)).to(setup.device)


def counting_hook(sent: Counter[str], bucket):  # `bucket` is not annotated: DDP refuses annotations that are strings
    """Count a bucket of gradients, and call DDP's own all-reduce on the bucket."""
    sent["synchronisations"] += bucket.is_last()
    sent["bytes"] += bucket.buffer().nbytes
    return allreduce_hook(distributed.group.WORLD, bucket)


class Trainee:
    """One variant with its own model. The loss is divided by `smaller`, for smaller gradients."""

    def __init__(self, variant: Variant, setup: Setup, smaller: int) -> None:
        self.variant = variant
        self.smaller = smaller
        self.sent: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.first_gradient = torch.empty(0)
        self.model = DistributedDataParallel(decoder(setup))
        self.model.register_comm_hook(self.sent, counting_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), setup.learning_rate * smaller)
        self.scaler = torch.amp.GradScaler(setup.device.type, enabled=variant.scale)


def examples(step: int, rank: int, setup: Setup) -> torch.Tensor:
    """Return a rank's sequences for a step. Their text is the source code of Python's argparse."""
    size = SEQUENCES * (setup.tokens + 1)
    begin = (step * RANKS + rank) * size
    text = bytearray(Path(argparse.__file__).read_bytes()[begin : begin + size])
    return torch.frombuffer(text, dtype=torch.uint8).long().view(SEQUENCES, -1).to(setup.device)


# --- Measuring ------------------------------------------------------------------------------------


def measure(topic: str, setup: Setup, rank: int) -> Json:
    """Measure each variant's peak memory in one step, and then step times of all variants in turn.

    Each of `rows` has: `seconds`, the median of an optimizer step, and `off`, its relative error;
    `peak_bytes`; `synchronisations` and `sent_bytes` (given to the all-reduce) per step;
    `gradient`, the norm of the optimizer's first gradient times `smaller`, the loss's divisor;
    `difference`, this gradient's relative distance from the first row's; `lost`, the share of the
    first row's nonzero gradient values that are 0 here; `loss` at the end, None if not finite.
    """
    variants, gradients_of = TOPICS[topic].variants, TOPICS[topic].gradients_of
    smaller = max(1, gradients_of // (SEQUENCES * setup.tokens))
    batches = [examples(step, rank, setup) for step in range(STEPS)]
    peaks = [_peak_bytes(variant, setup, smaller, batches[0]) for variant in variants]
    trainees = [Trainee(variant, setup, smaller) for variant in variants]
    before = _loss(trainees[0], batches[0])
    for step, batch in enumerate(batches):
        for trainee in trainees:
            started = _now(setup)
            gradient(trainee, batch)
            if step == 0:
                flat = [parameter.grad.flatten() for parameter in trainee.model.parameters()]
                trainee.first_gradient = torch.cat(flat) * smaller
            update(trainee)
            trainee.seconds.append(_now(setup) - started)
    first = trainees[0].first_gradient
    return {
        "backend": distributed.get_backend(),
        "parameters": sum(parameter.numel() for parameter in trainees[0].model.parameters()),
        "tokens": setup.tokens,
        "loss_before": before,
        "rows": [_row(*found, first, batches[0]) for found in zip(trainees, peaks, strict=True)],
    }


def _row(trainee: Trainee, peak_bytes: int, first: torch.Tensor, batch: torch.Tensor) -> Json:
    seconds, own = trainee.seconds[1:], trainee.first_gradient  # without the first step, which also allocates
    return {
        "seconds": statistics.median(seconds),
        "off": of_median(seconds) / statistics.median(seconds),
        "peak_bytes": peak_bytes,
        "synchronisations": trainee.sent["synchronisations"] / STEPS,
        "sent_bytes": trainee.sent["bytes"] / STEPS,
        "loss": _loss(trainee, batch),
        "gradient": float(own.norm()),
        "difference": float((own - first).norm() / first.norm()),
        "lost": float(((own == 0) & (first != 0)).sum() / (first != 0).sum()),
    }


def _peak_bytes(variant: Variant, setup: Setup, smaller: int, batch: torch.Tensor) -> int:
    """Return a new model's peak bytes in its first step. With SGD, later steps take no more."""
    with LiveBytes() as live:
        trainee = Trainee(variant, setup, smaller)
        gradient(trainee, batch)
        update(trainee)
    return int(max(map(sum, live.moments)))


def _now(setup: Setup) -> float:
    """Return the time in seconds, after both ranks and their GPUs have reached this call."""
    if setup.device.type == "cuda":
        torch.cuda.synchronize()
    distributed.barrier()
    return time.perf_counter()


@torch.no_grad()
def _loss(trainee: Trainee, batch: torch.Tensor) -> float | None:
    """Return the loss in fp32; None if it is not finite."""
    loss = trainee.model.module(batch, labels=batch).loss
    return float(loss) if loss.isfinite() else None


def main(asked: Json, folder: str) -> None:
    """Measure the variants of a topic on one rank, and store the result in `folder`."""
    rank, backend, setup = asked["rank"], "gloo", Setup(torch.device("cpu"))
    if asked["device"] == "cuda":
        backend, setup = "nccl", Setup(torch.device("cuda", rank), width=512, layers=6, tokens=256, learning_rate=0.005)
        torch.cuda.set_device(setup.device)
    file = Path(folder).with_name("rendezvous")
    distributed.init_process_group(backend, init_method=file.as_uri(), rank=rank, world_size=RANKS)
    processes.answer(folder, measure(asked["topic"], setup, rank))
    leave_group()
