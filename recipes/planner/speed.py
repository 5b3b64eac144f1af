"""The time of a step: FLOPs at a given share of the GPU's peak, bytes at a given bandwidth.

Pure arithmetic. It leaves out waiting for data, and adds up what may overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.planner.footprint import FP32, HALF, recomputes, scatters_each_micro_batch, shards
from recipes.planner.fsdp import IN_4_BITS
from recipes.planner.shapes import Weights
from recipes.run import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Model FLOPs utilisation: the share of an H100's dense bf16 peak that well-tuned trainings reach.
# Published by their authors: MosaicML's llm-foundry 34.9 % at 760M parameters to 46.4 % at 7B,
# torchtitan 33 to 39 % at 8B.
ASSUMED_MFU = 0.35

# Bytes per second between a GPU and its host, one way, by the major compute capability: half of
# what NVIDIA's data sheets give for both ways. T4: PCIe Gen3 x16, 32 GB/s; A100, A10, L4, L40S:
# Gen4, 64 GB/s; H100, H200, B200: Gen5, 128 GB/s.
_PCIE = {7: 16e9, 8: 32e9}
_PCIE_5 = 64e9
# AMD's data sheet of EPYC 7003: eight channels of DDR4-3200, bytes per second of one socket.
HOST_RAM = 204.8e9
# Adam on the host reads parameter, gradient and two moments in fp32, and writes all but the
# gradient: csrc/includes/cpu_adam.h of DeepSpeed. One core of an EPYC here takes 0.5 ns for each.
_ADAM_BYTES = 7 * FP32


@dataclass(frozen=True)
class StepTime:
    """One optimizer step on each GPU: seconds (None if unknown), and the bytes that it sends.

    `host` is what offload adds: PCIe and Adam on the host, at the speeds of data sheets. It is a
    lower bound. gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a reads throughput of a 7B
    on 8 A800 that is 46 % with offload of what it is without.
    """

    compute: float | None
    sent_bytes: int
    communication: float | None
    host: float = 0.0

    @property
    def total(self) -> float | None:
        """Seconds if nothing overlaps, without communication between GPUs if that is unknown."""
        return None if self.compute is None else self.known

    @property
    def known(self) -> float:
        """Seconds of the parts that are known."""
        return (self.compute or 0) + (self.communication or 0) + self.host


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
    host = host_seconds(run, weights, accumulation)
    return StepTime(compute, sent, sent / bandwidth if bandwidth else None, host)


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
    recomputed = 2 * used + attention / 3 if recomputes(run) else 0
    return 4 * used + 2 * trained + attention + recomputed


def _attention_flops(config: PreTrainedConfig, length: int) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 6 * config.num_hidden_layers * config.num_attention_heads * width * length


def sent_bytes(run: RunSpec, weights: Weights, accumulation: int) -> int:
    """Bytes that each GPU sends in an optimizer step, with ring algorithms over p GPUs.

    An all-reduce sends 2(p-1)/p of its tensor, a reduce-scatter or an all-gather (p-1)/p. DDP
    reduces gradients once per step at any accumulation: Trainer skips it for the other
    micro-batches, under FSDP2 too, unless `sync_each_batch` is set. ZeRO-2 and ZeRO-3 scatter the
    gradients of every micro-batch. ZeRO-3 and FSDP2 gather the parameters twice for each, FSDP2
    those of the head once. Source: ZeRO (Rajbhandari et al. 2020), section 7, and fsdp.py.
    """
    share = (run.world_size - 1) / run.world_size
    if run.engine.kind not in ("deepspeed", "fsdp"):
        width = FP32 if run["ddp_comm_hook"] == "no" else HALF
        return round(2 * share * weights.trained * width)
    width = HALF if run["bf16"] or run["fp16"] else FP32
    if run.engine.kind == "fsdp":
        return _sent_by_fsdp(run, weights, accumulation, width)
    times = accumulation if run.engine.zero_stage != 1 else 1
    gradients, parameters = times * weights.trained, weights.trained
    if run.engine.zero_stage == 3:
        parameters = 2 * accumulation * weights.total
    return round(share * (gradients + parameters) * width)


def _sent_by_fsdp(run: RunSpec, weights: Weights, accumulation: int, width: int) -> int:
    """Bytes: gathered and scattered among the shards, and reduced among their replicas (HSDP)."""
    copies = run.engine.parallelism.replicate
    among_shards, among_copies = (shards(run) - 1) / shards(run), 2 * (copies - 1) / copies / shards(run)
    times = accumulation if scatters_each_micro_batch(run) else 1
    whole = weights.total - weights.in_4_bits * (1 - IN_4_BITS / width)
    gathered = accumulation * (2 * whole - (weights.outside_layers - weights.looked_up))
    return round(((gathered + times * weights.trained) * among_shards + times * weights.trained * among_copies) * width)


def host_seconds(run: RunSpec, weights: Weights, accumulation: int) -> float:
    """Seconds per step for PCIe and then for Adam on the host; 0 without offload."""
    if run.engine.offload_optimizer == "none":
        return 0.0
    updated_on_node = weights.trained * run.local_world_size / run.world_size
    pcie = _PCIE.get(run.hardware.capability[0], _PCIE_5)
    return pcie_bytes(run, weights, accumulation) / pcie + updated_on_node * _ADAM_BYTES / HOST_RAM


def pcie_bytes(run: RunSpec, weights: Weights, accumulation: int) -> float:
    """Bytes between one GPU and its host in a step, both ways, with offload of the optimizer.

    The GPU's share of the gradients goes to the host in every micro-batch. DeepSpeed adds them up
    on the GPU, so that all but the first come back for it (`async_accumulate_grad_in_cpu_via_gpu`
    in stage_1_and_2.py, `partition_grads` in stage3.py). Updated parameters return once, or, if
    they are offloaded too, for forward and backward of every micro-batch. FSDP2 sends shards in
    fp32 (`all_gather_inputs` in torch's _fsdp_param.py).
    """
    fsdp = run.engine.kind == "fsdp"
    width = FP32 if fsdp or not (run["bf16"] or run["fp16"]) else HALF
    gradients = (accumulation if fsdp else 2 * accumulation - 1) * weights.trained
    parameters = 2 * accumulation * weights.total if run.engine.offload_param != "none" else weights.trained
    return (gradients + parameters) * width / run.world_size
