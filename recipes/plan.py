"""`plan_memory`: which recipe fits a GPU, with which micro-batch, and what it keeps in memory, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes import gpus
from recipes.catalog import RECIPES
from recipes.check import require_legal
from recipes.engine import shipped
from recipes.errors import UserError, mistake
from recipes.footprint import Components, Weights, need, weight_bytes
from recipes.hardware import Gpu, Hardware
from recipes.run import RunSpec, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from recipes.trace import Case, Traced

# A trace of a published run comes out up to 6 % low: kernels' workspaces and fragmentation are in none.
MARGIN = 0.06
CLOSED_FORM_MARGIN = 0.25  # what is not traced is only estimated


@dataclass(frozen=True)
class Planned:
    """One recipe on the GPU that was asked about. `margin_bytes` is what stays free, negative where it does not fit.

    `micro_batch` and `accumulation` keep the global batch; where nothing fits they are those of one sequence.
    `traced` is false where the model could not be traced and a closed form, with its wider margin, stands in.
    """

    name: str
    fits: bool
    micro_batch: int
    accumulation: int
    components: Components
    margin_bytes: int
    host_bytes_per_node: int
    traced: bool = True

    @property
    def total_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True)
class Plan:
    """Every recipe on one GPU, and the one to take: the first in order of speed that fits, or None."""

    model: str
    parameters: int
    gpu: str
    usable_bytes: int
    length: int
    recipes: tuple[Planned, ...]
    recommended: str | None


_FASTEST_FIRST = ("fast", "standard", "memory", "memory_zero3")


def plan_memory(
    model: str | Path | PreTrainedConfig,
    *,
    gpu: str | None = None,
    gpu_memory: float | None = None,
    num_processes: int = 1,
    nodes: int = 1,
    recipe: str | None = None,
    argv: Sequence[str] = (),
) -> Plan:
    """Plan a training of `model`: a Hub id, a folder, a config.json, or a size such as 7B.

    `gpu` is a card's name, or `gpu_memory` its usable GB (10^9 bytes); `num_processes` counts all GPUs; `argv` are
    train.py's flags. Without `recipe` all but baseline are planned. Nothing is downloaded but a config, and no GPU is
    needed. Raises `UserError` for what would not be legal to run.
    """
    config = model if not isinstance(model, (str, Path)) else read_config(str(model))
    card = _card(gpu, gpu_memory)
    if num_processes % nodes:
        raise mistake("num_processes", f"{num_processes} are not the same number on {nodes} nodes", "a multiple of it")
    hardware = Hardware((card,) * (num_processes // nodes), cores=8 * num_processes // nodes)
    names = [recipe] if recipe else list(_FASTEST_FIRST)
    tracer = _Tracer(config)
    planned, refused = [], []
    for name in names:
        run = resolve(
            ["--recipe", name, "--model_name_or_path", str(model), *argv],
            world_size=num_processes,
            local_world_size=num_processes // nodes,
            hardware=hardware,
            accelerate_config=str(shipped(RECIPES[name]().engine)) if name in RECIPES else None,
            environment={},
            demonstrate=False,
            elsewhere=frozenset(),
        )
        try:
            require_legal(run)
        except UserError as error:
            refused.append(error)
            continue
        _refuse_adapters(run)
        planned.append(_planned(run, tracer, card.memory_bytes))
    if not planned:
        raise refused[0]
    recommended = next((entry.name for entry in planned if entry.fits), None)
    length = tracer.length(run)
    return Plan(
        str(model), tracer.weights(run).total, card.name, card.memory_bytes, length, tuple(planned), recommended
    )


def _refuse_adapters(run: RunSpec) -> None:
    for name in ("use_peft", "load_in_4bit"):
        if run[name]:
            what = "is not planned yet: frozen and 4-bit weights would be counted as trained ones"
            raise mistake(name, what, "leave it out for an upper bound", run.setting(name).source)


def _planned(run: RunSpec, tracer: _Tracer, usable: int) -> Planned:
    """The recipe at the largest micro-batch that fits, which is one that a run may have at its global batch."""
    entries = (_at(run, micro, tracer, usable) for micro in _micro_batches(run))
    entry = next(entries)
    while not entry.fits:
        smaller = next(entries, None)
        if smaller is None:
            break
        entry = smaller
    return entry


def _micro_batches(run: RunSpec) -> list[int]:
    """Micro-batches that keep the global batch, the largest first; the one that was asked for, if one was."""
    if run.explicit("per_device_train_batch_size") or run.explicit("gradient_accumulation_steps"):
        return [run.batch.micro]
    share = run.batch.micro * run.batch.accumulation
    return [size for size in range(share, 0, -1) if share % size == 0]


def _at(run: RunSpec, micro: int, tracer: _Tracer, usable: int) -> Planned:
    accumulation = run.batch.micro * run.batch.accumulation // micro
    micro_batch, was_traced = tracer.traced(run, micro)
    needed = need(run, tracer.weights(run), micro_batch, accumulation=accumulation)
    free = usable - needed.gpu.total
    fits = needed.gpu.total * (1 + (MARGIN if was_traced else CLOSED_FORM_MARGIN)) <= usable
    return Planned(run.recipe.name, fits, micro, accumulation, needed.gpu, free, needed.host_bytes_per_node, was_traced)


def _card(gpu: str | None, gpu_memory: float | None) -> Gpu:
    if gpu_memory is not None:
        return Gpu(f"a GPU of {gpu_memory:g} GB", (8, 0), round(gpu_memory * 1e9))
    known = gpus.find(gpu or "A100 80GB")
    return Gpu(known.name, known.capability, known.torch_bytes)


class _Tracer:
    """Traces of one model, each made once: two micro-batches tell every other."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self._weights: dict[str, Weights] = {}
        self._traced: dict[Case, Traced] = {}
        self._equal: dict[str, bool] = {}
        self._untraceable = False

    def weights(self, run: RunSpec) -> Weights:
        from recipes.trace import weigh

        if run["task"] not in self._weights:
            self._weights[run["task"]] = weigh(self.config, run["task"])
        return self._weights[run["task"]]

    def length(self, run: RunSpec) -> int:
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return min(run["max_length"], longest) if longest and longest > 0 else run["max_length"]

    def traced(self, run: RunSpec, micro: int) -> tuple[Traced, bool]:
        """What a micro-batch keeps, and whether a trace says so."""
        from recipes.trace import at_batch

        if self._untraceable:
            return self._closed_form(run, micro), False
        try:
            if micro == 1:  # one sequence runs other operations than two
                return self._trace(run, 1), True
            two, three = self._trace(run, 2), self._trace(run, 3)
        except Exception:  # a model's own code may fail in any way on tensors without data
            self._untraceable = True
            return self._closed_form(run, micro), False
        try:
            return at_batch(two, three, micro), True
        except ValueError:
            return self._trace(run, micro), True

    def _trace(self, run: RunSpec, micro: int) -> Traced:
        from recipes.trace import Case, trace

        half = weight_bytes(run) == 2
        case = Case(
            batch=micro,
            length=self.length(run),
            task=run["task"],
            dtype="bfloat16" if half else "float32",
            autocast=None if half else "bfloat16" if run["bf16"] else "float16" if run["fp16"] else None,
            checkpointing=bool(run["gradient_checkpointing"]),
            mask=not run["packing"],
        )
        if case not in self._traced:
            self._traced[case] = self._of_equal_layers(run, case) or trace(self.config, case)
        return self._traced[case]

    def _of_equal_layers(self, run: RunSpec, case: Case) -> Traced | None:
        """The trace of a deep model from two shallow ones, where that is one; seconds instead of minutes."""
        from recipes.trace import SHALLOW, layers_are_equal, of_depth, trace, with_layers

        task = run["task"]
        if task not in self._equal:
            self._equal[task] = layers_are_equal(self.config, self.weights(run), task)
        if not self._equal[task]:
            return None
        shallow, deeper = (trace(with_layers(self.config, count), case) for count in (SHALLOW, SHALLOW + 1))
        try:
            return of_depth(shallow, deeper, self.config.get_text_config().num_hidden_layers)
        except ValueError:
            return None

    def _closed_form(self, run: RunSpec, micro: int) -> Traced:
        """82 bytes for each unit of width, token and layer, 12 for each logit, and autocast's copies of the weights.

        The most that traces of Llama, GPT-2 and Qwen models come to in mixed precision. Checkpointed, a layer keeps its
        input, and one layer at a time the rest.
        """
        from recipes.trace import Traced

        text = self.config.get_text_config()
        tokens = micro * self.length(run)
        layer = 82 * tokens * text.hidden_size
        layers = text.num_hidden_layers
        kept = 4 * tokens * text.hidden_size * layers + layer if run["gradient_checkpointing"] else layer * layers
        copies = 2 * self.weights(run).total if run["bf16"] or run["fp16"] else 0
        vocabulary = text.vocab_size if run["task"] == "causal_lm" else 0
        return Traced([(kept + copies, 12 * tokens * vocabulary, 0)], forward=1)


# --- The model -------------------------------------------------------------------------------------------------------


def read_config(model: str) -> Any:
    """The configuration of a Hub id, a folder, a config.json or a size. Raises `UserError`."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([MB])", model, flags=re.I)
    if size and not Path(model).exists():
        return _config_of_size(float(size[1]) * (1e9 if size[2].upper() == "B" else 1e6))
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().partition("\n")[0]
        raise mistake("model", f"{model} cannot be read: {first}", "a Hub id, a folder, a config.json or 7B") from None


def _config_of_size(parameters: float) -> Any:
    """A Llama of about that many parameters: heads of 128, four times grouped; 128 units of width for each layer.

    Llama 3's shape: 12.5 width^2 parameters a layer, and two tables of 128,256 words.
    """
    from transformers import LlamaConfig

    vocabulary = 128_256 if parameters > 2e9 else 32_000
    width = next(
        width
        for width in range(256, 1 << 16, 256)
        if 12.5 * width**2 * (width // 128) + 2 * vocabulary * width >= parameters
    )
    layers = max(1, round((parameters - 2 * vocabulary * width) / (12.5 * width**2)))
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=int(3.5 * width) // 256 * 256,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        num_key_value_heads=max(1, width // 512),
        vocab_size=vocabulary,
        max_position_embeddings=131_072,
    )


# --- A run that is there ---------------------------------------------------------------------------------------------


def plan_run(run: RunSpec, config: PreTrainedConfig, usable_bytes: int, as_it_is: bool = False) -> Planned:
    """A run of this model at the largest micro-batch that fits into `usable_bytes`, or `as_it_is`."""
    _refuse_adapters(run)
    tracer = _Tracer(config)
    return _at(run, run.batch.micro, tracer, usable_bytes) if as_it_is else _planned(run, tracer, usable_bytes)
