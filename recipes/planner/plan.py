"""`plan_memory` finds the recipes that fit a GPU, with micro-batch and memory, before any run.

If no recipe fits, the plan lists changes to try, each with the bytes that it saves.
"""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.errors import Problem, UserError, mistake, plural
from recipes.legal.schema import package_folder
from recipes.planner.fits import Planned, Planner, estimator_of
from recipes.planner.memory import context_of
from recipes.planner.sizes import SHAPES, description, is_size, read_config
from recipes.planner.speed import link_of, mfu_of, unknown_compute
from recipes.rules.check import require_legal
from recipes.run import Json, RunSpec, Settings, here, known_gpus, resolve, with_flags
from recipes.run.fitted import asks_for_a_micro_batch
from recipes.run.hardware import Gpu, Hardware

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FASTEST_FIRST = ("fast", "standard", "sharded", "memory", "memory_zero3")


@dataclass(frozen=True)
class Plan:
    """The plan of every requested recipe on GPUs of one kind.

    `recommended` is the fastest recipe that fits, None if none fits. The fastest recipe has the
    shortest known time of a step; of equally fast recipes, one without added checkpointing wins.
    """

    model: str
    shape: str  # describes the assumed shape if a size was given, or if the Hub failed; else empty
    parameters: int
    trained: int
    gpu: str
    usable_bytes: int
    usable_host_bytes: int | None
    length: int  # below `asked_length` if the model has fewer positions
    asked_length: int
    recipes: tuple[Planned, ...]
    recommended: str | None
    command: str  # the whole command of the recommended recipe; empty if none fits
    advice: tuple[Problem, ...]  # of `recipes check` about the recommended recipe, or the first if none fits
    short_of_ram: bool  # no recipe fits, and `standard` (the first recipe if `standard` is not planned) lacks only RAM
    choices: Callable[[], Iterator[Planned]]  # plans of every batch split, for the recommended (else the first) recipe
    next_steps: tuple[NextStep, ...]  # changes to try if nothing fits; changes without offload if only offload fits
    refused: dict[str, str]  # errors, by the name of each recipe that is not legal with these flags
    mfu: float  # the assumed share of the GPU's peak FLOP/s
    mfu_source: str
    bandwidth: float | None  # the assumed bytes per second between GPUs, None for an unknown link
    link: str
    context: tuple[int, str]  # the bytes that CUDA and NCCL take outside torch's allocator, and the source
    unknown_compute: str  # the reason if times leave out compute (`mfu` then has no effect), else empty


def plan_memory(
    model: str | Path | PreTrainedConfig,
    *,
    gpu: str | None = None,
    gpu_memory: float | None = None,
    num_processes: int = 1,
    nodes: int = 1,
    recipe: str | None = None,
    argv: Sequence[str] = (),
    accelerate_config: str | None = None,
    mfu: float | None = None,
    bandwidth: float | None = None,
    host_memory: float | None = None,
) -> Plan:
    """Plan the memory of training `model`: Hub id, folder, config.json, size (7B) or configuration.
    Give either `gpu`, the GPU's name, or `gpu_memory`, the GPU's usable GB (10^9 bytes).
    `num_processes` counts the GPUs of all nodes. `recipe` limits the plan to one recipe; if it is
    None, `_names` chooses. `argv` are flags of train.py. `accelerate_config` is an Accelerate YAML
    that replaces each recipe's own. Times assume the share `mfu` of the GPU's peak FLOP/s, and
    `bandwidth` in GB/s between GPUs; speed.py has the defaults of both. `host_memory` is the RAM of
    one node in GB (None: RAM is not checked). No weights are downloaded, and no GPU is needed.
    Raises `UserError` if an argument is wrong, no recipe is legal, or the model cannot be planned.
    """
    if num_processes % nodes:
        what = f"{plural(num_processes, 'process')} cannot be split evenly over {nodes} nodes"
        raise mistake("num_processes", what, f"give a multiple of {nodes}")
    card = _card(gpu, gpu_memory)
    mfu, mfu_source = (mfu, "--mfu") if mfu else mfu_of(card.name)
    bytes_per_second, link = (bandwidth * 1e9, "--bandwidth") if bandwidth else link_of(card, num_processes, nodes)
    name = str(model) if isinstance(model, (str, Path)) else model.name_or_path
    request = Request(name, None, card, num_processes, nodes, tuple(argv), accelerate_config)
    names = _names(request, recipe)
    legal, _ = _legal_runs(request, names)  # raises before the imports, which take seconds
    config = read_config(name, legal[0]) if isinstance(model, (str, Path)) else model
    gc.freeze()  # otherwise each garbage collection would visit every object of torch and transformers
    request = replace(request, config=config.to_dict())
    host = round(host_memory * 1e9) if host_memory else None
    planner = Planner(estimator_of(config), card.memory_bytes, host, mfu, bytes_per_second)
    legal, refused = _legal_runs(request, names)
    planned = [_made_to_fit(run, request, planner) for run in legal]
    fitting = [entry for entry in planned if entry.fits]
    fastest = min(fitting, key=lambda entry: (entry.time.known, "gradient_checkpointing" in entry.flags), default=None)
    best = fastest or planned[0]
    row = next((entry for entry in planned if entry.name == "standard"), planned[0])
    weights, run = planner.estimator.weights(best.run), best.run
    return Plan(
        model=name or config.model_type,
        shape=description(name) if is_size(name) or (not config.name_or_path and name in SHAPES) else "",
        parameters=weights.total,
        trained=weights.trained,
        gpu=card.name,
        usable_bytes=planner.usable,
        usable_host_bytes=host,
        length=planner.estimator.length(run),
        asked_length=run["max_length"],
        recipes=tuple(planned),
        recommended=fastest.name if fastest else None,
        command=request.command(fastest) if fastest else "",
        advice=tuple(require_legal(run)),
        short_of_ram=fastest is None and row.fits_gpu,
        choices=partial(planner.splits, best),
        next_steps=tuple(_next_steps(request, planner, row, fastest)),
        refused=refused,
        mfu=mfu,
        mfu_source=mfu_source,
        bandwidth=bytes_per_second,
        link=link,
        context=context_of(run),
        unknown_compute=unknown_compute(run, config),
    )


# --- The request ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request for a plan: the model, its configuration, the GPUs and nodes, the flags.

    `model` is the model's name or size, empty for a configuration without a name. `config` is None
    until it is read: until then, the rules know only the config.json of a local model.
    `accelerate_config` is the user's Accelerate YAML, None if the user gives none.
    """

    model: str
    config: Json | None
    card: Gpu
    num_processes: int
    nodes: int
    argv: tuple[str, ...]
    accelerate_config: str | None

    def run(self, recipe: str, **flags: object) -> RunSpec:
        """Return the run of `recipe` with these flags. Raises `UserError` for an illegal run."""
        local = self.num_processes // self.nodes
        liger = package_folder("liger_kernel") is not None
        place = here(
            self.num_processes,
            self.accelerate_config,
            local,
            hardware=Hardware((self.card,) * local, cores=8 * local, liger=liger),
            environment={},
            trained_by="nobody",
            packages=frozenset(),
        )
        words = ["--recipe", recipe, "--model_name_or_path", self.model or "YOUR_MODEL", *self._with(flags)]
        run = replace(resolve(words, place), model=self.config)
        require_legal(run)
        return run

    def command(self, entry: Planned, **flags: object) -> str:
        """Return the whole command of a planned run with these flags, as text for a shell.

        On several nodes, the command submits to Slurm.
        """
        batch = {"per_device_train_batch_size": entry.micro_batch, "gradient_accumulation_steps": None}
        known = self.model and not is_size(self.model) and not Path(self.model).is_file()
        model = ["--model_name_or_path", self.model if known else "YOUR_MODEL"]
        if not known and self._asked.explicit("model_name_or_path"):  # the file of --config names the model
            model = []
        data = [] if self._asked["dataset_name"] else ["--dataset_name", "YOUR_DATA"]
        lora = entry.run["use_peft"] and not entry.run.explicit("learning_rate")
        rate = {"learning_rate": 2e-4} if lora else {}  # Hu et al. 2021, and for QLoRA Dettmers et al. 2023
        words = ["--recipe", entry.name, *model, *self._with({**rate, **flags, **entry.flags, **batch}), *data]
        yaml = ["--accelerate_config", self.accelerate_config] if self.accelerate_config else []
        if self.nodes == 1:
            return shlex.join(["recipes", "train", *yaml, "--num_processes", str(self.num_processes), *words])
        nodes = ["--nodes", str(self.nodes), "--gpus_per_node", str(self.num_processes // self.nodes)]
        return shlex.join(["recipes", "submit", "slurm", *yaml, *nodes, *words[:2], "--", *words[2:]])

    def _with(self, flags: Settings) -> list[str]:
        """Return the user's flags, updated with `flags`. The user's global batch always stays."""
        if asks_for_a_micro_batch(self._asked) and "per_device_train_batch_size" in flags:
            flags = {"global_batch_size": self._asked.batch.total, **flags}
        return with_flags(self.argv, flags)

    @property
    def _asked(self) -> RunSpec:
        return resolve(self.argv, here(self.num_processes, trained_by="nobody", environment={}))


def _legal_runs(request: Request, names: list[str]) -> tuple[list[RunSpec], dict[str, str]]:
    """Return the legal runs, and errors by recipe. Raise the first error if no run is legal."""
    runs: list[RunSpec] = []
    refused: dict[str, UserError] = {}
    for name in names:
        try:
            runs.append(request.run(name))
        except UserError as error:
            refused[name] = error
    if not runs:
        raise next(iter(refused.values()))
    return runs, {name: str(error) for name, error in refused.items()}


def _names(request: Request, recipe: str | None) -> list[str]:
    """Return the recipes to plan: `recipe`, else the one in flags or --config, else _FASTEST_FIRST.

    An Accelerate YAML replaces a recipe's engine, so the recipes that shard or offload are left out
    if a YAML is given. On one GPU `sharded` is left out, because there is nothing to shard.
    """
    if recipe:
        return [recipe]
    if given := request._asked.given.get("recipe"):
        return [given.value]
    names = ("fast", "standard") if request.accelerate_config else _FASTEST_FIRST
    return [name for name in names if name != "sharded" or request.num_processes > 1]


def _card(gpu: str | None, gpu_memory: float | None) -> Gpu:
    if gpu and gpu_memory is None:
        return known_gpus.find(gpu)
    if gpu_memory is not None and not gpu:
        return Gpu(f"a GPU of {gpu_memory:g} GB", (8, 0), round(gpu_memory * 1e9))
    what = "is given, and gpu_memory too" if gpu else "is missing"
    raise mistake("gpu", what, "give either gpu (--gpu NAME) or gpu_memory (--gpu_memory GB)")


def _made_to_fit(run: RunSpec, request: Request, planner: Planner) -> Planned:
    """Plan the run at the largest micro-batch that fits. If none fits, try gradient checkpointing,
    unless the user has set it: checkpointing is faster than offload, and does not change results.
    Keep checkpointing only if the run then fits. A note names each change.
    """
    entry = planner.best(run)
    states = entry.total_bytes - entry.components.activations - entry.components.logits
    if not entry.fits and states <= planner.usable and not run.explicit("gradient_checkpointing"):
        flags = {"gradient_checkpointing": True}
        with contextlib.suppress(UserError):
            checkpointed = planner.best(request.run(run["recipe"], **flags))
            if checkpointed.fits:
                entry = replace(checkpointed, flags={**flags, **checkpointed.flags})
    notes = [f"needs {shlex.join(with_flags([], entry.flags))}: otherwise no micro-batch fits"] if entry.flags else []
    if entry.fits and asks_for_a_micro_batch(run) and entry.micro_batch < run.batch.micro:
        notes.append(f"micro-batch {run.batch.micro} does not fit: {entry.micro_batch} is the largest that does")
    return replace(entry, notes=(*notes, *entry.notes))


# --- If no recipe fits ----------------------------------------------------------------------------


@dataclass(frozen=True)
class NextStep:
    """A change to try, and the plan of the changed run."""

    words: str  # the whole command, for the shell
    planned: Planned
    saves_bytes: int  # on each GPU, compared with the plan `row` of `_next_steps`; may be negative
    saves_host_bytes: int  # in the RAM of each node
    slowdown: str  # the change's cost in time


def _next_steps(request: Request, planner: Planner, row: Planned, best: Planned | None) -> list[NextStep]:
    """Return changes to try if nothing fits, alternatives if only offload fits, else nothing.

    `row` is the plan of `standard`, or of the first recipe if `standard` is not planned. `best` is
    the fastest plan that fits. If nothing fits, each change saves GPU memory, or RAM if only RAM is
    too small. Of several changes with equal memory, only the first is returned. An alternative runs
    without offload at the same max_length: return the first one, and the first with adapters.
    """
    if best and best.run.engine.offload_optimizer == "none":
        return []
    found: dict[object, NextStep] = {}
    for step in _every_step(request, planner, row):
        run, entry = step.planned.run, step.planned
        if best is None:
            if (step.saves_host_bytes if row.fits_gpu else step.saves_bytes) > 0:
                found.setdefault((entry.total_bytes, entry.host_bytes_per_node), step)
        elif entry.fits and run.engine.offload_optimizer == "none" and run["max_length"] == row.run["max_length"]:
            found.setdefault(run["use_peft"], step)
            if run["use_peft"]:
                break
    return list(found.values())


def _every_step(request: Request, planner: Planner, row: Planned) -> Iterator[NextStep]:
    """Yield each change and, where the logits alone do not fit, the same change with Liger's loss.

    Changes that are not legal here, or that peft refuses, are left out. With the recipe `standard`
    or the recipe of `row`, a change keeps the user's Accelerate YAML, otherwise it drops the YAML.
    """
    estimator = planner.estimator
    parameters = estimator.weights(row.run).total
    for recipe, changes, slowdown in _changes(row.run, estimator.length(row.run), parameters):
        with contextlib.suppress(UserError):
            yield (step := _step(request, planner, row, recipe, changes, slowdown))
            entry, fused = step.planned, {**changes, "use_liger_kernel": True}
            without_logits = entry.total_bytes - entry.components.logits
            if not entry.fits_gpu and without_logits <= planner.usable and not entry.run["use_liger_kernel"]:
                cost = f"{slowdown}; Liger's loss computes the logits of a few tokens at a time"
                step = _step(request, planner, row, recipe, fused, cost)
                if estimator.liger(step.planned.run):
                    yield step


def _step(request: Request, planner: Planner, row: Planned, recipe: str, changes: Settings, slowdown: str) -> NextStep:
    dropped = [name for name, value in changes.items() if value is None and row.run.explicit(name)]
    if request.accelerate_config and recipe not in ("standard", row.name):
        request, dropped = replace(request, accelerate_config=None), [*dropped, "accelerate_config"]
    entry = planner.best(request.run(recipe, **changes))
    host = f"{entry.time.host:.0f} s" if entry.time.host >= 1 else f"{entry.time.host:.1g} s"
    cost = "".join(f"without --{name}; " for name in dropped) + slowdown
    needs_liger = entry.run["use_liger_kernel"] and not entry.run.hardware.liger
    return NextStep(
        words="pip install liger-kernel && " * needs_liger + request.command(entry, **changes),
        planned=entry,
        saves_bytes=row.total_bytes - entry.total_bytes,
        saves_host_bytes=row.host_bytes_per_node - entry.host_bytes_per_node,
        slowdown=cost.format(host=f"at least {host} per step"),
    )


def _changes(asked: RunSpec, length: int, parameters: int) -> Iterator[tuple[str, Settings, str]]:
    """Yield (recipe, flags, cost in time) in the order to try. A flag of None is dropped."""
    checkpointed = {"gradient_checkpointing": True}
    lora = {**checkpointed, "use_peft": True}
    slow = parameters > 13e9 and not asked.explicit("learning_rate")  # Dettmers et al. 2023
    qlora = {**lora, "load_in_4bit": True, **({"learning_rate": 1e-4} if slow else {})}
    in_16_bits = {**lora, "dtype": "bfloat16" if asked.hardware.capability >= (8, 0) else "float16"}
    recomputed = "a third more compute (two forward passes)"
    shared = "parameters are gathered, and gradients scattered, in every micro-batch"
    several = asked.world_size > 1  # one GPU has nothing to shard
    yield asked["recipe"], {}, "none"
    if several:
        yield "sharded", {}, shared
    yield "standard", checkpointed, recomputed
    if several:
        yield "sharded", checkpointed, f"{recomputed}; {shared}"
    # Hugging Face's single-GPU guide: 10.35 samples/s with 8-bit Adam, 10.09 without, on a V100.
    in_8_bits = {**checkpointed, "optim": "adamw_bnb_8bit"}
    yield "standard", in_8_bits, f"{recomputed}; 8-bit Adam is not slower in published figures"
    yield "memory", {"optim": None}, f"{recomputed}; Adam on the host: {{host}}"
    yield "memory_zero3", {"optim": None}, f"{recomputed}; Adam and parameters on the host: {{host}}"
    yield "standard", {"use_peft": True}, "none: frozen weights need a third less compute"
    yield "standard", lora, "none: frozen weights save as much time as the second forward pass costs"
    if not asked["load_in_4bit"]:  # frozen weights are not in 4 bits already
        yield "standard", in_16_bits, "none; frozen weights in 16 bits"
        if several:
            yield "sharded", in_16_bits, "frozen weights in 16 bits, gathered per micro-batch"
    yield "standard", qlora, "4-bit weights are dequantized at each use; the time is not measured"
    yield "standard", {**qlora, "max_length": max(2, length // 2)}, "none, but sequences are half as long"
