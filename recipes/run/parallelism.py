"""How the processes of a run share its model and its examples, wherever that is written.

Tensor, context and sequence parallelism give several processes the same examples, so the data is
divided over fewer of them: world / (tp x cp x sp), as in Trainer's `get_total_train_batch_size`.
Replicas and shards (HSDP) are processes with examples of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parallelism:
    """The sizes of accelerate's ParallelismConfig, and `autotp`, that of a DeepSpeed JSON.

    `source` is where the sizes were read; empty if nothing sets them. A size that is not a whole
    number of at least 1 is kept as it was read: the rules report it.
    """

    replicate: Any = 1
    shard: Any = 1
    tensor: Any = 1
    context: Any = 1
    sequence: Any = 1
    source: str = ""
    autotp: Any = 1

    @property
    def sharing(self) -> int:
        """Processes that train on the same examples."""
        return _count(self.tensor) * _count(self.context) * _count(self.sequence) * _count(self.autotp)

    def is_refused(self, own_script: bool) -> bool:
        """Whether a rule refuses the sizes whatever the world is. A script of the user's own may
        divide tensors with `tp_size`.
        """
        return max(_count(self.context), _count(self.sequence), 1 if own_script else _count(self.tensor)) > 1

    def __str__(self) -> str:
        """The sizes above 1 in words, such as `tensor parallel 2`; empty if there are none."""
        tensor = max(_count(self.tensor), _count(self.autotp))
        parallel = {"tensor": tensor, "context": self.context, "sequence": self.sequence}
        words = [f"{name} parallel {size}" for name, size in parallel.items() if _count(size) > 1]
        if _count(self.replicate) > 1:
            words.append(f"{self.replicate} replicas of {self.shard} shards")
        return ", ".join(words)


# Field -> name of the size in accelerate's ParallelismConfig, its YAML section and its variables.
SIZES = {
    "replicate": "dp_replicate_size",
    "shard": "dp_shard_size",
    "tensor": "tp_size",
    "context": "cp_size",
    "sequence": "sp_size",
}


def from_config(config: object) -> Parallelism:
    """The sizes of an accelerate.ParallelismConfig, as TrainingArguments takes it."""
    return Parallelism(**{field: getattr(config, name, 1) for field, name in SIZES.items()}, source="argument")


def from_section(section: Mapping[str, Any], source: str) -> Parallelism:
    """The sizes of `parallelism_config` in an Accelerate YAML."""
    if not section:
        return Parallelism()
    sizes = {field: section.get(f"parallelism_config_{name}", 1) for field, name in SIZES.items()}
    return Parallelism(**{field: _number(size) for field, size in sizes.items()}, source=source)


def from_variables(environment: Mapping[str, str]) -> Parallelism:
    """The sizes that `accelerate launch` exports for its processes."""
    if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
        return Parallelism()
    sizes = {field: environment.get(f"PARALLELISM_CONFIG_{name.upper()}", 1) for field, name in SIZES.items()}
    return Parallelism(**{field: _number(size) for field, size in sizes.items()}, source="the launcher")


def autotp_size(deepspeed: Mapping[str, Any]) -> Any:
    """`tensor_parallel.autotp_size` of a DeepSpeed JSON, 1 without it."""
    section = deepspeed.get("tensor_parallel")
    size = section.get("autotp_size") if isinstance(section, Mapping) else None
    return size or 1  # DeepSpeed's own default, 0, switches it off


def _number(value: object) -> object:
    """A whole number that was written as text; anything else as it is."""
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


def _count(size: object) -> int:
    return size if type(size) is int and size > 1 else 1
