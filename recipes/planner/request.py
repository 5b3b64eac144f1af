"""What a plan was asked about: its runs with changed flags, and the command lines of these runs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.planner.estimate import is_size
from recipes.rules.check import require_legal
from recipes.run import Json, RunSpec, Settings, find_recipe, resolve, with_flags
from recipes.run.engine import shipped
from recipes.run.hardware import Gpu, Hardware


@dataclass(frozen=True)
class Request:
    """What to plan: the model, its configuration, the card, how many cards and nodes, the flags.

    `model` is as the user wrote it, empty for a configuration without a name.
    `mfu` and `bandwidth` (bytes per second, None if unknown) are what times assume.
    """

    model: str
    config: Json
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
        own = str(shipped(find_recipe(recipe).engine))
        run = resolve(
            ["--recipe", recipe, "--model_name_or_path", self.model or "YOUR_MODEL", *self._with(flags)],
            world_size=self.num_processes,
            local_world_size=local,
            hardware=Hardware((self.card,) * local, cores=8 * local),
            accelerate_config=self.accelerate_config or own,
            environment={},
            demonstrate=False,
            elsewhere=frozenset(),
        )
        require_legal(replace(run, model=self.config))
        return run

    def command(self, recipe: str, **flags: object) -> str:
        """The flags of train.py for `run(recipe, **flags)`, as text for a shell.

        With an Accelerate YAML, the whole command: without the YAML it would be another run.
        """
        known = self.model and not is_size(self.model) and not Path(self.model).is_file()
        model = ["--model_name_or_path", self.model if known else "YOUR_MODEL"]
        if not known and self._asked.explicit("model_name_or_path"):  # in --config's file
            model = []
        launch = []
        if self.accelerate_config:
            launch = ["recipes", "train", "--accelerate_config", self.accelerate_config]
            launch += ["--num_processes", str(self.num_processes)]
        return shlex.join([*launch, "--recipe", recipe, *model, *self._with(flags)])

    def _with(self, flags: Settings) -> list[str]:
        """The user's flags with these in their place, and the user's global batch in any case."""
        asked = self._asked
        stated = asked.explicit("per_device_train_batch_size") or asked.explicit("gradient_accumulation_steps")
        if stated and "per_device_train_batch_size" in flags:
            flags = {"global_batch_size": asked.batch.total, **flags}
        return with_flags(self.argv, flags)

    @property
    def _asked(self) -> RunSpec:
        return resolve(self.argv, world_size=self.num_processes, demonstrate=False, environment={})
