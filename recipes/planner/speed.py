"""The time of a step: FLOPs at a given share of the GPU's peak, bytes at a given bandwidth.

Pure arithmetic. Data, evaluation and saves are left out. The time of offload is added to the other
times, although offload may overlap with compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipes.planner.memory import FP32, HALF, HALF_A_BYTE, Weights, recomputes, shards
from recipes.rules.facts import syncs_each_micro_batch
from recipes.run import RunSpec
from recipes.run.hardware import Gpu
from recipes.run.known_gpus import known

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The share of a GPU's peak that trainings reach (MFU), and its source. The first entry that the
# GPU's name starts with is used. torchtitan: Llama 3 8B with FSDP2, in docs/performance.md,
# 33 % on eight H100 without torch.compile (39 % with it), 57 % on 64 A100. RTX 4090: GPT-2 at 29 %
# of an A100's peak, 55 % of its own, github.com/karpathy/nanoGPT/issues/182. V100: bert-large in
# fp16, 18.64 sequences of 512 tokens per second, in Hugging Face's single-GPU training guide.
_MFU = (
    ("H", 0.33, "torchtitan, H100"),
    ("A100", 0.57, "torchtitan, A100"),
    ("RTX 4090", 0.55, "nanoGPT, RTX 4090"),
    ("V100", 0.17, "Hugging Face, V100"),
    ("", 0.35, "a guess: no figure is published for this GPU"),
)

# Bus bandwidth of nccl-tests between the GPUs of one node. NVLink: a ring reaches 370 GB/s of the
# 450 that an H100's links have (NCCL's author, github.com/NVIDIA/nccl-tests/issues/212). By data
# sheets, V100's links have a third of H100's bandwidth, B200's links twice. A100: 200 (issues/149).
# PCIe: 20 of the 32 GB/s of Gen4 (issues/178); other generations are scaled in proportion.
_NVLINK = {"H100 SXM": 370e9, "H200 SXM": 370e9, "A100": 200e9, "V100": 123e9, "B200": 740e9}
_OF_PCIE = 20 / 32

# Bytes per second between a GPU and its host, one way, by the major compute capability: half of the
# two-way figure in NVIDIA's data sheets. T4: PCIe Gen3 x16, 32 GB/s; A100, A10, L4, L40S: Gen4,
# 64 GB/s; H100, H200, B200: Gen5, 128 GB/s.
_PCIE = {7: 16e9, 8: 32e9}
# Adam on the host, in seconds for each parameter that a node updates: 8.2 s for 11.6B (DeepSpeed's
# author, github.com/deepspeedai/DeepSpeed/pull/735). issues/6834 has 10 s for 18B on a node.
_ADAM_SECONDS = 8.2 / 11.6e9


def mfu_of(card: str) -> tuple[float, str]:
    """Return the share of the GPU's peak that a step is assumed to reach, and its source."""
    return next((share, source) for name, share, source in _MFU if card.startswith(name))


def link_of(gpu: Gpu, processes: int, nodes: int) -> tuple[float | None, str]:
    """Return the bus bandwidth between GPUs in bytes per second, and the name of the link.

    Return (None, "") for one process, for several nodes, and for a GPU not in known_gpus.csv.
    """
    if processes == 1 or nodes > 1 or (card := known(gpu.name)) is None:
        return None, ""
    for name, speed in _NVLINK.items():
        if card.name.startswith(name):
            return speed, "NVLink"
    return _OF_PCIE * pcie_of(gpu.capability), "PCIe"


def pcie_of(capability: tuple[int, int]) -> float:
    return _PCIE.get(capability[0], 64e9)


@dataclass(frozen=True)
class StepTime:
    """One optimizer step: seconds (None: unknown time), and the bytes that each GPU sends.

    `host` is the time that offload adds, for PCIe and for Adam on the host at published speeds. The
    real time may be longer: in gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a, offload
    cuts the throughput of a 7B on 8 A800 to 46 %. `hidden` is the most communication time that
    compute can hide.
    """

    compute: float | None
    sent_bytes: int
    communication: float | None
    host: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float | None:
        """Seconds of a step, None if compute is unknown. Unknown communication is taken as 0."""
        return None if self.compute is None else self.known

    @property
    def known(self) -> float:
        """Seconds of a step, without the parts whose time is unknown."""
        return (self.compute or 0) + max(0, (self.communication or 0) - self.hidden) + self.host


def step_time(
    run: RunSpec,
    weights: Weights,
    config: PreTrainedConfig,
    length: int,
    micro: int,
    mfu: float,
    bandwidth: float | None,
) -> StepTime:
    """Estimate the time of one optimizer step at this micro-batch and the run's global batch.

    `length` is tokens per sequence. `bandwidth`, in bytes per second, is the bus bandwidth of
    nccl-tests: the bytes that each GPU sends in a collective, divided by the time.
    """
    accumulation = run.batch.share // micro
    sent = sent_bytes(run, weights, accumulation)
    flops, peak = flops_per_token(run, weights, config, length), _peak(run)
    compute = flops * length * micro * accumulation / (mfu * peak) if flops and peak else None
    host = host_seconds(run, weights, accumulation)
    # DDP sends during the last micro-batch's backward: two thirds of the micro-batch's compute (Li
    # et al. 2020). ZeRO and FSDP gather and scatter during all compute (Zhao et al. 2023).
    shards_layers = run.engine.kind in ("deepspeed", "fsdp")
    hidden = (compute or 0) * (1 if shards_layers else 2 / 3 / accumulation)
    return StepTime(compute, sent, sent / bandwidth if bandwidth else None, host, hidden)


def _peak(run: RunSpec) -> float | None:
    """Return one GPU's peak FLOP/s in the run's precision. None if it is unknown, as in fp32."""
    card = known(run.hardware.gpus[0].name) if run.hardware.gpus else None
    if card is None or not (run["bf16"] or run["fp16"]):
        return None
    return card.peak_flops or (card.peak_fp16_flops if run["fp16"] else None)


def model_flops(parameters: int, config: PreTrainedConfig, length: float) -> float:
    """Return the training FLOPs per token: 6N + 6*layers*heads*head_dim*length.

    N is `parameters`: callers leave out an untied input embedding, whose lookup takes no FLOPs.
    Source: PaLM (Chowdhery et al. 2022), appendix B; the causal mask halves the attention term.
    """
    return 6 * parameters + _attention_flops(config, length)


def flops_are_known(config: PreTrainedConfig) -> bool:
    """True if `model_flops` holds: for a transformer in which every token uses every parameter."""
    known = all(hasattr(config, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    return known and not any("expert" in name for name in config.to_dict())


def unknown_compute(run: RunSpec, config: PreTrainedConfig) -> str:
    """Return the reason why the time of compute is unknown, empty if the time is known."""
    if not flops_are_known(config.get_text_config()):
        return "the FLOPs of models with experts, or without attention, are not counted"
    if _peak(run):
        return ""
    if not (run["bf16"] or run["fp16"]):
        return "the GPU's peak in fp32 is unknown"
    return "the peak of this GPU is unknown: choose a known GPU with --gpu NAME"


def flops_per_token(run: RunSpec, weights: Weights, config: PreTrainedConfig, length: int) -> float | None:
    """Return the FLOPs per token with recomputation, None if `model_flops` does not hold.

    Of the six FLOPs per parameter, two are for the forward pass, two for the gradient of the input,
    and two for the gradient of the weight, which frozen weights skip. Checkpointing runs the
    forward pass twice. DoRA with dropout multiplies by the frozen weights of the layers twice.
    """
    text = config.get_text_config()
    if not flops_are_known(text):
        return None
    used, attention = weights.total - weights.looked_up, _attention_flops(text, length)
    trained = min(weights.trained, used)
    again = used - (weights.outside_layers - weights.looked_up) if run["use_dora"] and run["lora_dropout"] else 0
    recomputed = 2 * (used + again) + attention / 3 if recomputes(run) else 0
    return 4 * (used + again) + 2 * trained + attention + recomputed


def _attention_flops(config: PreTrainedConfig, length: float) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 6 * config.num_hidden_layers * config.num_attention_heads * width * length


def exchanges(run: RunSpec, accumulation: int) -> int:
    """Return how many times gradients are reduced in an optimizer step; 0 with one process.

    DDP, FSDP2 and ZeRO-1 reduce once, in the last micro-batch. With `sync_each_batch`, DDP and
    FSDP2 reduce in each micro-batch, as ZeRO-2 and ZeRO-3 always do.
    """
    if run.world_size == 1:
        return 0
    each = run.engine.zero_stage >= 2 if run.engine.kind == "deepspeed" else syncs_each_micro_batch(run)
    return accumulation if each else 1


def sent_bytes(run: RunSpec, weights: Weights, accumulation: int) -> int:
    """Return the bytes that each GPU sends in an optimizer step, with ring algorithms over p GPUs.

    An all-reduce sends 2(p-1)/p of the tensor, a reduce-scatter or an all-gather (p-1)/p. ZeRO-3
    and FSDP2 gather the parameters twice for each micro-batch; FSDP2 gathers the head once.
    Source: ZeRO (Rajbhandari et al. 2020), section 7, and `_held_by_fsdp` in memory.py.
    """
    share, times = (run.world_size - 1) / run.world_size, exchanges(run, accumulation)
    if run.engine.kind not in ("deepspeed", "fsdp"):
        width = FP32 if run["ddp_comm_hook"] == "no" else HALF
        return round(2 * share * times * weights.trained * width)
    width = HALF if run["bf16"] or run["fp16"] else FP32
    if run.engine.kind == "fsdp":
        return _sent_by_fsdp(run, weights, accumulation, width)
    gradients, parameters = times * weights.trained, weights.trained
    if run.engine.zero_stage == 3:
        parameters = 2 * accumulation * weights.total
    return round(share * (gradients + parameters) * width)


def _sent_by_fsdp(run: RunSpec, weights: Weights, accumulation: int, width: int) -> int:
    """Return the bytes a GPU sends to gather and scatter its shards, and to all-reduce replicas."""
    copies = run.engine.parallelism.dp_replicate_size
    among_shards, among_copies = (shards(run) - 1) / shards(run), 2 * (copies - 1) / copies / shards(run)
    times = exchanges(run, accumulation)
    whole = weights.total - weights.in_4_bits * (1 - HALF_A_BYTE / width)
    gathered = accumulation * (2 * whole - (weights.outside_layers - weights.looked_up))
    return round(((gathered + times * weights.trained) * among_shards + times * weights.trained * among_copies) * width)


def host_seconds(run: RunSpec, weights: Weights, accumulation: int) -> float:
    """Return the seconds per step of PCIe transfers and Adam on the host; 0 without offload."""
    if run.engine.offload_optimizer == "none":
        return 0.0
    updated_on_node = weights.trained * run.local_world_size / run.world_size
    exchange = pcie_bytes(run, weights, accumulation) / pcie_of(run.hardware.capability)
    return exchange + updated_on_node * _ADAM_SECONDS


def pcie_bytes(run: RunSpec, weights: Weights, accumulation: int) -> float:
    """Return the bytes between one GPU and its host in a step, both ways, with optimizer offload.

    DeepSpeed sends the GPU's share of the gradients to the host once in fp32, for Adam. With
    accumulation, DeepSpeed keeps the 16-bit sum of gradients on the host, but adds on the GPU: the
    sum goes to the host after every micro-batch, and returns before every later one. ZeRO-3 moves
    the sum both ways in every micro-batch, even without accumulation (`copy_gradients_to_cpu` and
    `async_inplace_copy_grad_to_fp32_buffer_from_gpu` in stage_1_and_2.py, `partition_grads` in
    stage3.py). Updated parameters return once, offloaded parameters in each forward and backward.
    FSDP2 moves fp32 shards for each pass, and fp32 gradients per micro-batch (`all_gather_inputs`).
    """
    fsdp = run.engine.kind == "fsdp"
    width = FP32 if fsdp or not (run["bf16"] or run["fp16"]) else HALF
    of_sum = 2 * accumulation if run.engine.zero_stage == 3 else 2 * accumulation - 1 if accumulation > 1 else 0
    gradients = (FP32 * accumulation if fsdp else FP32 + width * of_sum) * weights.trained
    parameters = 2 * accumulation * weights.total if run.engine.offload_param != "none" else weights.trained
    return (gradients + parameters * width) / run.world_size
