"""What the micro-batches of one model keep in memory: traced if possible, else from its shape."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from recipes.errors import mistake, one_line
from recipes.legal.models import types_with_fused_loss
from recipes.planner.footprint import need, recomputes
from recipes.planner.replay import Steps, with_cached
from recipes.planner.shapes import PACKAGED, Adapters, Case, Need, Traced, Weights
from recipes.planner.tracing.further import at_batch, at_length
from recipes.rules.data_and_model import what_peft_accepts
from recipes.run import RunSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# Shares of the longest sequence. How far reserved memory grows depends on how lengths happen to
# follow each other: with 25 random ones it comes out at and above what these few steps show.
_SHORTER = (0.6, 0.9, 0.75)


class Estimator:
    """Memory of one model's micro-batches. Two cached traces give every other size."""

    def __init__(self, config: PreTrainedConfig, expandable: bool = False) -> None:
        self.expandable = expandable  # torch's allocator has expandable segments
        self.config = _with_padding(config)
        self._weights: dict[tuple[str, Adapters | None], Weights] = {}
        self._traced: dict[Case, Traced] = {}
        self._last: tuple[Case, tuple[Traced, bool]] | None = None  # asked for several times in a row
        self._pieces: dict[Case, int] = {}  # of repeated layers, that were enough for this case
        self._untraceable = False

    def need(self, run: RunSpec, micro: int) -> tuple[Need, bool]:
        """What the run needs at this micro-batch and its global batch, and whether it was traced.

        Raises `UserError` if the model cannot be built, or cannot have these adapters.
        """
        accumulation = run.batch.micro * run.batch.accumulation // micro
        micro_batch, was_traced = self.traced(run, micro)
        parts = (run, self.weights(run), micro_batch, accumulation)
        return need(*parts, evaluation=self.evaluation(run)), was_traced

    def at_least(self, run: RunSpec, micro: int) -> Need:
        """What the run needs without activations and logits: a lower bound that takes no trace."""
        accumulation = run.batch.micro * run.batch.accumulation // micro
        return need(run, self.weights(run), Traced([(0, 0, 0)], forward=1), accumulation)

    def process(self, run: RunSpec, micro: int, limit: int, lengths_vary: bool = True) -> tuple[Need, bool]:
        """As `need`, with what torch reserves beside it on a GPU of `limit` bytes.

        `lengths_vary` is false to count a run whose lengths vary as if all were the longest.
        """
        accumulation = run.batch.micro * run.batch.accumulation // micro
        needed, was_traced = self.need(run, micro)
        micro_batch, _ = self.traced(run, micro)
        shorter = self._shorter(run, micro) if lengths_vary else ()
        steps = Steps(micro_batch, accumulation, self.evaluation(run), shorter)
        gpu, varied = with_cached(run, self.weights(run), steps, needed.gpu, limit, self.expandable)
        return replace(needed, gpu=gpu, varied_bytes=varied), was_traced

    def weights(self, run: RunSpec) -> Weights:
        """The model's parameters with the run's task and adapters. Raises `UserError` as `need`."""
        from recipes.planner.tracing.trace import weigh

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
                if key[1] is None:
                    what = f"cannot be built: {message}"
                    raise mistake("model", what, "a config.json that transformers loads") from None
                what = f"peft refuses this model: {message}"
                raise mistake("use_peft", what, what_peft_accepts(message, run["use_dora"])) from None
        return self._weights[key]

    def length(self, run: RunSpec) -> int:
        """Tokens per sequence: the run's `max_length`, at most the model's positions."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return min(run["max_length"], longest) if longest and longest > 0 else run["max_length"]

    def traced(self, run: RunSpec, micro: int) -> tuple[Traced, bool]:
        """What a micro-batch keeps, and whether it was traced."""
        case = self._case(run, micro)
        if self._last is None or self._last[0] != case:
            self._last = case, self._found(run, case)
        return self._last[1]

    def evaluation(self, run: RunSpec) -> Traced | None:
        """What a batch of its evaluations takes, None if the run has none.

        Trainer calls the model as in training, with its autocast: `bf16_full_eval` holds only after
        the last step (`evaluation_loop`). It keeps no logits from one batch to the next: our
        language models have no metrics, and a classifier's are a few numbers an example.
        """
        if run["eval_strategy"] == "no":
            return None
        case = replace(self._case(run, run["per_device_eval_batch_size"]), evaluation=True, checkpointing=False)
        return self._found(run, case)[0]

    def _shorter(self, run: RunSpec, micro: int) -> tuple[Traced, ...]:
        """Micro-batches of fewer tokens, if they vary: packed ones are all of one length."""
        if run["packing"] or not run.hardware.cuda or self._untraceable:
            return ()
        case = self._case(run, micro)
        try:
            if case.liger:
                lengths = (max(1, round(case.length * share)) for share in _SHORTER)
                return tuple(self._trace(run, replace(case, length=length)) for length in lengths)
            two, three = (self._trace(run, replace(case, batch=batch)) for batch in (2, 3))
            return tuple(at_batch(two, three, case.batch * share) for share in _SHORTER)
        except Exception:  # as in `_found`
            return ()

    def _found(self, run: RunSpec, case: Case) -> tuple[Traced, bool]:
        if self._untraceable:
            return self._closed_form(run, case), False
        try:
            # One sequence runs slightly different operations. A mask of joined rows grows with the
            # square of the micro-batch, and Liger's chunks of tokens are powers of 2.
            if case.batch <= 2 or run["padding_free"] or case.liger:
                return self._trace(run, case), True
            two, three = (self._trace(run, replace(case, batch=batch)) for batch in (2, 3))
        except Exception:  # a model's own code may fail in any way on fake tensors
            self._untraceable = True
            return self._closed_form(run, case), False
        try:
            return at_batch(two, three, case.batch), True
        except ValueError:
            return self._trace(run, case), True

    def _case(self, run: RunSpec, micro: int) -> Case:
        """The micro-batch as the run's collator makes it.

        Rows of different lengths are padded. One row alone is too, if its length is not a multiple
        of 8, and other rows of a run may be. Several examples packed into a row are masked apart.
        Joined ones are one long row, apart by the same mask.
        """
        from recipes.planner.tracing.attention import alike

        mixed = "bfloat16" if run["bf16"] else "float16" if run["fp16"] else None
        casts = _casts_the_model(run)
        return Case(
            batch=1 if run["padding_free"] else micro,
            length=self.length(run) * (micro if run["padding_free"] else 1),
            task=run["task"],
            dtype=mixed if casts and mixed else run["dtype"],
            autocast=None if casts else mixed,
            checkpointing=recomputes(run),
            mask=not run["packing"] or run["packing_strategy"] == "bfd",
            adapters=_adapters(run),
            on_cuda=run.hardware.cuda,
            capability=alike(run.hardware.capability),
            attention=self._attention(run),
            liger=self.has_liger(run),
            label_smoothing=run["task"] == "causal_lm" and bool(run["label_smoothing_factor"]),
        )

    def has_liger(self, run: RunSpec) -> bool:
        """Whether the run asks for Liger's kernels, and the package has some for this model."""
        if not run["use_liger_kernel"] or run["task"] != "causal_lm":
            return False
        return self.config.model_type in types_with_fused_loss()

    def _attention(self, run: RunSpec) -> str | None:
        """As asked for by the run, or else by the configuration. None: transformers chooses.

        A configuration's own wish is in it already.
        """
        asked = run["attn_implementation"]
        wanted = asked or getattr(self.config, "_attn_implementation", None)
        return asked if wanted in (None, "eager", "sdpa") else PACKAGED

    def _trace(self, run: RunSpec, case: Case) -> Traced:
        if case not in self._traced:
            self._traced[case] = self._of_short_sequences(run, case) or self._of_any_depth(run, case)
        return self._traced[case]

    def _of_short_sequences(self, run: RunSpec, case: Case) -> Traced | None:
        """From three short ones if the model loops over a sequence, which takes minutes."""
        from recipes.planner.tracing.trace import loop_unit

        unit = loop_unit(self.config, case.task)
        if unit is None or case.length <= 3 * unit:
            return None
        three = [self._of_any_depth(run, replace(case, length=times * unit)) for times in (1, 2, 3)]
        return at_length(three, case.length / unit)

    def _of_any_depth(self, run: RunSpec, case: Case) -> Traced:
        from recipes.planner.tracing.trace import trace, trace_shallow

        any_batch = replace(case, batch=0, length=0)  # what was enough for one batch is for others
        pieces = self._pieces.get(any_batch, 1)
        found = trace_shallow(self.config, self.weights(run), case, pieces)
        if found is None:
            return trace(self.config, case)
        deep, self._pieces[any_batch] = found
        return deep

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
        copies = 2 * self.weights(run).total if (run["bf16"] or run["fp16"]) and not _casts_the_model(run) else 0
        vocabulary = text.vocab_size if run["task"] == "causal_lm" else 0
        logits = (16 if case.label_smoothing else 12) * tokens * vocabulary
        return Traced([(kept + copies, logits, 0)], forward=1)


def _adapters(run: RunSpec) -> Adapters | None:
    if not run["use_peft"]:
        return None
    compute = "bfloat16" if run["bf16"] else "float16" if run["fp16"] else "float32"
    wanted = run["lora_target_modules"]
    targets = tuple(wanted) if wanted and wanted != ["all-linear"] else "all-linear"
    four_bits = compute if run["load_in_4bit"] else None
    kind = {"in_fp32": not _casts_the_model(run), "dora": run["use_dora"]}
    return Adapters(run["lora_r"], targets, run["lora_dropout"], four_bits, **kind)


def _casts_the_model(run: RunSpec) -> bool:
    """Whether the parameters are cast for mixed precision, and no operation (`_prepare_fsdp2`)."""
    return run.engine.kind in ("deepspeed", "fsdp")


def _with_padding(config: PreTrainedConfig) -> PreTrainedConfig:
    """With a padding token, as in training: classifiers on decoders need it for batches."""
    if getattr(config.get_text_config(), "pad_token_id", None) is not None:
        return config
    config = copy.deepcopy(config)
    config.get_text_config().pad_token_id = 0
    return config
