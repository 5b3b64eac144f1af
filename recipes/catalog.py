"""The recipes. `baseline` and `standard` stand alone. The others are a base recipe with changes.

A setting is a pair `(value, reason)`. If the value depends on the machine or on other settings, a
small function takes the run and returns the pair. `recipes show` prints every value with its
reason. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Decision = tuple[Any, str]  # a value and its reason
Value = Decision | Callable[[Any], Decision]  # a pair, or a function that returns it for a run

_EVERYWHERE: Mapping[str, Value] = dict(
    restore_callback_states_from_checkpoint=(True, "a resume does not reset the count of early stopping"),
    logging_nan_inf_filter=(
        False,
        "true hides a NaN and costs two host syncs per micro-batch; train.py stops at a logged NaN",
    ),
    save_total_limit=(2, "the newest checkpoint, and the one before in case the newest is damaged"),
)


@dataclass(frozen=True)
class Recipe:
    """A base recipe with changes. A change to None restores the library's default.

    Two possible changes are not settings of train.py: `engine` is the name of a shipped Accelerate
    YAML or the path of another YAML, and `micro_batch_cap` is the largest micro-batch per process.
    `file` is the file that a user's own recipe was read from; empty for a shipped recipe.
    """

    name: str
    purpose: str
    changes: Mapping[str, Value | None]
    base: Recipe | None = None
    file: str = ""

    def but(self, name: str, purpose: str, **changes: Value | None) -> Recipe:
        """Return a new recipe: this recipe with the given values changed."""
        return Recipe(name, purpose, changes, base=self)

    def stated(self, name: str) -> tuple[Recipe, Value] | None:
        """Return the recipe (this or a base) that sets `name`, and the value; None if unset."""
        if name not in self.changes:
            return self.base.stated(name) if self.base else None
        value = self.changes[name]
        return None if value is None else (self, value)

    @property
    def settings(self) -> dict[str, Value]:
        """The values of this recipe and of its bases, by the settings' names."""
        merged = {**(self.base.settings if self.base else {}), **self.changes}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def source(self) -> str:
        """The name or file of this recipe, to be printed as the source of the values it sets."""
        return f"recipe {self.file or self.name}"

    @property
    def engine(self) -> str:
        return self.settings["engine"][0]  # type: ignore[index] # never a function of the run

    @property
    def micro_batch_cap(self) -> int:
        return self.settings["micro_batch_cap"][0]  # type: ignore[index]


# --- The recipes ----------------------------------------------------------------------------------


def baseline() -> Recipe:
    return Recipe(
        "baseline",
        "Trainer's defaults in fp32 on one process: the reference to compare with.",
        dict(
            engine=("single.yaml", "one process has no communication, so only the model takes time"),
            micro_batch_cap=(4, "as in standard, so that both recipes train with the same micro-batches"),
            logging_steps=(1, "shows every step; each log costs a host sync"),
            **_EVERYWHERE,
        ),
    )


def standard() -> Recipe:
    return Recipe(
        "standard",
        "Plain DDP with the settings that are right for nearly everyone.",
        dict(
            engine=("standard.yaml", "DDP: every GPU holds the whole model, and gradients are averaged"),
            micro_batch_cap=(4, "small enough for most models and GPUs; `recipes fit` finds a larger one"),
            bf16=bf16_where_native,
            fp16=fp16_before_sm80,
            dtype=frozen_weights_in_16_bits,
            logging_steps=(5, "each log is an all-gather and a host sync"),
            logging_first_step=(True, "the loss before the first update, so that you can see it fall"),
            ddp_find_unused_parameters=(
                False,
                "true searches the graph every step; only models that skip layers need it",
            ),
            ddp_bucket_cap_mb=(25, "torch's default: large enough for bandwidth, small enough to overlap with compute"),
            dataloader_num_workers=workers_by_cores,
            dataloader_pin_memory=(True, "a batch in page-locked memory is copied to the GPU faster"),
            expandable_segments=segments_grow_on_cuda,
            **_EVERYWHERE,
        ),
    )


def fast() -> Recipe:
    return standard().but(
        "fast",
        "DDP for speed: larger micro-batches, packed sequences, compiled layers, fewer logs.",
        engine=("fast.yaml", "DDP: every GPU holds the whole model, and gradients are averaged"),
        micro_batch_cap=(8, "fewer micro-batches per step; `recipes fit` finds the largest micro-batch that fits"),
        logging_steps=(10, "half as many host syncs as standard"),
        gradient_as_bucket_view=(True, "gradients stay in DDP's buckets, which saves memory and the time of a copy"),
        ddp_static_graph=static_graph_without_accumulation,
        optim=("adamw_torch_fused", "one kernel for the whole update: 3 % more tokens/s (1.2B, H200)"),
        tf32=tf32_from_sm80,
        packing=packing_for_language_models,
        torch_compile=compile_where_shapes_are_fixed,
        use_regional_compilation=regions_where_compiled,
        attn_implementation=flex_where_packed,
        use_liger_kernel=liger_where_installed,
        liger_kernel_config=liger_loss_beside_compile,
        cudnn_benchmark=benchmark_where_shapes_are_fixed,
        dataloader_prefetch_factor=prefetch_with_workers,
    )


def sharded() -> Recipe:
    return standard().but(
        "sharded",
        "FSDP2: parameters, gradients and optimizer state sharded over the GPUs, for models that DDP cannot hold.",
        engine=("sharded.yaml", "FSDP2: each GPU holds a part of the model, and gathers one layer at a time"),
        accelerator_config=(
            {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
            "gradients are scattered after every micro-batch; otherwise each GPU would hold all gradients",
        ),
        ddp_find_unused_parameters=None,
        ddp_bucket_cap_mb=None,
    )


def memory() -> Recipe:
    return standard().but(
        "memory",
        "ZeRO-2: optimizer state in host RAM, activations recomputed; slower, and fits where DDP does not.",
        engine=("memory.yaml", "DeepSpeed ZeRO-2: gradients sharded, the optimizer's state in host RAM"),
        micro_batch_cap=(1, "a micro-batch of one example needs the least memory for activations"),
        bf16=bf16_unless_gpu_is_too_old,
        logging_steps=(10, "half as many host syncs as standard"),
        optim=("adamw_torch", "DeepSpeed runs it on the host as DeepSpeedCPUAdam, in AdamW mode"),
        gradient_checkpointing=(True, "recomputes activations: less memory for about a third more compute"),
        gradient_checkpointing_kwargs=({"use_reentrant": False}, "works with frozen and unused layers too"),
    )


def memory_zero3() -> Recipe:
    return memory().but(
        "memory_zero3",
        "ZeRO-3: parameters in host RAM too, gathered layer by layer; the slowest, fits the most.",
        engine=("memory_zero3.yaml", "DeepSpeed ZeRO-3: parameters sharded too, and kept in host RAM"),
    )


RECIPES = {recipe.__name__: recipe for recipe in (baseline, standard, fast, sharded, memory, memory_zero3)}

# For a run that names neither a model nor data: a small byte-level decoder learns Python's source.
DEMONSTRATION: Mapping[str, Decision] = dict(
    max_steps=(200, "about a minute on two CPU cores"),
    learning_rate=(3e-3, "a small model trained from scratch tolerates a high rate"),
    warmup_steps=(20, "a tenth of the demonstration's 200 steps"),
    lr_scheduler_type=("cosine", "the rate ends near zero, so that the loss settles"),
    max_length=(256, "bytes of context"),
    packing=(True, "no compute is spent on padding"),
    packing_strategy=("wrapped", "source files are longer than a sequence, so they are joined and cut"),
)

# If the user names no model, rules read these values of the model that is trained from scratch.
DEMONSTRATION_MODEL: Mapping[str, Any] = dict(model_type="llama", max_position_embeddings=1024)


# --- Values that depend on the run ----------------------------------------------------------------


def bf16_where_native(run) -> Decision:
    if run.explicit("fp16") and run["fp16"]:
        return False, "fp16 was asked for"
    if not run.hardware.cuda:
        return False, "no GPU: fp32"
    if run.hardware.capability >= (8, 0):
        return True, f"native on compute capability {_dotted(run.hardware.capability)}"
    return False, f"compute capability {_dotted(run.hardware.capability)} only emulates bf16"


def fp16_before_sm80(run) -> Decision:
    if run["bf16"] or not run.hardware.cuda or run.hardware.capability >= (8, 0):
        return False, "bf16 or fp32 is used instead"
    return True, f"compute capability {_dotted(run.hardware.capability)} computes in fp16, and only emulates bf16"


def bf16_unless_gpu_is_too_old(run) -> Decision:
    is_too_old = run.hardware.cuda and run.hardware.capability < (8, 0)
    if is_too_old or (run.explicit("fp16") and run["fp16"]):
        return bf16_where_native(run)
    return True, "ZeRO keeps fp32 master weights; in 16 bits, weights and gradients take half the memory"


def frozen_weights_in_16_bits(run) -> Decision:
    if not run["use_peft"] or not run.hardware.cuda or not run["bf16"]:
        return "float32", "16-bit weights lose small updates; with LoRA on a GPU, frozen weights are in bf16"
    if run.engine.kind in ("deepspeed", "fsdp"):
        return "float32", f"under {run.engine.title}, frozen and trained weights have the same type"
    return "bfloat16", "frozen weights take half the memory; the adapters stay in float32"


def tf32_from_sm80(run) -> Decision:
    if run.hardware.capability >= (8, 0):
        return True, "matrix products that stay in fp32 run on tensor cores"
    return None, "needs a GPU of compute capability 8.0 or higher"


def workers_by_cores(run) -> Decision:
    if not run.hardware.cuda:
        return 0, "the training itself uses the CPU cores"
    share = run.hardware.cores // run.local_world_size
    if share >= 4:
        return 4, "enough to keep a GPU busy"
    return max(1, share), f"cores for each process: {share}"


def segments_grow_on_cuda(run) -> Decision:
    if not run.hardware.cuda:
        return False, "only on CUDA"
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & run.place.environment.keys():
        return False, "PYTORCH_(CUDA_)ALLOC_CONF in the environment decides instead"
    if run["torch_compile_mode"] in ("reduce-overhead", "max-autotune"):
        return False, "CUDA graphs need memory at fixed addresses"
    return True, "less memory lies idle: torchtune reserved 10.8 GiB in place of 16.4 (its pull request 1185)"


def prefetch_with_workers(run) -> Decision:
    if run["dataloader_num_workers"]:
        return 4, "batches that each worker prepares ahead"
    return None, "torch refuses it with 0 workers"


def static_graph_without_accumulation(run) -> Decision:
    if run["gradient_accumulation_steps"] == 1:
        return True, "accumulation is 1: every step has one backward, so DDP plans it once and reuses the plan"
    return False, "a static graph aborts with accumulation above 1"


def packing_for_language_models(run) -> Decision:
    if run["task"] == "causal_lm":
        return True, "little compute is spent on padding, and every batch has the same shape"
    return False, "each example keeps its own label"


def compile_where_shapes_are_fixed(run) -> Decision:
    if not run.hardware.cuda:
        return False, "only on CUDA"
    if not run["packing"]:
        return False, "batches vary in length, and each new shape would be compiled again"
    return True, "packed batches have one shape: 6 % more tokens/s (1.2B, H200), after 30 s of compiling"


def regions_where_compiled(run) -> Decision:
    if not run["torch_compile"] or run.engine.kind not in ("single", "ddp"):
        return False, "only with torch_compile, on one GPU or under DDP"
    return True, "equal layers are compiled once: the first step ends after 30 s (1.2B, H200)"


def flex_where_packed(run) -> Decision:
    if not run["torch_compile"] or not run["bf16"] or run["gradient_checkpointing"] or run.world_size > 1:
        return None, "the model's default; flex was measured only on one GPU: bf16, compiled, packed, no checkpointing"
    return "flex_attention", "skips attention between packed examples: 11 % more tokens/s than sdpa (1.2B, H200)"


def benchmark_where_shapes_are_fixed(run) -> Decision:
    if run.hardware.cuda and run["packing"]:
        return True, "all batches have the same shape, so cuDNN searches only once"
    return False, "shapes vary, or there is no GPU"


def liger_where_installed(run) -> Decision:
    if run["label_smoothing_factor"]:
        return False, "Liger's fused loss does not smooth labels, and evaluations would fail"
    if run["torch_compile"] and run.place.own_script:
        return False, "torch.compile cannot trace Liger's loss; only train.py keeps the loss out of compiled code"
    if run.hardware.cuda and run.hardware.liger:
        return True, "a language model's logits are never in memory as a whole: 2.3 GiB less, same speed (1.2B, H200)"
    return False, "needs CUDA and the package liger-kernel"


def liger_loss_beside_compile(run) -> Decision:
    if run["use_liger_kernel"] and run["torch_compile"]:
        fused = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
        return dict.fromkeys(fused, False), "only Liger's loss, because torch.compile fuses the other operations itself"
    return None, "all of Liger's kernels, if Liger is used"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
