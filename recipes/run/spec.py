"""`RunSpec`: one resolved run, with the source and the reason of every value.

A run is frozen. When a fact becomes known later, such as the model's longest sequence, a new run is
made from the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipes import catalog, legal
from recipes.catalog import Decision, Recipe, Value
from recipes.errors import Problem
from recipes.run.batch import BATCH, Batch
from recipes.run.engine import Engine
from recipes.run.hardware import Hardware
from recipes.run.metrics import smaller_is_better
from recipes.run.place import Place

Settings = Mapping[str, Any]  # values of settings by name: a RunSpec, or a plain mapping


@dataclass(frozen=True)
class Setting:
    """A value with its source (`command line`, a file, `recipe fast`, ...) and its reason."""

    value: Any
    source: str
    reason: str = ""


LIBRARY = "library default"
COMMAND_LINE = "command line"
FIT = "fit.json"
BEST_MODEL = "load_best_model_at_end"
BATCH_FIELDS = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
HIDDEN = "***"


def shown(name: str, value: object) -> object:
    """The value as it may be printed and recorded: access tokens are replaced by asterisks."""
    return HIDDEN if value and name.endswith("_token") else value


@dataclass(frozen=True, eq=False)
class RunSpec(Mapping):
    """One resolved run. `run[name]` is a setting's value; `run.setting` adds source and reason.

    `given` are the settings that the user wrote. `limits` are settings that the user did not write
    and that the model or the data decide, such as a lower max_length. `model` is the model's
    configuration, None until the model's files are read.
    """

    recipe: Recipe
    given: Mapping[str, Setting]
    place: Place
    engine: Engine
    batch: Batch
    problems: tuple[Problem, ...]
    limits: Mapping[str, Setting] = field(default_factory=dict)
    model: Mapping[str, Any] | None = None

    # --- Its settings ---

    def __getitem__(self, name: str) -> Any:
        return self.setting(name).value

    def __iter__(self) -> Iterator[str]:
        return (name for name in legal.settings() if name not in legal.ALIASES)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def setting(self, name: str) -> Setting:
        """Get a setting. Raises `KeyError` for unknown names, `UserError` for errors in recipes."""
        name = legal.ALIASES.get(name, name)
        if name in self.given:
            return self.given[name]
        if name in self.limits:
            return self.limits[name]
        for source, value in self._layers(name):
            if value is not None:
                decided, reason = value(self) if callable(value) else value
                return Setting(decided, source, reason)
        return Setting(legal.settings()[name].default, LIBRARY)

    def explicit(self, name: str) -> bool:
        """True if the user wrote the setting: as a flag, in a file or as an argument in Python."""
        return legal.ALIASES.get(name, name) in self.given

    def chosen(self) -> dict[str, Setting]:
        """Return every setting that is chosen for this run, without the libraries' defaults."""
        settings = {name: self.setting(name) for name in self}
        return {name: setting for name, setting in settings.items() if setting.source != LIBRARY}

    def training_arguments(self) -> dict[str, Any]:
        """Return the arguments for TrainingArguments under the names of the installed version."""
        fields = legal.trainer_fields()
        newest = {old: new for new, old in legal.ALIASES.items() if new in fields}
        return {newest.get(name, name): setting.value for name, setting in self.chosen().items() if name in fields}

    def with_source(self, problem: Problem) -> Problem:
        """Add a setting's source to a problem about it, unless the problem already has a source."""
        if problem.source or problem.subject not in legal.settings():
            return problem
        return replace(problem, source=self.setting(problem.subject).source)

    # --- Its place ---

    @property
    def hardware(self) -> Hardware:
        return self.place.hardware

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def local_world_size(self) -> int:
        return self.place.local_world_size

    @property
    def engine_title(self) -> str:
        """The engine's display name. accelerate trains an FSDP launch on a CPU as plain DDP."""
        if self.engine.kind == "fsdp" and not self.hardware.can_shard:
            return replace(self.engine, kind="ddp", offload_optimizer="none", offload_param="none").title
        return self.engine.title

    @property
    def demonstration(self) -> bool:
        """True if train.py trains its demonstration: the user named neither a model nor data."""
        return self.place.by_train_py and not {"model_name_or_path", "dataset_name"} & self.given.keys()

    @property
    def outer_engine(self) -> Engine | None:
        """The Accelerate YAML's engine if train.py itself sets up another engine; else None."""
        yaml = self.place.yaml
        return yaml if yaml and yaml.source != self.engine.source else None

    # --- The same run, with something changed ---

    def limited(self, name: str, limit: int | None, reason: str) -> RunSpec:
        """Return the run with a value lowered to `limit`, unless the user wrote the value."""
        if limit is None or self.explicit(name) or self[name] <= limit:
            return self
        return self.overruled(name, limit, reason)

    def overruled(self, name: str, value: Any, reason: str) -> RunSpec:
        """Return the run with a value that model or data decide, unless the user wrote a value."""
        return replace(self, limits={**self.limits, name: Setting(value, "limit", reason)})

    def given_too(self, **settings: Any) -> RunSpec:
        """Return the run with these settings as if the user wrote them. Engine and batch stay."""
        given = {name: replace(self.setting(name), value=value) for name, value in settings.items()}
        return replace(self, given={**self.given, **given})

    # --- Values that the user did not write ---

    def _layers(self, name: str) -> Iterator[tuple[str, Value | None]]:
        """Yield (source, value) pairs for a setting that neither `given` nor `limits` holds. The
        first value that is not None wins. If all are None, the library's default wins.
        """
        if name in BATCH_FIELDS:
            sizes = dict(zip(BATCH_FIELDS, (self.batch.total, self.batch.micro, self.batch.accumulation), strict=True))
            by_arithmetic = name == "global_batch_size"
            reason = str(self.batch) if by_arithmetic else self.batch.reason
            yield BATCH if by_arithmetic else self.batch.source, (sizes[name], reason)
        if name == "use_cpu" and not self.hardware.cuda:
            yield "hardware", (True, "no GPU, so the training runs on the CPU")
        if name == "output_dir":
            yield "default", (f"outputs/{self.recipe.name}", "one folder for each recipe")
        if stated := self.recipe.stated(name):
            recipe, value = stated
            yield recipe.source, value
        metric = str(self["metric_for_best_model"] if name == "greater_is_better" else None)
        if smaller_is_better(metric) and not metric.endswith("loss"):  # Trainer's default is True except for a loss
            yield "metric_for_best_model", (False, f"a smaller {metric} is better")
        epochs_win = name == "max_steps" and "num_train_epochs" in self.given
        if name in catalog.DEMONSTRATION and self.demonstration and not epochs_win:
            yield "demonstration", catalog.DEMONSTRATION[name]
        if name in ("save_strategy", "save_steps") and self[BEST_MODEL]:
            yield BEST_MODEL, self._saved_when_evaluated(name)

    def _saved_when_evaluated(self, name: str) -> Decision | None:
        """The value of `name` that saves each evaluated model; None if other settings decide."""
        strategy, reason = self["eval_strategy"], "every evaluated model is saved, so the best one is saved too"
        if name == "save_strategy":
            says_when = self.explicit("save_steps") or self.recipe.stated("save_steps")
            return None if strategy == "no" or says_when else (strategy, reason)
        if strategy != "steps" or self["save_strategy"] != "steps":
            return None
        return self["eval_steps"] or self["logging_steps"], reason
