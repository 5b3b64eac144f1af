"""What the micro-batches of one model keep in memory, and which of them fit on a GPU."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recipes.errors import mistake, one_line
from recipes.legal.models import types_with_fused_loss
from recipes.planner.allocator import with_cached
from recipes.planner.memory import (
    CLOSED_FORM,
    EAGER,
    EVALUATION,
    LOADING,
    LOOP,
    MATH,
    PACKAGED,
    TRAINING,
    Adapters,
    Case,
    Components,
    Memory,
    Traced,
    Weights,
    casts_the_model,
    mixed_precision,
    recomputes,
)
from recipes.planner.speed import StepTime, step_time
from recipes.rules.data_and_model import what_peft_accepts
from recipes.run import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Of the readings in tests/benchmarks/published.py two lie 3.5 % and 7.8 % above the plan, the
# others at most 2 %: what their allocator reserved, not what was allocated.
MARGIN = 0.06
CLOSED_FORM_MARGIN = 0.25  # for a model that cannot be traced; a choice, not a measurement


# --- One model ------------------------------------------------------------------------------------


class Estimator:
    """Memory of one model's micro-batches. Two cached traces give every other size."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = _with_padding(config)
        self._weights: dict[tuple[str, Adapters | None], Weights] = {}
        self._traced: dict[Case, Traced] = {}
        self._untraceable = False

    def memory(self, run: RunSpec, micro: int) -> Memory:
        """What the run keeps at this micro-batch and its global batch.

        Raises `UserError` if the model cannot be built, or cannot have these adapters.
        """
        return Memory(run, self.weights(run), self.traced(run, micro), share(run) // micro, self._evaluation(run))

    def weights(self, run: RunSpec) -> Weights:
        """The model's parameters with the run's task and adapters. Raises `UserError`."""
        from recipes.planner.trace import weigh

        adapters = _adapters(run)
        if adapters:  # how wide they and the numbers of 4-bit products are changes no count
            adapters = replace(adapters, in_fp32=True, four_bits=adapters.four_bits and "bfloat16")
        key = (run["task"], adapters)
        if key not in self._weights:
            try:
                self._weights[key] = weigh(self.config, *key)
            except Exception as error:  # models and peft raise exceptions of their own
                message = one_line(error)
                if "Unrecognized configuration class" in message:
                    what = f"there is no {run['task']} model of type {self.config.model_type}"
                    fix = "a decoder, or an encoder with --task sequence_classification"
                    raise mistake("model", what, fix) from None
                if adapters is None:
                    what = f"cannot be built: {message}"
                    raise mistake("model", what, "a config.json that transformers loads") from None
                what = f"peft refuses this model: {message}"
                raise mistake("use_peft", what, what_peft_accepts(message, run["use_dora"])) from None
        return self._weights[key]

    def length(self, run: RunSpec) -> int:
        """Tokens per sequence: the run's `max_length`, at most the model's positions."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return min(run["max_length"], longest) if longest and longest > 0 else run["max_length"]

    def traced(self, run: RunSpec, micro: int) -> Traced:
        return self._of_case(run, self.case(run, micro))

    def _evaluation(self, run: RunSpec) -> Traced | None:
        """One batch of an evaluation, None without evaluations.

        Trainer calls the model as in training, with its autocast: `bf16_full_eval` holds only after
        the last step (`evaluation_loop`). It keeps no logits from one batch to the next: our
        language models have no metrics, and a classifier's are a few numbers an example.
        """
        if run["eval_strategy"] == "no":
            return None
        case = self.case(run, run["per_device_eval_batch_size"])
        return self._of_case(run, replace(case, evaluation=True, checkpointing=False))

    def _of_case(self, run: RunSpec, case: Case) -> Traced:
        from recipes.planner.trace import at_batch

        if self._untraceable:
            return self._closed_form(run, case)
        try:
            # A mask of joined rows grows with the square of the micro-batch, and Liger's chunks of
            # tokens are powers of 2. A batch of 1 takes views where others are copied.
            if case.batch > 1 and not run["padding_free"] and not case.liger:
                with contextlib.suppress(ValueError):
                    two, three = (self._trace(run, replace(case, batch=batch)) for batch in (2, 3))
                    return at_batch(two, three, case.batch)
            return self._trace(run, case)
        except Exception:  # a model's own code may fail in any way on fake tensors
            self._untraceable = True
            return self._closed_form(run, case)

    def _trace(self, run: RunSpec, case: Case) -> Traced:
        from recipes.planner.trace import trace_any

        if case not in self._traced:
            self._traced[case] = trace_any(self.config, self.weights(run), case)
        return self._traced[case]

    def case(self, run: RunSpec, micro: int) -> Case:
        """The micro-batch as the run's collator makes it.

        Rows of different lengths are padded. One row alone is too, if its length is not a multiple
        of 8, and other rows of a run may be. Several examples packed into a row are masked apart.
        Joined ones are one long row, apart by the same mask.
        """
        mixed, casts, joined = mixed_precision(run), casts_the_model(run), run["padding_free"]
        asked = run["attn_implementation"]
        wanted = asked or getattr(self.config, "_attn_implementation", None)  # asked for, or the configuration's own
        return Case(
            batch=1 if joined else micro,
            length=self.length(run) * (micro if joined else 1),
            task=run["task"],
            dtype=mixed if casts and mixed else run["dtype"],
            autocast=None if casts else mixed,
            checkpointing=recomputes(run),
            mask=not run["packing"] or run["packing_strategy"] == "bfd",
            adapters=_adapters(run),
            on_cuda=run.hardware.cuda,
            capability=run.hardware.capability,
            attention=asked if wanted in (None, "eager", "sdpa") else PACKAGED,
            liger=self.has_liger(run),
            label_smoothing=run["task"] == "causal_lm" and bool(run["label_smoothing_factor"]),
        )

    def has_liger(self, run: RunSpec) -> bool:
        """Whether the run asks for Liger's kernels, and the package has some for this model."""
        if not run["use_liger_kernel"] or run["task"] != "causal_lm":
            return False
        return self.config.model_type in types_with_fused_loss()

    def _closed_form(self, run: RunSpec, case: Case) -> Traced:
        """82 bytes per unit of width, token and layer, 12 per logit, and autocast's weight copies.

        This is about what traces of Llama and Qwen models find in mixed precision; dropout takes
        more, and label smoothing 16 per logit. With checkpointing, each layer keeps its input, and
        one layer at a time the rest. An evaluation keeps nothing of the layers before.
        """
        text = self.config.get_text_config()
        tokens = case.batch * case.length
        layer = 82 * tokens * text.hidden_size
        layers = text.num_hidden_layers
        kept = 4 * tokens * text.hidden_size * layers + layer if case.checkpointing else layer * layers
        kept = layer if case.evaluation else kept
        copies = 2 * self.weights(run).total if case.autocast else 0
        vocabulary = text.vocab_size if run["task"] == "causal_lm" else 0
        logits = (16 if case.label_smoothing else 12) * tokens * vocabulary
        return Traced(np.array([[kept + copies, logits, 0]]), forward=1, kernels=frozenset({CLOSED_FORM}))


def _adapters(run: RunSpec) -> Adapters | None:
    if not run["use_peft"]:
        return None
    wanted = run["lora_target_modules"]
    targets = tuple(wanted) if wanted and wanted != ["all-linear"] else "all-linear"
    four_bits = (mixed_precision(run) or "float32") if run["load_in_4bit"] else None
    kind = {"in_fp32": not casts_the_model(run), "dora": run["use_dora"]}
    return Adapters(run["lora_r"], targets, run["lora_dropout"], four_bits, **kind)


def _with_padding(config: PreTrainedConfig) -> PreTrainedConfig:
    """With a padding token, as in training: classifiers on decoders need it for batches."""
    if getattr(config.get_text_config(), "pad_token_id", None) is not None:
        return config
    config = copy.deepcopy(config)
    config.get_text_config().pad_token_id = 0
    return config


# --- One GPU --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A run at one of its micro-batches on the requested GPU, with its time per step.

    `fits_gpu` is about the GPU alone, `fits` about the RAM of a node too, if that is known.
    `margin_bytes` is what stays free on the GPU, negative if the plan exceeds it. `accumulation`
    keeps the global batch. `traced` is false if the model could not be traced: then a closed form
    with a wider margin replaces the trace. `flags` are what the recipe needs in order to fit:
    checkpointing, or a smaller evaluation. `moment` needs most on the GPU (memory.py). If that is
    EVALUATION and does not fit, `evaluation_batch` is the largest --per_device_eval_batch_size that
    does, if any. `notes` say what it has that other plans have not, and what is not counted.
    """

    run: RunSpec
    fits: bool
    micro_batch: int
    accumulation: int
    components: Components
    margin_bytes: int
    host_bytes_per_node: int
    time: StepTime
    traced: bool = True
    fits_gpu: bool = True
    flags: Mapping[str, Any] = field(default_factory=dict)
    moment: str = TRAINING
    evaluation_batch: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.run["recipe"]

    @property
    def total_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True)
class Planner:
    """Runs of one model on one GPU with `usable` bytes, and on nodes with `host` bytes of RAM.

    `host` is None if it is unknown: then any amount is enough. Times assume the share `mfu` of the
    GPU's peak, and `bandwidth` in bytes per second, None if unknown.
    """

    estimator: Estimator
    usable: int
    host: int | None = None
    mfu: float = 1
    bandwidth: float | None = None

    def largest(self, run: RunSpec, sizes: Sequence[int] = ()) -> Planned:
        """The run at the first of these micro-batches that fits, or at the last one if none fits.

        Without any it is the user's own, or the largest that keeps the global batch. What torch
        caches beside its allocations takes longer to find out, and only adds to them: so it is
        asked only where they fit, and weights alone first, which take no trace.
        """
        sizes = sizes or ([run.batch.micro] if asks_for_a_micro_batch(run) else divisors(share(run)))
        for micro in sizes if self._may_fit(run, sizes[-1]) else ():
            if self._may_fit(run, micro) and (entry := self.at(run, micro)).fits:
                return entry
        return self.at(run, sizes[-1])

    def _may_fit(self, run: RunSpec, micro: int) -> bool:
        weights = Memory(run, self.estimator.weights(run), accumulation=share(run) // micro)
        if not all(self._fit(weights, weights.gpu)):
            return False
        memory = self.estimator.memory(run, micro)
        return memory.gpu.total <= self._limit(memory)

    def _fit(self, memory: Memory, gpu: Components) -> tuple[bool, bool]:
        """Whether the GPU has room, with a margin, and whether the node has."""
        on_host = self.host is None or memory.host_bytes * (1 + MARGIN) <= self.host
        return gpu.total <= self._limit(memory), on_host

    def _limit(self, memory: Memory) -> int:
        """The bytes that leave a margin beside them."""
        return int(self.usable / (1 + (CLOSED_FORM_MARGIN if CLOSED_FORM in memory.micro_batch.kernels else MARGIN)))

    def at(self, run: RunSpec, micro: int) -> Planned:
        """The run at this micro-batch and its own global batch, whether that fits or not."""
        estimator, memory = self.estimator, self.estimator.memory(run, micro)
        gpu = with_cached(memory, self._limit(memory))
        fits_gpu, fits_host = self._fit(memory, gpu)
        length, kernels = estimator.length(run), memory.micro_batch.kernels
        return Planned(
            run=run,
            fits=fits_gpu and fits_host,
            micro_batch=micro,
            accumulation=memory.accumulation,
            components=gpu,
            margin_bytes=self.usable - gpu.total,
            host_bytes_per_node=memory.host_bytes,
            time=step_time(run, memory.weights, estimator.config, length, micro, self.mfu, self.bandwidth),
            traced=CLOSED_FORM not in kernels,
            fits_gpu=fits_gpu,
            moment=memory.moment,
            notes=tuple(_notes(run, kernels, estimator.has_liger(run), memory.moment)),
        )

    def best(self, run: RunSpec) -> Planned:
        """The run at the largest micro-batch that fits, or at the smallest one if none fits.

        If it is the evaluation that does not fit: with a half, a quarter, and so on, of its batch,
        on which the result does not depend. If the user has written that batch, the run stays as it
        is, and the entry says which one fits.
        """
        found = entry = self.largest(run)
        batch = run["per_device_eval_batch_size"]
        while not found.fits and found.moment == EVALUATION and batch > 1:
            batch //= 2
            found = self.largest(run.given_too(per_device_eval_batch_size=batch))
        if not found.fits or found is entry:
            return entry
        if run.explicit("per_device_eval_batch_size"):
            return replace(entry, evaluation_batch=batch)
        return replace(found, flags={"per_device_eval_batch_size": batch})

    def splits(self, planned: Planned) -> Iterator[Planned]:
        """Every split of its global batch, largest micro-batch first."""
        for micro in divisors(share(planned.run)):
            yield planned if micro == planned.micro_batch else self.at(planned.run, micro)


def asks_for_a_micro_batch(run: RunSpec) -> bool:
    """Whether the user has written one, or what it follows from."""
    return run.explicit("per_device_train_batch_size") or run.explicit("gradient_accumulation_steps")


def share(run: RunSpec) -> int:
    """Examples that one process takes of each global batch."""
    return run.batch.micro * run.batch.accumulation


def divisors(number: int) -> list[int]:
    """Those of a process's share are the micro-batches that keep the global batch."""
    return [size for size in range(number, 0, -1) if number % size == 0]


def _notes(run: RunSpec, kernels: frozenset[str], has_liger: bool, moment: str) -> Iterator[str]:
    """Of attention that is not a fused kernel, of Liger and torch.compile, of loading.

    What Llama keeps from forward to backward is 0.64 to 0.86 of it if compiled (aot_eager with the
    partitioner of inductor, torch 2.13).
    """
    if moment == LOADING:
        yield "loading needs most, not steps: each GPU has all weights in 4 bits until they are sharded"
    if LOOP in kernels:
        yield "planned as transformers' own loop over a sequence: with a package of kernels the peak is lower"
        yield "what torch caches is not counted: nvidia-smi shows more"
    if run["use_liger_kernel"] and (not has_liger or CLOSED_FORM in kernels):
        yield "planned without Liger's kernels, so the real peak is lower: they are not known for this model"
    if run["torch_compile"] or run["torch_compile_backend"] or run["torch_compile_mode"]:
        graphs = (run["torch_compile_mode"] or "default") not in ("default", "max-autotune-no-cudagraphs")
        higher = ", or with CUDA graphs higher, as their memory is apart" if graphs else ""
        yield f"what torch.compile fuses or computes again is not counted: the real peak is lower{higher}"
    keeps = "which keeps batch x heads x length x length numbers in every layer"
    if EAGER in kernels:
        asked = "as asked for" if run["attn_implementation"] == "eager" else "this model's own"
        yield f"attention is planned as eager ({asked}), {keeps}"
    if MATH in kernels:
        yield f"no fused kernel of torch takes this attention on this card: the math kernel runs, {keeps}"
