"""The time of a step: FLOPs at a given share of the GPU's peak, bytes at a given bandwidth.

Pure arithmetic. It leaves out the host's work under offload, and waiting for data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.planner.footprint import FP32, HALF
from recipes.planner.shapes import Weights
from recipes.run import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Model FLOPs utilisation: the share of an H100's dense bf16 peak that well-tuned trainings reach.
# Published by their authors: MosaicML's llm-foundry 34.9 % at 760M parameters to 46.4 % at 7B,
# torchtitan 33 to 39 % at 8B.
ASSUMED_MFU = 0.35


@dataclass(frozen=True)
class StepTime:
    """One optimizer step on each GPU: seconds (None if unknown), and the bytes that it sends."""

    compute: float | None
    sent_bytes: int
    communication: float | None


def step_time(
    run: RunSpec,
    weights: Weights,
    config: PreTrainedConfig,
    length: int,
    micro: int,
    mfu: float,
    bandwidth: float | None,
) -> StepTime:
    """One optimizer step at this micro-batch and the run's global batch.

    `length` is tokens per sequence. `bandwidth`, in bytes per second, is the bus bandwidth of
    nccl-tests: for every collective, the bytes that each GPU sends over time.
    """
    accumulation = run.batch.micro * run.batch.accumulation // micro
    sent = sent_bytes(run, weights, accumulation)
    flops, peak = flops_per_token(run, weights, config, length), run.hardware.peak_flops
    compute = flops * length * micro * accumulation / (mfu * peak) if flops and peak else None
    return StepTime(compute, sent, sent / bandwidth if bandwidth else None)


def model_flops(parameters: int, config: PreTrainedConfig, length: int) -> float:
    """Training FLOPs per token: 6N + 6*layers*heads*head_dim*length (causal attention counts half).

    N is `parameters`, without an input embedding that is not tied to the head: it is a lookup.
    Source: PaLM (Chowdhery et al. 2022), appendix B.
    """
    return 6 * parameters + _attention_flops(config, length)


def flops_are_known(config: PreTrainedConfig) -> bool:
    """Whether `model_flops` holds: for a transformer in which every token uses every parameter."""
    known = all(hasattr(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    return known and not any("expert" in name for name in config.to_dict())


def flops_per_token(run: RunSpec, weights: Weights, config: PreTrainedConfig, length: int) -> float | None:
    """FLOPs that the GPU runs per token, recomputed ones too; None if `model_flops` does not hold.

    Of the six FLOPs per parameter, two are for the forward pass, two for the gradient of the input,
    and two for the gradient of the weight, which frozen weights skip. Checkpointing runs the
    forward pass twice.
    """
    text = config.get_text_config()
    if not flops_are_known(text):
        return None
    used, attention = weights.total - weights.looked_up, _attention_flops(text, length)
    trained = min(weights.trained, used)
    recomputed = 2 * used + attention / 3 if run["gradient_checkpointing"] else 0
    return 4 * used + 2 * trained + attention + recomputed


def _attention_flops(config: PreTrainedConfig, length: int) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 6 * config.num_hidden_layers * config.num_attention_heads * width * length


def sent_bytes(run: RunSpec, weights: Weights, accumulation: int) -> int:
    """Bytes that each GPU sends in an optimizer step, with ring algorithms over p GPUs.

    An all-reduce sends 2(p-1)/p of its tensor, a reduce-scatter or an all-gather (p-1)/p. DDP
    reduces gradients once per step at any accumulation: Trainer skips it for the other
    micro-batches. ZeRO-2, ZeRO-3 and FSDP2 scatter the gradients of every micro-batch; ZeRO-3 and
    FSDP2 gather the parameters twice for each. Source: ZeRO (Rajbhandari et al. 2020), section 7.
    """
    share = (run.world_size - 1) / run.world_size
    if run.engine.kind not in ("deepspeed", "fsdp"):
        width = FP32 if run["ddp_comm_hook"] == "no" else HALF
        return round(2 * share * weights.trained * width)
    width = HALF if run["bf16"] or run["fp16"] else FP32
    times = accumulation if run.engine.zero_stage != 1 else 1
    gradients, parameters = times * weights.trained, weights.trained
    if run.engine.kind == "fsdp" or run.engine.zero_stage == 3:
        parameters = 2 * accumulation * weights.total
    return round(share * (gradients + parameters) * width)
