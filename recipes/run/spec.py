"""`RunSpec`: one resolved run, every value with where it came from and why.

It is frozen: what turns up later, such as the model's longest sequence, makes another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipes import catalog, legal
from recipes.catalog import Recipe
from recipes.errors import Problem
from recipes.run.batch import Batch
from recipes.run.engine import Engine
from recipes.run.hardware import Hardware


@dataclass(frozen=True)
class Setting:
    """A value, where it came from (`command line`, a file, `recipe fast`, ...), and the reason if one is known."""

    value: Any
    source: str
    reason: str = ""


LIBRARY = "library default"
COMMAND_LINE = "command line"
BATCH = "batch arithmetic"
FIT = "fit.json"
BATCH_FIELDS = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
HIDDEN = "***"


def shown(name: str, value: Any) -> Any:
    """A value as it may be printed and recorded: a token is a secret."""
    return HIDDEN if value and name.endswith("_token") else value


@dataclass(frozen=True, eq=False)
class RunSpec(Mapping):
    """One resolved run. `run[name]` is the value of any legal setting, `run.setting(name)` says where it is from.

    `elsewhere`: packages that are known where it is to run; None where it runs with those installed here.
    `batch_source`: what chose the micro-batch where nobody wrote it, arithmetic or `--fit`.
    `limits`: values that nobody wrote, lowered to what the model or the machine turned out to allow.
    """

    recipe: Recipe
    hardware: Hardware
    engine: Engine
    world_size: int
    local_world_size: int
    given: dict[str, Setting]
    batch: Batch
    problems: tuple[Problem, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    demonstrate: bool = True
    elsewhere: frozenset[str] | None = None
    batch_source: str = BATCH
    limits: Mapping[str, Setting] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.setting(name).value

    def __iter__(self) -> Iterator[str]:
        return (name for name in legal.settings() if name not in legal.ALIASES)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def setting(self, name: str) -> Setting:
        name = legal.ALIASES.get(name, name)
        if name in self.given:
            return self.given[name]
        for source, found in self._layers(name):
            if found is not None:
                value, reason = found(self) if callable(found) else found
                return Setting(value, source, reason)
        return Setting(legal.settings()[name].default, LIBRARY)

    def explicit(self, name: str) -> bool:
        """Whether the user wrote it, on the command line or in a file."""
        return legal.ALIASES.get(name, name) in self.given

    def limited(self, name: str, limit: int | None, reason: str) -> RunSpec:
        """The run with a value that nobody wrote lowered to a limit that has turned up, if it is above it."""
        if limit is None or self.explicit(name) or self[name] <= limit:
            return self
        return replace(self, limits={**self.limits, name: Setting(limit, "limit", reason)})

    def at_batch(self, batch: Batch, source: str) -> RunSpec:
        """The run with its global batch split like this. What depends on the micro-batch follows."""
        return replace(self, batch=batch, batch_source=source)

    def with_source(self, problem: Problem) -> Problem:
        """The problem with where its setting came from, if it does not say so itself."""
        if problem.source or problem.subject not in legal.settings():
            return problem
        return replace(problem, source=self.setting(problem.subject).source)

    @property
    def demonstration(self) -> bool:
        """Whether train.py trains its demonstration: nobody named a model or data."""
        return self.demonstrate and "model_name_or_path" not in self.given and "dataset_name" not in self.given

    def chosen(self) -> dict[str, Setting]:
        """Every setting that somebody or something chose: all but the libraries' defaults."""
        settings = {name: self.setting(name) for name in self}
        return {name: setting for name, setting in settings.items() if setting.source != LIBRARY}

    def training_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the installed TrainingArguments, under the names it has."""
        fields = legal.trainer_fields()
        newest = {old: new for new, old in legal.ALIASES.items() if new in fields}
        chosen = {name: setting.value for name, setting in self.chosen().items() if name in fields}
        return {newest.get(name, name): value for name, value in chosen.items()}

    def _layers(self, name: str) -> Iterator[tuple[str, Any]]:
        if name in self.limits:
            yield "limit", (self.limits[name].value, self.limits[name].reason)
        yield BATCH if name == "global_batch_size" else self.batch_source, self._from_batch(name)
        if name == "use_cpu":
            yield "hardware", None if self.hardware.cuda else (True, "no GPU: CPU training, chosen explicitly")
        if name == "output_dir":
            yield "default", (f"outputs/{self.recipe.name}", "one folder a recipe")
        yield f"recipe {self.recipe.name}", self.recipe.settings.get(name)
        epochs_were_asked_for = name == "max_steps" and "num_train_epochs" in self.given  # max_steps would win
        if name in catalog.DEMONSTRATION and self.demonstration and not epochs_were_asked_for:
            yield "demonstration", catalog.DEMONSTRATION[name]

    def _from_batch(self, name: str) -> catalog.Decision | None:
        if name not in BATCH_FIELDS:
            return None
        values = (self.batch.total, self.batch.micro, self.batch.accumulation)
        value = dict(zip(BATCH_FIELDS, values, strict=True))[name]
        return value, self.batch.reason if name != "global_batch_size" else f"{self.batch}"
