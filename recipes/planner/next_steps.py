"""The request for a plan, and the steps to try if no recipe fits, each with what it saves."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.errors import Problem, UserError
from recipes.legal.schema import package_folder
from recipes.planner.fits import Planned, Planner
from recipes.planner.memory import FUSED_LOSS
from recipes.planner.sizes import is_size
from recipes.rules.check import require_legal
from recipes.run import Json, RunSpec, Settings, here, resolve, with_flags
from recipes.run.hardware import Gpu, Hardware


@dataclass(frozen=True)
class Request:
    """A request for a plan: the model, its configuration, the cards and nodes, the flags.

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
        """The advice of `recipes check` on one of these runs, which is legal."""
        return require_legal(replace(run, model=self.config))

    def command(self, recipe: str, **flags: object) -> str:
        """The whole command for `run(recipe, **flags)`, as text for a shell: on one node, or for
        Slurm on several.
        """
        known = self.model and not is_size(self.model) and not Path(self.model).is_file()
        model = ["--model_name_or_path", self.model if known else "YOUR_MODEL"]
        if not known and self._asked.explicit("model_name_or_path"):  # in --config's file
            model = []
        data = [] if self._asked["dataset_name"] else ["--dataset_name", "YOUR_DATA"]
        argv = [*model, *self._with(flags), *data]
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
    """One change to try, and the plan of it.

    `words` is the whole command, for the shell. `saves_bytes` counts on each GPU,
    `saves_host_bytes` in the RAM of each node, both compared to the plan's row of what was asked
    for; below 0 if the step needs more. `slowdown` says what the change costs in time.
    """

    words: str
    planned: Planned
    saves_bytes: int
    saves_host_bytes: int
    slowdown: str

    @property
    def adapters(self) -> bool:
        """True if the step trains them and not all weights."""
        return self.planned.run["use_peft"]


def _changes(asked: RunSpec, length: int) -> Iterator[tuple[str, Settings, str]]:
    """In the order to try them: the recipe, the changed flags (None: left out), and the cost."""
    checkpointed = {"gradient_checkpointing": True}
    lora = {**checkpointed, "use_peft": True}
    qlora = {**lora, "load_in_4bit": True}
    in_16_bits = {**lora, "dtype": "bfloat16" if asked.hardware.capability >= (8, 0) else "float16"}
    recomputed = "a third more compute (two forward passes)"
    shared = "parameters are gathered, and gradients scattered, in every micro-batch"
    several = asked.world_size > 1  # else there is nothing to share
    yield asked["recipe"], {}, "none"
    if several:
        yield "sharded", {}, shared
    yield "standard", checkpointed, recomputed
    if several:
        yield "sharded", checkpointed, f"{recomputed}; {shared}"
    # Hugging Face's guide to training on a single GPU: 10.35 samples/s with 8-bit Adam, 10.09
    # without, on a V100.
    in_8_bits = {**checkpointed, "optim": "adamw_bnb_8bit"}
    yield "standard", in_8_bits, f"{recomputed}; 8-bit Adam: not slower where published"
    yield "memory", {"optim": None}, f"{recomputed}; Adam on the host: {{host}}"
    yield "memory_zero3", {"optim": None}, f"{recomputed}; Adam and parameters on the host: {{host}}"
    yield "standard", lora, "none: frozen weights save as much as the second forward pass costs"
    if not asked["load_in_4bit"]:  # with which frozen weights have 4 bits already
        yield "standard", in_16_bits, "none; frozen weights in 16 bits"
        if several:
            yield "sharded", in_16_bits, "frozen weights in 16 bits, gathered per micro-batch"
    yield "standard", qlora, "weights are unpacked at each use; not measured"
    yield "standard", {**qlora, "max_length": max(2, length // 2)}, "none, but half the context"


@dataclass(frozen=True)
class NextSteps:
    """Finds changes for `row`, the plan of what `request` asks for."""

    request: Request
    planner: Planner
    row: Planned

    def beside(self, best: Planned | None) -> list[NextStep]:
        """The steps to try if nothing fits, or beside offload if only that does."""
        if best is None:
            return self._in_order()
        return self._without_offload() if best.run.engine.offload_optimizer != "none" else []

    def _in_order(self) -> list[NextStep]:
        """The steps in the order to try that need less than the run that was asked for.

        No run comes twice: none takes as much as another. If the GPU has room, only what needs less
        RAM of the node is a step.
        """
        found: dict[tuple[int, int], NextStep] = {}
        for step in self._every():
            if (step.saves_host_bytes if self.row.fits_gpu else step.saves_bytes) > 0:
                found.setdefault((step.planned.total_bytes, step.planned.host_bytes_per_node), step)
        return list(found.values())

    def _without_offload(self) -> list[NextStep]:
        """The first step that fits on the GPUs alone, and the first such that trains adapters."""
        found: dict[bool, NextStep] = {}
        for step in self._every():
            run = step.planned.run
            alone = run.engine.offload_optimizer == "none" and run["max_length"] == self.row.run["max_length"]
            if step.planned.fits and alone:
                found.setdefault(step.adapters, step)
            if True in found:
                break
        return [step for _, step in sorted(found.items())]

    def _every(self) -> Iterator[NextStep]:
        """Each change as it fits best, with Liger's kernels too if only the logits are too much.

        Without those that are not legal here, or that peft refuses. An Accelerate YAML of the
        user's holds for `standard`; a step to another recipe leaves it out.
        """
        asked = self.row.run
        for recipe, changes, slowdown in _changes(asked, self.planner.estimator.length(asked)):
            with contextlib.suppress(UserError):
                yield (step := self._step(recipe, changes, slowdown))
                entry, fused = step.planned, {**changes, "use_liger_kernel": True}
                without_logits = entry.total_bytes - entry.components.logits
                if not entry.fits_gpu and without_logits <= self.planner.usable and not entry.run["use_liger_kernel"]:
                    cost = f"{slowdown}; Liger's loss makes the logits of a few tokens at a time"
                    step = self._step(recipe, fused, cost)
                    if FUSED_LOSS in self.planner.estimator.liger(step.planned.run):
                        yield step

    def _step(self, recipe: str, changes: Settings, slowdown: str) -> NextStep:
        request, row = self.request, self.row
        dropped = [name for name, value in changes.items() if value is None and row.run.explicit(name)]
        if request.accelerate_config and recipe not in ("standard", row.name):
            request, dropped = replace(request, accelerate_config=None), [*dropped, "accelerate_config"]
        entry = self.planner.best(request.run(recipe, **changes))
        host = f"{entry.time.host:.0f} s" if entry.time.host >= 1 else f"{entry.time.host:.1g} s"
        cost = "".join(f"without --{name}; " for name in dropped) + slowdown
        batch = {"per_device_train_batch_size": entry.micro_batch, "gradient_accumulation_steps": None}
        words = request.command(recipe, **changes, **entry.flags, **batch)
        needs_liger = entry.run["use_liger_kernel"] and not entry.run.hardware.liger
        return NextStep(
            words=f"pip install liger-kernel && {words}" if needs_liger else words,
            planned=entry,
            saves_bytes=row.total_bytes - entry.total_bytes,
            saves_host_bytes=row.host_bytes_per_node - entry.host_bytes_per_node,
            slowdown=cost.format(host=f"at least {host} per step"),
        )
