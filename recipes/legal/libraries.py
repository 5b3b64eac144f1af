"""Collects facts about the installed libraries from the libraries' own classes.

`schema` runs this module in a separate process, because the imports take seconds, and caches the
answer. Each function returns a dict of facts by name. `schema.names` reads a fact that is a list,
such as `names("report_to")`. Add a new fact to the function of its subject.
"""

import ast
import contextlib
import dataclasses
import inspect
import json
import os
import re
import sys
from textwrap import dedent
from typing import Any

from recipes.legal.schema import Field, Json, fields_of, package_folder

# The libraries import these packages if they are installed, although no fact needs them. An entry
# None in sys.modules makes a package look absent, which saves a quarter of the time.
ABSENT: dict[str, Any] = dict.fromkeys(("bitsandbytes", "datasets", "scipy", "sklearn"))


def main() -> None:
    """Write all facts as one JSON object to stdout. The output of the libraries goes to stderr.

    Without torch, transformers or accelerate, the process ends with the library's import error.
    """
    sys.modules.update(ABSENT)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        found = {**trainer(), **accelerate()}
        for facts in OPTIONAL:
            with contextlib.suppress(Exception):  # skip a package that is absent, is broken or lacks a private name
                found |= facts()
        json.dump(found, answer, default=_plain)


def _plain(value: object) -> object:
    """For JSON, return a `Field` as a dict, a set as a list, and any other object as None."""
    if isinstance(value, Field):
        return vars(value)
    return sorted(value) if isinstance(value, (set, frozenset)) else None


# --- Trainer and accelerate: without these facts every setting would be unknown -------------------


def trainer() -> Json:
    """Return TrainingArguments' fields, and the legal keys or values of some settings."""
    from torch.utils.checkpoint import checkpoint
    from transformers import TrainingArguments
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.modeling_utils import AttentionInterface
    from transformers.trainer_pt_utils import AcceleratorConfig

    readers = [method for name, method in vars(TrainingArguments).items() if "fsdp" in name and callable(method)]
    parameters = inspect.signature(checkpoint).parameters.values()
    return {
        "trainer_fields": fields_of(TrainingArguments),
        "accelerator_config": _names(AcceleratorConfig),
        "fsdp_config": set().union(*(_words(dedent(inspect.getsource(reader))) for reader in readers)),
        "gradient_checkpointing_kwargs": {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
        | {"use_reentrant", "preserve_rng_state"},
        "report_to": list(INTEGRATION_TO_CALLBACK),
        "attn_implementation": ["eager", *sorted(AttentionInterface._global_mapping)],
    }


def accelerate() -> Json:
    """Return keys of an Accelerate YAML and its sections, and of DDP and accumulation kwargs."""
    from accelerate import utils
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser

    groups = {str(group.title).split()[0].lower(): group for group in launch_command_parser()._action_groups}
    titles = {"megatron_lm": "megatron-lm", "parallelism": "parallelismconfig", "mpirun": "mpi"}
    flags = {section: _flags(groups[titles.get(section, section)]) for section in (*titles, "deepspeed", "fp8", "fsdp")}
    flags["dynamo"] = {name for group in groups.values() for name in _flags(group) if name.startswith("dynamo_")}
    # The launcher reads some keys of an FSDP section for which its parser has no flag.
    flags["fsdp"] |= {word for word in _words(inspect.getsource(utils.launch)) if word.startswith("fsdp_")}
    for section in ("fsdp", "fp8", "dynamo"):  # the prefix may be left out
        flags[section] |= {name.removeprefix(f"{section}_") for name in flags[section]}
    return {
        "accelerate_yaml": [*_names(ClusterConfig), "fp16", "dynamo_backend"],  # accelerate still converts the last two
        **{f"{section}_config of accelerate_yaml": names for section, names in flags.items()},
        "ddp": _names(utils.DistributedDataParallelKwargs),
        "gradient_accumulation_kwargs": _names(utils.GradientAccumulationPlugin),
    }


def _names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _flags(group: Any) -> set[str]:
    return {action.dest for action in group._group_actions}


def _words(source: str) -> set[str]:
    """Return every one-word string in source code. Among these words are the keys that the code
    reads, which no class lists.
    """
    constants = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return {word for word in constants if isinstance(word, str) and word.isidentifier()}


# --- Packages that may be absent, and private names that a release may drop -----------------------


def optimizers() -> Json:
    """Return the optimizers that ignore `optim_args`, those that ignore `adam_beta1`, those of
    bitsandbytes, and the keys of `optim_args` that the code of each optimizer may read.
    """
    from transformers import trainer_optimizer

    bitsandbytes = [name.value for name in trainer_optimizer._BITSANDBYTES_OPTIMIZERS]
    sources = {name.value: inspect.getsource(one) for name, one in trainer_optimizer._OPTIMIZER_HANDLERS.items()}
    reading = [name for name, source in sources.items() if "optim_args" in source]
    # One function creates all of bitsandbytes' optimizers. RMSprop gets all keys, unread.
    reading = [name for name in reading if name not in bitsandbytes or re.search("rmsprop|ademamix", name)]
    known = {f"optim_args of {name}": _words(sources[name]) for name in reading if "rmsprop_bnb" not in name}
    return known | {
        "optimizers_without_arguments": sorted({*sources} - {*reading}),
        "optimizers_without_adam": [name for name, source in sources.items() if "adam_" not in source],
        "bitsandbytes_optimizers": bitsandbytes,
    }


def schedules() -> Json:
    """Return schedules without warm-up, for which get_scheduler drops `warmup_steps` silently."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    takes = {name.value: inspect.signature(one).parameters for name, one in TYPE_TO_SCHEDULER_FUNCTION.items()}
    return {"schedules_without_warmup": [name for name in takes if "num_warmup_steps" not in takes[name]]}


def models() -> Json:
    """Return model types, and their classes by task."""
    from transformers.models.auto import configuration_auto, modeling_auto

    named = ("CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "MASKED_LM")
    return {
        "model_classes": {table: getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES") for table in named},
        "model_types": list(configuration_auto.CONFIG_MAPPING_NAMES),
    }


def liger() -> Json:
    """Return the model types for which Liger by default computes the loss without full logits."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    takes = {kind: inspect.signature(patch).parameters for kind, patch in MODEL_TYPE_TO_APPLY_LIGER_FN.items()}
    name = "fused_linear_cross_entropy"
    return {"liger": [kind for kind, taken in takes.items() if name in taken and taken[name].default is True]}


def deepspeed() -> Json:
    """Return the keys of a DeepSpeed JSON, read from the source because an import takes a second.

    No class lists the top-level keys, so the result is every quoted word: all keys and more.
    """
    folder = package_folder("deepspeed")
    assert folder, "DeepSpeed is not installed"
    files = [file for name in ("constants", "config", "config_v2") for file in folder.glob(f"**/{name}.py")]
    return {"deepspeed_json": set().union(*(_words(file.read_text("utf-8")) for file in files))}


OPTIONAL = (optimizers, schedules, models, liger, deepspeed)
