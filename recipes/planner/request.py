"""What a plan was asked about: its runs with changed flags, and the command lines of these runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.errors import Problem
from recipes.legal.schema import package_folder
from recipes.planner.sizes import is_size
from recipes.rules.check import require_legal
from recipes.run import Json, RunSpec, Settings, here, resolve, with_flags
from recipes.run.hardware import Gpu, Hardware


@dataclass(frozen=True)
class Request:
    """What to plan: the model, its configuration, the card, how many cards and nodes, the flags.

    `model` is as the user wrote it, empty for a configuration without a name. `config` is None
    until it is read: the rules then judge what they know without it.
    `accelerate_config` is the user's Accelerate YAML, None without one. `mfu` and `bandwidth`
    (bytes per second, None if unknown) are what times assume.
    """

    model: str
    config: Json | None
    card: Gpu
    num_processes: int
    nodes: int
    argv: tuple[str, ...]
    accelerate_config: str | None
    mfu: float
    bandwidth: float | None

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
