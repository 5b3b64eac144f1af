"""Published or measured facts about a GPU and its node: CUDA context, PCIe, Adam on the host."""

from recipes.run import RunSpec, known_gpus

_MIB = 1 << 20


# --- PCIe, and Adam on the host -------------------------------------------------------------------

# Bytes per second between a GPU and its host, one way, by the major compute capability: half of the
# two-way figure in NVIDIA's data sheets. T4: PCIe Gen3 x16, 32 GB/s; A100, A10, L4, L40S: Gen4,
# 64 GB/s; H100, H200, B200: Gen5, 128 GB/s.
_PCIE = {7: 16e9, 8: 32e9}
# Adam on the host, in seconds for each parameter that a node updates: 8.2 s for 11.6B (DeepSpeed's
# author, github.com/deepspeedai/DeepSpeed/pull/735). issues/6834 has 10 s for 18B on a node.
ADAM_SECONDS = 8.2 / 11.6e9


def pcie_of(capability: tuple[int, int]) -> float:
    return _PCIE.get(capability[0], 64e9)


# --- The CUDA context -----------------------------------------------------------------------------


# MiB of a training's context, by the start of the GPU's name in the catalogue. A context holds only
# kernels that were called: torch makes CUDA load a kernel at its first call (CUDA_MODULE_LOADING).
_OURS = "torch 2.11, CUDA 13.0, driver 580.159.04, tests/gpu/results"
_READ = {
    "T4": (140.875, "published for T4 (torch 2.10, CUDA 12.8, github.com/Anassbzdd/fitcheck)"),
    "A100": (426, "published for A100 (driver 535.183, CUDA 12.2, github.com/pytorch/torchrec/pull/3580)"),
    "H200": (770, f"measured on an H200 ({_OURS})"),
}
_READ["H100"] = _READ["H200"]  # the H200 has the same processor and kernels
_NCCL = 546  # MiB of a communicator in addition to the context, measured with one rank


def context_of(run: RunSpec) -> tuple[int, str]:
    """Return the bytes that CUDA and NCCL take on each GPU of this run, outside torch's allocator,
    and the source of the figure. The figure is the one known for this kind of GPU; for an unknown
    kind, the largest known one; on a CPU, 0.
    """
    if not run.hardware.cuda:
        return 0, ""
    card = known_gpus.known(run.hardware.gpus[0].name) or run.hardware.gpus[0]
    alike = next((name for name in _READ if card.name.startswith(name)), None)
    mib, source = _READ[alike] if alike else max(_READ.values())
    source = source if alike else f"the largest known value, {source}"
    if run.world_size > 1 or run.engine.kind == "fsdp":  # FSDP2 uses NCCL on one GPU too
        mib, source = mib + _NCCL, f"{source}, with {_NCCL} MiB for NCCL, measured with one rank; several may take more"
    return round(mib * _MIB), source
