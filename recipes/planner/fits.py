"""The memory of one model at any micro-batch, and the largest micro-batch that fits on a GPU."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from recipes.errors import mistake, one_line
from recipes.planner.allocator import with_cached
from recipes.planner.memory import (
    COMPILED,
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
from recipes.rules.data_and_model import fuses_the_loss, what_peft_accepts
from recipes.rules.facts import mapping
from recipes.rules.local_model import max_positions
from recipes.rules.table import compiles
from recipes.run import RunSpec
from recipes.run.fitted import asks_for_a_micro_batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Memory that must stay free, relative to the plan. On GPUs, plans were at most 5 % below measured
# memory, except for mixtures of experts: 8 to 11 % below (tests/benchmarks/README.md).
MARGIN = 0.06
_estimators: dict[Any, Estimator] = {}  # by model, for all plans of this process


# --- One model ------------------------------------------------------------------------------------


def estimator_of(config: PreTrainedConfig) -> Estimator:
    """Return a model's Estimator, which keeps its traces for the next plan in this process."""
    key = type(config), config.to_json_string(), getattr(config, "_attn_implementation", None)
    return _estimators.setdefault(key, Estimator(config))


class Estimator:
    """The memory of one model at any micro-batch. One trace usually serves all micro-batches."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = _with_padding(config)
        self._weights: dict[tuple[str, Adapters | None], Weights] = {}
        self._traced: dict[Case, Traced] = {}

    def memory(self, run: RunSpec, micro: int) -> Memory:
        """Return the memory of the run at this micro-batch and the run's global batch.

        Raises `UserError` if the model cannot be built or traced, or if peft refuses the adapters.
        """
        micro_batch = self._of_case(run, self.case(run, micro))
        return Memory(run, self.weights(run), micro_batch, run.batch.share // micro, self._evaluation(run))

    def weights(self, run: RunSpec) -> Weights:
        """Count the parameters. Raises `UserError` if task or adapters do not suit the model."""
        from recipes.planner.trace import weigh

        adapters = _adapters(run)
        if adapters:  # one key for all dtypes, which do not change the counts
            adapters = replace(adapters, in_fp32=True, four_bits=adapters.four_bits and "bfloat16")
        key = (run["task"], adapters)
        if key not in self._weights:
            try:
                self._weights[key] = weigh(self.config, *key)
            except Exception as error:  # models and peft raise exceptions of their own
                message = one_line(error)
                if adapters is None:
                    fix = "use a decoder, or an encoder with --task sequence_classification"
                    raise mistake("model", f"cannot be built for {run['task']}: {message}", fix) from None
                what = f"peft refuses this model: {message}"
                raise mistake("use_peft", what, what_peft_accepts(message, run["use_dora"])) from None
        return self._weights[key]

    def length(self, run: RunSpec) -> int:
        """Return the tokens per sequence: the run's `max_length`, at most the model's positions."""
        return min(run["max_length"], max_positions(self.config.to_dict()) or run["max_length"])

    def _evaluation(self, run: RunSpec) -> Traced | None:
        """Return the trace of one evaluation batch, or None if the run has no evaluations.

        Trainer evaluates with the training's autocast: `bf16_full_eval` takes effect only after the
        last step (`evaluation_loop`). Trainer keeps no logits of language models between batches,
        because train.py has no metrics for them. A classifier's logits are a few bytes per example.
        """
        if run["eval_strategy"] == "no":
            return None
        case = self.case(run, run["per_device_eval_batch_size"])
        # Trainer evaluates the model that accelerate has not compiled.
        return self._of_case(run, replace(case, evaluation=True, checkpointing=False, compiled=False))

    def _of_case(self, run: RunSpec, case: Case) -> Traced:
        if case.compiled:
            with contextlib.suppress(Exception):  # on failure, plan uncompiled layers: too high, as a note says
                return self._of_batch(run, case)
            case = replace(case, compiled=False)
        try:
            return self._of_batch(run, case)
        except Exception as error:  # a model's own code may fail in any way on fake tensors
            what = f"cannot be planned: a step on tensors without data failed: {one_line(error)}"
            raise mistake("model", what, "use `recipes fit`, which measures the memory in real steps") from None

    def _of_batch(self, run: RunSpec, case: Case) -> Traced:
        """Trace copies of a small batch, and extrapolate to the case's batch. The number of copies
        shares no factor with any model dimension (see `at_batch`). The small batch is one row. With
        Liger, it has the full batch's largest odd divisor, so that the loss keeps its chunk count.
        """
        from recipes.planner.trace import trace_any

        weights = self.weights(run)
        smallest = case.batch // (case.batch & -case.batch) if case.liger else 1
        sizes = {30, case.length, *(size for size, _ in weights.sizes if size)}  # 30 = 2*3*5: primes of `short_lengths`
        copies = next(many for many in count(11) if all(math.gcd(many, size) == 1 for size in sizes))
        small = replace(case, batch=smallest, copies=copies)
        return trace_any(self.config, weights, small, case.batch // smallest, self._traced)

    def case(self, run: RunSpec, micro: int) -> Case:
        """Describe the micro-batch that the run's collator makes.

        Without packing, the batch has a mask, because rows are padded: several rows to one length,
        a single row to a multiple of 8. With `bfd` packing, the mask separates a row's examples.
        """
        mixed, casts = mixed_precision(run), casts_the_model(run)
        by = {run["torch_compile_backend"], run["torch_compile_mode"]}  # only inductor without CUDA graphs is traced
        asked = run["attn_implementation"]
        wanted = asked or getattr(self.config, "_attn_implementation", None)  # asked for, or the configuration's own
        return Case(
            batch=micro,
            length=self.length(run),
            task=run["task"],
            dtype=mixed if casts and mixed else run["dtype"],
            autocast=None if casts else mixed,
            checkpointing=recomputes(run),
            mask=not run["packing"] or run["packing_strategy"] == "bfd",
            adapters=_adapters(run),
            on_cuda=run.hardware.cuda,
            capability=run.hardware.capability,
            attention=asked if wanted in (None, "eager", "sdpa") else PACKAGED,
            liger=self.liger(run),
            liger_layers=self.liger(run) and False not in mapping(run["liger_kernel_config"]).values(),
            compiled=run["use_regional_compilation"]
            and compiles(run)
            and by <= {None, "inductor", "default"}
            and not recomputes(run),
        )

    def liger(self, run: RunSpec) -> bool:
        """True if Liger computes the loss: never with label smoothing, which needs the logits."""
        of_this = replace(run, model={"model_type": self.config.model_type})
        return fuses_the_loss(of_this) and not run["label_smoothing_factor"]


def _adapters(run: RunSpec) -> Adapters | None:
    if not run["use_peft"]:
        return None
    wanted = run["lora_target_modules"]
    targets = tuple(wanted) if wanted and wanted != ["all-linear"] else "all-linear"
    four_bits = (mixed_precision(run) or "float32") if run["load_in_4bit"] else None
    kind = {"in_fp32": not casts_the_model(run), "dora": run["use_dora"]}
    return Adapters(run["lora_r"], targets, run["lora_dropout"], four_bits, **kind)


def _with_padding(config: PreTrainedConfig) -> PreTrainedConfig:
    """Add a padding token if none is set, as train.py does: a decoder classifier needs one."""
    if getattr(config.get_text_config(), "pad_token_id", None) is not None:
        return config
    config = copy.deepcopy(config)
    config.get_text_config().pad_token_id = 0
    return config


# --- One GPU --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A run at one micro-batch: its memory on the requested GPU, and its time per step."""

    run: RunSpec
    fits: bool  # on the GPU, and in the RAM of a node if that RAM is known
    micro_batch: int
    accumulation: int  # keeps the run's global batch
    components: Components
    host_bytes_per_node: int
    time: StepTime
    fits_gpu: bool = True
    flags: Mapping[str, Any] = field(default_factory=dict)  # added so that the run fits, such as checkpointing
    moment: str = TRAINING  # the moment that needs the most GPU memory (memory.py)
    notes: tuple[str, ...] = ()  # for the user: changes, unusual kernels, memory that is not counted

    @property
    def name(self) -> str:
        return self.run["recipe"]

    @property
    def total_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True)
class Planner:
    """Plans runs of one model on GPUs with `usable` bytes, in nodes with `host` bytes of RAM.

    If `host` is None, RAM is not checked. Times assume the share `mfu` of the GPU's peak FLOP/s,
    and `bandwidth` in bytes/s (None: unknown). Raises `UserError` if the model cannot be planned.
    """

    estimator: Estimator
    usable: int
    host: int | None = None
    mfu: float = 1
    bandwidth: float | None = None

    def best(self, run: RunSpec) -> Planned:
        """Plan the run at the largest micro-batch that fits, or at the smallest one if none fits.

        If no micro-batch fits, and evaluations need the most memory, the evaluation batch is halved
        until the run fits (or kept, if the run never fits). Results do not depend on this batch.
        """
        found = entry = self._largest(run)
        batch = run["per_device_eval_batch_size"]
        while not found.fits and found.moment == EVALUATION and batch > 1:
            batch //= 2
            flags = {"per_device_eval_batch_size": batch}
            found = replace(self._largest(run.given_too(**flags)), flags=flags)
        return found if found.fits else entry

    def _largest(self, run: RunSpec) -> Planned:
        """Plan as `best` does, at the run's own evaluation batch."""
        most = run.batch.micro if asks_for_a_micro_batch(run) else run.batch.share  # not above the user's own
        for micro in run.batch.micro_batches:
            if micro <= most and self._may_fit(run, micro) and (entry := self.at(run, micro)).fits:
                return entry
        return self.at(run, 1)

    def _may_fit(self, run: RunSpec, micro: int) -> bool:
        """Return False if weights, gradients and optimizer alone do not fit, without any trace."""
        weights = Memory(run, self.estimator.weights(run), accumulation=run.batch.share // micro)
        return self._fits_gpu(weights.gpu) and self._fits_host(weights)

    @property
    def _limit(self) -> int:
        """The most bytes that a run may take: the usable bytes less the margin."""
        return int(self.usable / (1 + MARGIN))

    def _fits_gpu(self, gpu: Components) -> bool:
        return gpu.total <= self._limit

    def _fits_host(self, memory: Memory) -> bool:
        return self.host is None or memory.host_bytes * (1 + MARGIN) <= self.host

    def at(self, run: RunSpec, micro: int) -> Planned:
        """Plan the run at this micro-batch and the run's global batch, even if it does not fit."""
        estimator, memory = self.estimator, self.estimator.memory(run, micro)
        gpu, length, case = with_cached(memory, self._limit), estimator.length(run), estimator.case(run, micro)
        liger = case.liger_layers or (case.liger and case.compiled)
        return Planned(
            run=run,
            fits=self._fits_gpu(gpu) and self._fits_host(memory),
            micro_batch=micro,
            accumulation=memory.accumulation,
            components=gpu,
            host_bytes_per_node=memory.host_bytes,
            time=step_time(run, memory.weights, estimator.config, length, micro, self.mfu, self.bandwidth),
            fits_gpu=self._fits_gpu(gpu),
            moment=memory.moment,
            notes=tuple(_notes(run, memory.micro_batch.kernels, liger, memory.moment)),
        )

    def splits(self, planned: Planned) -> Iterator[Planned]:
        """Yield a plan for each micro-batch that keeps the run's global batch, largest first."""
        for micro in planned.run.batch.micro_batches:
            yield planned if micro == planned.micro_batch else self.at(planned.run, micro)


def _notes(run: RunSpec, kernels: frozenset[str], liger: bool, moment: str) -> Iterator[str]:
    """Yield notes on loading, loops, Liger, label smoothing, torch.compile, unfused attention."""
    if moment == LOADING:
        yield "loading needs more memory than steps: each GPU holds all weights in 4 bits until they are sharded"
    if LOOP in kernels:
        yield "planned with transformers' own loop over the tokens: the model's optional kernels would lower the peak"
        yield "memory that torch caches is not counted: nvidia-smi shows more than the plan"
    if run["use_liger_kernel"] and not liger:
        yield "savings by Liger's kernels are not counted: the real peak is lower"
    if run["label_smoothing_factor"] and run["task"] == "causal_lm":
        yield "tensors that label smoothing makes from the logits are not counted: the real peak is higher"
    if compiles(run) and COMPILED not in kernels:
        yield "savings by torch.compile are not counted: the real peak is lower (with CUDA graphs, higher)"
    keeps = "which keeps batch x heads x length x length numbers in every layer"
    if EAGER in kernels:
        asked = "as requested" if run["attn_implementation"] == "eager" else "this model's default"
        yield f"attention is planned as eager ({asked}), {keeps}"
    if MATH in kernels:
        yield f"no fused kernel of torch supports this attention on this GPU: the math kernel runs, {keeps}"
