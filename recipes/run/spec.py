"""`RunSpec`: one resolved run, every value with where it came from and why.

A run is frozen. What is known only later, such as the model's longest sequence, makes a new run.
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
from recipes.run.metrics import smaller_is_better

Settings = Mapping[str, Any]  # values of settings by name: a RunSpec, or a plain mapping


@dataclass(frozen=True)
class Setting:
    """A value, where it came from (`command line`, a file, `recipe fast`, ...), and why."""

    value: Any
    source: str
    reason: str = ""


LIBRARY = "library default"
COMMAND_LINE = "command line"
BATCH = "batch arithmetic"
FIT = "fit.json"
BEST_MODEL = "load_best_model_at_end"
BATCH_FIELDS = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
HIDDEN = "***"


def shown(name: str, value: object) -> object:
    """A value as it may be printed and recorded: a token is hidden."""
    return HIDDEN if value and name.endswith("_token") else value


@dataclass(frozen=True, eq=False)
class RunSpec(Mapping):
    """One resolved run. `run[name]` is the value of a legal setting, `run.setting(name)` says why.

    `given` is what the user wrote, `demonstrate` whether train.py's demonstration may be trained.
    `launcher`: the Accelerate YAML of the launch, if the recipe starts another engine under it.
    `elsewhere`: packages known to be where the run goes; None if it runs here.
    `model`: the configuration of its model once it is loaded; None before.
    `own_script`: a script of the user's own trains, not train.py.
    `batch_source`: what chose a micro-batch that the user did not, arithmetic or `--fit`.
    `limits`: values that the user did not write, lowered to what the model allows, or told by data.
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
    launcher: Engine | None = None
    elsewhere: frozenset[str] | None = None
    model: Mapping[str, Any] | None = None
    own_script: bool = False
    launched: bool = False
    batch_source: str = BATCH
    limits: Mapping[str, Setting] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.setting(name).value

    def __iter__(self) -> Iterator[str]:
        return (name for name in legal.settings() if name not in legal.ALIASES)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def setting(self, name: str) -> Setting:
        """The value of a legal setting, its source and its reason. `KeyError` for any other."""
        name = legal.ALIASES.get(name, name)
        if name in self.given:
            return self.given[name]
        for source, value in self._layers(name):
            if value is not None:
                decided, reason = value(self) if callable(value) else value
                return Setting(decided, source, reason)
        return Setting(legal.settings()[name].default, LIBRARY)

    def explicit(self, name: str) -> bool:
        """Whether the user wrote it, on the command line or in a file."""
        return legal.ALIASES.get(name, name) in self.given

    def limited(self, name: str, limit: int | None, reason: str) -> RunSpec:
        """The run with a value lowered to `limit`, unless the user wrote it, or it is lower."""
        if limit is None or self.explicit(name) or self[name] <= limit:
            return self
        return replace(self, limits={**self.limits, name: Setting(limit, "limit", reason)})

    def at_batch(self, batch: Batch, source: str) -> RunSpec:
        """The run with its global batch split like this. Settings that depend on it follow."""
        return replace(self, batch=batch, batch_source=source)

    def given_too(self, **settings: Any) -> RunSpec:
        """The run as if these settings had been written, too: what is decided by them follows."""
        given = {name: replace(self.setting(name), value=value) for name, value in settings.items()}
        return replace(self, given={**self.given, **given})

    def with_source(self, problem: Problem) -> Problem:
        """The problem, completed with where its setting came from if it does not say."""
        if problem.source or problem.subject not in legal.settings():
            return problem
        return replace(problem, source=self.setting(problem.subject).source)

    @property
    def data_parallel_size(self) -> int:
        """Processes, or groups of processes, that get examples of their own."""
        return max(1, self.world_size // self.engine.parallelism.sharing)

    @property
    def engine_title(self) -> str:
        """The engine's name for people. On a CPU, accelerate trains an FSDP launch as plain DDP."""
        if self.engine.kind == "fsdp" and not self.hardware.shards:
            return replace(self.engine, kind="ddp", offload_optimizer="none", offload_param="none").title
        return self.engine.title

    @property
    def demonstration(self) -> bool:
        """Whether train.py trains its demonstration: the user named neither a model nor data."""
        return self.demonstrate and "model_name_or_path" not in self.given and "dataset_name" not in self.given

    def chosen(self) -> dict[str, Setting]:
        """Every setting that is not the libraries' own default."""
        settings = {name: self.setting(name) for name in self}
        return {name: setting for name, setting in settings.items() if setting.source != LIBRARY}

    def training_arguments(self) -> dict[str, Any]:
        """Keyword arguments for the installed TrainingArguments, under the names it uses."""
        fields = legal.trainer_fields()
        newest = {old: new for new, old in legal.ALIASES.items() if new in fields}
        chosen = {name: setting.value for name, setting in self.chosen().items() if name in fields}
        return {newest.get(name, name): value for name, value in chosen.items()}

    def _layers(self, name: str) -> Iterator[tuple[str, catalog.Value | None]]:
        """What could decide a setting that the user did not write, from first to last."""
        if name in self.limits:
            yield self.limits[name].source, (self.limits[name].value, self.limits[name].reason)
        yield BATCH if name == "global_batch_size" else self.batch_source, self._from_batch(name)
        if name == "use_cpu":
            yield "hardware", None if self.hardware.cuda else (True, "no GPU: CPU training, chosen explicitly")
        if name == "output_dir":
            yield "default", (f"outputs/{self.recipe.name}", "one folder for each recipe")
        yield self.recipe.origin(name), self.recipe.settings.get(name)
        if name == "greater_is_better":  # Trainer's default is True for all but a loss
            metric = self["metric_for_best_model"]
            yield "metric_for_best_model", (False, f"a smaller {metric} is better") if _is_error(metric) else None
        epochs_win = name == "max_steps" and "num_train_epochs" in self.given
        if name in catalog.DEMONSTRATION and self.demonstration and not epochs_win:
            yield "demonstration", catalog.DEMONSTRATION[name]
        if name in ("save_strategy", "save_steps") and self[BEST_MODEL]:
            yield BEST_MODEL, self._saved_when_evaluated(name)

    def _saved_when_evaluated(self, name: str) -> catalog.Decision | None:
        """Save every model that is evaluated, unless somebody says when to save; else None."""
        strategy, reason = self["eval_strategy"], "every evaluated model is saved, so the best one is"
        if name == "save_strategy":
            says_when = self.explicit("save_steps") or "save_steps" in self.recipe.settings
            return None if strategy == "no" or says_when else (strategy, reason)
        if strategy != "steps" or self["save_strategy"] != "steps":
            return None
        return self["eval_steps"] or self["logging_steps"], reason

    def _from_batch(self, name: str) -> catalog.Decision | None:
        if name not in BATCH_FIELDS:
            return None
        if name == "global_batch_size":
            return self.batch.total, str(self.batch)
        micro = name == "per_device_train_batch_size"
        return self.batch.micro if micro else self.batch.accumulation, self.batch.reason


def _is_error(metric: str | None) -> bool:
    return metric is not None and smaller_is_better(metric) is True and not metric.endswith("loss")
