"""What a plan was asked about, and what to try if no recipe fits: each step with what it saves."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from recipes.errors import Problem, UserError
from recipes.legal.schema import package_folder
from recipes.planner.fits import Planned, Planner, divisors, share
from recipes.planner.models import is_size
from recipes.planner.speed import host_seconds
from recipes.rules.check import require_legal
from recipes.run import Json, RunSpec, Settings, here, known_gpus, resolve, with_flags
from recipes.run.hardware import Gpu, Hardware
from recipes.run.spec import BATCH_FIELDS


@dataclass(frozen=True)
class Request:
    """What to plan: the model, its configuration, the card, how many cards and nodes, the flags.

    `model` is as the user wrote it, empty for a configuration without a name. `config` is None
    until it is read: the rules then judge what they know without it.
    `accelerate_config` is the user's Accelerate YAML, None without one.
    """

    model: str
    config: Json | None
    card: Gpu
    num_processes: int
    nodes: int
    argv: tuple[str, ...]
    accelerate_config: str | None

    def run(self, recipe: str, **flags: object) -> RunSpec:
        """The run of this recipe with `flags` replaced. Raises `UserError` if that is not legal."""
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
        run = resolve(words, place)
        require_legal(replace(run, model=self.config))
        return run

    def advice(self, run: RunSpec) -> list[Problem]:
        """What `recipes check` says of one of these runs, which is legal."""
        return require_legal(replace(run, model=self.config))

    def command(self, recipe: str, **flags: object) -> str:
        """The whole command for `run(recipe, **flags)`, as text for a shell: on one node, or for
        Slurm on several.
        """
        known = self.model and not is_size(self.model) and not Path(self.model).is_file()
        model = ["--model_name_or_path", self.model if known else "YOUR_MODEL"]
        if not known and self._asked.explicit("model_name_or_path"):  # in --config's file
            model = []
        argv = [*model, *self._with(flags)]
        yaml = ["--accelerate_config", self.accelerate_config] if self.accelerate_config else []
        if self.nodes == 1:
            launch = ["recipes", "train", *yaml, "--num_processes", str(self.num_processes)]
            return shlex.join([*launch, "--recipe", recipe, *argv])
        nodes = ["--nodes", str(self.nodes), "--gpus_per_node", str(self.num_processes // self.nodes)]
        return shlex.join(["recipes", "submit", "slurm", *yaml, *nodes, "--recipe", recipe, "--", *argv])

    def _with(self, flags: Settings) -> list[str]:
        """The user's flags with these in their place, and the user's global batch in any case."""
        asked = self._asked
        stated = asked.explicit("per_device_train_batch_size") or asked.explicit("gradient_accumulation_steps")
        if stated and "per_device_train_batch_size" in flags:
            flags = {"global_batch_size": asked.batch.total, **flags}
        return with_flags(self.argv, flags)

    @property
    def _asked(self) -> RunSpec:
        return resolve(self.argv, here(self.num_processes, trained_by="nobody", environment={}))


@dataclass(frozen=True)
class NextStep:
    """One change to try.

    `words` is the whole command, for the shell. `seconds` is the time of a step, None if unknown.
    `fits_gpu` is about the GPU alone, `fits` about the RAM of a node too.
    `saves_bytes` counts on each GPU, `saves_host_bytes` in the RAM of each node, both compared to
    the plan's row of what was asked for; below 0 if the step needs more. `slowdown` says what the
    change costs in time. `adapters`: the step trains them and not all weights. `install` is a
    package that it needs and that is not here, None without one. `card` is the name of another GPU,
    if that is the change.
    """

    words: str
    total_bytes: int
    saves_bytes: int
    fits: bool
    fits_gpu: bool
    host_bytes_per_node: int
    saves_host_bytes: int
    slowdown: str
    seconds: float | None
    adapters: bool
    install: str | None = None
    card: str | None = None


_SMALLEST: Settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": None}
_CHECKPOINTED = {"gradient_checkpointing": True}
_LORA = {**_CHECKPOINTED, "use_peft": True}
_QLORA = {**_LORA, "load_in_4bit": True}
_HALF_LENGTH = "half of --max_length"
_IN_16_BITS = "bfloat16, or float16 on a card without it"
_RECOMPUTED = "a third more compute (two forward passes)"
_FUSED = "Liger's loss makes the logits of a few tokens at a time"
_SHARED = "parameters are gathered, and gradients scattered, in every micro-batch"

# In the order to try them: the recipe, the changed flags (None: left out), and the cost.
Step: TypeAlias = tuple[str, Settings, str]
_STEPS: tuple[Step, ...] = (
    ("sharded", {}, _SHARED),
    ("standard", _CHECKPOINTED, _RECOMPUTED),
    ("sharded", _CHECKPOINTED, f"{_RECOMPUTED}; {_SHARED}"),
    # Hugging Face's guide to training on a single GPU: 10.35 samples/s with 8-bit Adam, 10.09
    # without, on a V100.
    (
        "standard",
        {**_CHECKPOINTED, "optim": "adamw_bnb_8bit"},
        f"{_RECOMPUTED}; 8-bit Adam: not slower where published",
    ),
    ("memory", {"optim": None}, f"{_RECOMPUTED}; Adam on the host: {{host}}"),
    ("memory_zero3", {"optim": None}, f"{_RECOMPUTED}; Adam and parameters on the host: {{host}}"),
    ("standard", _LORA, "none: frozen weights save as much as the second forward pass costs"),
    ("standard", {**_LORA, "dtype": _IN_16_BITS}, "none; frozen weights in 16 bits"),
    ("sharded", {**_LORA, "dtype": _IN_16_BITS}, "frozen weights in 16 bits, gathered per micro-batch"),
    ("standard", _QLORA, "weights are unpacked at each use; not measured"),
    ("standard", {**_QLORA, "max_length": _HALF_LENGTH}, "none, but half the context"),
)


@dataclass(frozen=True)
class NextSteps:
    """Finds changes for `asked`, a run whose plan is `row`, and for what `request` says of it."""

    request: Request
    planner: Planner
    asked: RunSpec
    row: Planned

    def without_offload(self) -> list[NextStep]:
        """The first step that fits on the GPUs alone, and the first that trains adapters there, if
        the run does not yet. One that needs another package only if no other fits.
        """
        found: dict[bool, NextStep] = {}
        others: dict[bool, NextStep] = {}
        for run, step in self._changed():
            alone = run.engine.offload_optimizer == "none" and run["max_length"] == self.asked["max_length"]
            if step.fits and alone:
                (others if step.install else found).setdefault(step.adapters, step)
            if step.adapters in found and (step.adapters or self.asked["use_peft"]):
                break
        return [step for _, step in sorted({**others, **found}.items())]

    def smaller_micro_batch(self, runs: Sequence[RunSpec]) -> list[NextStep]:
        """The fastest of these runs at the largest micro-batch that fits, below the user's own."""
        found = []
        for asked in runs:
            for micro in (size for size in divisors(share(asked)) if size < asked.batch.micro):
                changes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": None}
                try:
                    run = self.request.run(asked["recipe"], **changes)
                    entry = self.planner.largest(run, [micro])
                except UserError:
                    continue
                if entry:
                    before = self.planner.at(asked, asked.batch.micro)
                    words = self.request.command(asked["recipe"], **changes)
                    cost = f"none if {micro} still keep the GPU busy: {entry.accumulation} of them are accumulated"
                    found.append(self._step(words, entry, run, cost, before))
                    break
        return sorted(found, key=lambda step: step.seconds or 0)[:1]

    def smaller_evaluation(self, runs: Sequence[RunSpec], planned: Sequence[Planned]) -> list[NextStep]:
        """The first of these runs with an evaluation that fits, below the user's own."""
        for asked, before in zip(runs, planned, strict=True):
            if before.evaluation_batch is None:
                continue
            changes: Settings = {**before.flags, "per_device_eval_batch_size": before.evaluation_batch}
            run = self.request.run(asked["recipe"], **changes)
            _, entry = self.planner.best(run)
            batch = {"per_device_train_batch_size": entry.micro_batch, "gradient_accumulation_steps": None}
            words = self.request.command(asked["recipe"], **{**changes, **batch})
            return [self._step(words, entry, run, "none: only evaluations get smaller", before)]
        return []

    def in_order(self) -> Iterator[NextStep]:
        """The steps in the order to try that need less than the run that was asked for.

        No run comes twice. If the GPU has room, only what needs less RAM of the node is a step.
        """
        seen = [_decisive(self.asked, self.row.micro_batch)]
        for run, step in self._changed():
            saved = step.saves_host_bytes if self.row.fits_gpu else step.saves_bytes
            decisive = _decisive(run, run.batch.micro)
            if saved > 0 and decisive not in seen:
                seen.append(decisive)
                yield step
        if not self.row.fits_gpu:
            yield from self._larger_card()

    def _changed(self) -> Iterator[tuple[RunSpec, NextStep]]:
        """The runs with each change at micro-batch 1, and their steps at the largest that fits, or
        at 1, each with Liger's kernels too if only the logits are too much.

        Without those that are not legal here. An Accelerate YAML of the user's holds for
        `standard`; a step to another recipe leaves it out.
        """
        request, asked, row = self.request, self.asked, self.row
        examples = row.micro_batch * row.accumulation
        smaller = (
            f"none if 1 still keeps the GPU busy: {examples} of them are accumulated" if row.micro_batch > 1 else ""
        )
        for recipe, changes, slowdown in ((asked["recipe"], {}, smaller), *_STEPS):
            if recipe == "sharded" and asked.world_size == 1:  # nothing to share
                continue
            if "dtype" in changes and asked["load_in_4bit"]:  # frozen weights have 4 bits already
                continue
            if "dtype" in changes:
                changes = {**changes, "dtype": "bfloat16" if request.card.capability >= (8, 0) else "float16"}
            if "max_length" in changes:
                changes = {**changes, "max_length": max(2, self.planner.estimator.length(asked) // 2)}
            leaves_yaml_out = request.accelerate_config and recipe not in ("standard", asked["recipe"])
            here = replace(request, accelerate_config=None) if leaves_yaml_out else request
            fused = f"{slowdown}; {_FUSED}" if slowdown else f"none: {_FUSED}"
            for more, cost in ((changes, slowdown), ({**changes, "use_liger_kernel": True}, fused)):
                try:
                    run = here.run(recipe, **_SMALLEST, **more)
                    if more != changes and not self.planner.estimator.has_liger(run):
                        break
                    sizes = divisors(share(run)) if self.planner.may_fit(run, 1) else []
                    entry = self.planner.largest(run, sizes) or self.planner.at(run, 1)
                except UserError:
                    break
                dropped = [name for name, value in changes.items() if value is None and asked.explicit(name)]
                dropped += ["accelerate_config"] if leaves_yaml_out else []
                cost = "".join(f"without --{name}; " for name in dropped) + cost
                missing = "liger-kernel" if more != changes and not run.hardware.liger else None
                cost += f"; pip install {missing}" if missing else ""
                batch = {**_SMALLEST, "per_device_train_batch_size": entry.micro_batch}
                words = here.command(recipe, **batch, **more)
                yield run, replace(self._step(words, entry, run, cost), install=missing)
                without_logits = entry.total_bytes - entry.components.logits
                if entry.fits_gpu or without_logits > self.planner.usable or run["use_liger_kernel"]:
                    break

    def _step(self, words: str, entry: Planned, run: RunSpec, slowdown: str, before: Planned | None = None) -> NextStep:
        before = before or self.row
        seconds = host_seconds(run, self.planner.estimator.weights(run), entry.accumulation)
        host = f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1g} s"
        return NextStep(
            words=words,
            total_bytes=entry.total_bytes,
            saves_bytes=before.total_bytes - entry.total_bytes,
            fits=entry.fits,
            fits_gpu=entry.fits_gpu,
            host_bytes_per_node=entry.host_bytes_per_node,
            saves_host_bytes=before.host_bytes_per_node - entry.host_bytes_per_node,
            slowdown=slowdown.format(host=f"at least {host} per step"),
            seconds=self.planner.time(run, entry.micro_batch).total,
            adapters=run["use_peft"],
        )

    def _larger_card(self) -> Iterator[NextStep]:
        """The smallest known card of the same kind with more memory, on which `standard` fits.

        Cards for workstations and for data centres have other hosts; one without bf16 is another
        kind.
        """
        for card in sorted(known_gpus.CATALOGUE, key=lambda card: card.torch_bytes):
            if card.torch_bytes <= self.planner.usable or not _alike(card, self.request.card):
                continue
            there = replace(self.request, card=Gpu(card.name, card.capability, card.torch_bytes))
            try:
                run = there.run("standard", **_SMALLEST)
            except UserError:
                continue
            if entry := replace(self.planner, usable=card.torch_bytes).largest(run, [1]):
                words = f"{there.command('standard', **_SMALLEST)} # on {card.name}"
                yield replace(self._step(words, entry, run, "none"), card=card.name)
                return


def _decisive(run: RunSpec, micro: int) -> tuple[object, ...]:
    """What decides a run's memory and training: equal for two spellings of one run."""
    words = (*BATCH_FIELDS, "recipe", "output_dir", "run_name", "logging_dir")
    settings = {name: value for name, value in run.items() if name not in words}
    return replace(run.engine, source=""), micro, run.batch.total, settings


def _alike(card: known_gpus.KnownGpu, own: Gpu) -> bool:
    known = any(own.name == other.name for other in known_gpus.CATALOGUE)
    same_host = not known or card.name.startswith("RTX") == own.name.startswith("RTX")
    return same_host and (card.capability >= (8, 0) or own.capability < (8, 0))
