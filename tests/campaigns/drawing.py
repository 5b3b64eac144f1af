"""Draws a case: a launch, a model and its data, flags that belong together, and any others.

Some bring a recipe of their own, shard with FSDP2, share a model or its examples between processes,
or find a launcher's variables in the environment.

Most runs that are drawn are nearly right: what is wrong on its own, the tests try already.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import yaml

from recipes import legal
from recipes.run.files import shipped
from tests.campaigns.runs import DEEPSPEED_JSON, DEMONSTRATION, FSDP_JSON, OWN_RECIPE, REMOVED, Case, Change

# Of each setting and key of a file: plausible, odd and wrong values.
_VALUES = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text(encoding="utf-8"))
NOT_DRAWN = {name for names in _VALUES["not_drawn"].values() for name in names.split()}
_BATCH_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
_FSDP_WORDS = ("full_shard", "full_shard", "true", "shard_grad_op", "full_shard auto_wrap", "hybrid_shard", "zero3")
_USUAL_CHANGES = (
    "learning_rate lr_scheduler_type warmup_steps optim weight_decay max_grad_norm global_batch_size "
    "per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing packing max_length use_peft "
    "lora_r lora_target_modules bf16 attn_implementation eval_strategy save_strategy save_steps"
).split()
_ODD = 0.06  # how often a value is odd
_IN_TURN = {"eval_strategy": "steps steps epoch no", "load_best_model_at_end": "true", "use_peft": "true true false"}
_CLASSIFIERS = ("bert-classifier", "bert", "llama", "gpt2")
_MODELS = ("llama", "llama", "llama", "llama", "gpt2", "gpt2", "opt", "llama-tied")
_UNFIT_MODELS = ("llama-short", "bert", "t5", "adapters", "empty", "nowhere")
_DATA = ("texts.jsonl",) * 4 + ("texts.txt", "pairs.jsonl", "chats.jsonl", "few.jsonl")
_UNFIT_DATA = ("labels.csv", "nowhere.jsonl")


def draw(random: Random) -> Case:
    """A case at random. The same `random` draws the same case."""
    changes: list[Change] = []
    if random.random() < 0.6:
        changes.append(_flag("recipe", random))
    model = random.choice(_MODELS if random.random() > _ODD / 2 else _UNFIT_MODELS)
    data = random.choice(_DATA if random.random() > _ODD / 2 else _UNFIT_DATA)
    task = random.random()
    if task < 0.2:
        changes.append(Change("flag", "task", ["sequence_classification"]))
        model = random.choice(_CLASSIFIERS) if random.random() < 0.9 else model
        data = "labels.csv" if random.random() < 0.9 else data
    elif task < 0.25:
        model = data = DEMONSTRATION
    names = _flags(random)
    changes += [_flag(name, random) for name in names if name not in {change.name for change in changes}]
    if "eval_strategy" in names and "dataset_test_split" not in names and random.random() < 0.9:
        changes.append(Change("flag", "dataset_test_split", ["train[:8]"]))
    compiles = {"torch_compile", "torch_compile_mode"} & set(names)
    if compiles and "torch_compile_backend" not in names:  # the default takes a minute to compile
        changes.append(Change("flag", "torch_compile_backend", [random.choice(("eager", "aot_eager"))]))
    drawn = random.choices(list(_LAUNCHES), list(_LAUNCHES.values()))[0]
    launch = drawn(random)
    if drawn is not _plain:  # what is odd about it matters more than the flags beside it
        few = random.sample(changes, min(len(changes), random.choice((0, 1, 3))))
        needed = ("task", "torch_compile_backend")
        decided = {"ddp_backend", "use_cpu", *(change.name for change in launch.changes)}
        changes = [one for one in changes if (one in few or one.name in needed) and one.name not in decided]
    changes = [_in_file(change, random) for change in changes]
    return replace(launch, model=model, data=data, changes=(*changes, *launch.changes))


def _flags(random: Random) -> list[str]:
    """The names of the flags that are written, each once."""
    names: list[str] = []
    for theme in random.sample(_VALUES["themes"], random.choice((0, 1, 1, 2))):
        names += [name for name in theme.split() if random.random() < 0.5]
    everything = sorted(set(legal.settings()) - NOT_DRAWN - {"recipe", "task"})
    names += random.sample(everything, random.choice((0, 1, 2, 3)))
    return list(dict.fromkeys(names))


def _flag(name: str, random: Random) -> Change:
    if name in _IN_TURN and random.random() > _ODD:
        return Change("flag", name, [random.choice(_IN_TURN[name].split())])
    if random.random() < 0.01:
        return Change("flag", _misspelt(name, random), words_for(name, random, _ODD))
    return Change("flag", name, words_for(name, random, _ODD))


def _in_file(change: Change, random: Random) -> Change:
    """The same setting in a --config file, sometimes: with the types of YAML."""
    if random.random() < 0.9 or len(change.value) != 1:
        return change
    return Change("config", change.name, _typed(change.value[0]))


def _misspelt(name: str, random: Random) -> str:
    place = random.randrange(len(name))
    return name[:place] + name[place + 1 :] or f"{name}s"


def words_for(name: str, random: Random, odd: float) -> list[str]:
    """The words after `--name`: an odd value with the probability `odd`."""
    plausible, unusual = _VALUES["settings"].get(name) or _by_type(name)
    if random.random() < odd / 4:
        unusual = " ".join(_VALUES["wrong"].get(kind, "") for kind in legal.settings()[name].types) or unusual
        return [random.choice(unusual.split() or ["true"])]
    if random.random() < odd:
        plausible = unusual or " ".join(legal.settings()[name].choices) or plausible
    return [random.choice((plausible or unusual).split())]


def _by_type(name: str) -> tuple[str, str]:
    field = legal.settings()[name]
    if field.choices:
        return " ".join(field.choices), f"{field.choices[0]}x"
    if "bool" in field.types:
        return "true false", "true"
    return "1", "0 -1"


# --- Launches -------------------------------------------------------------------------------------


def _plain(random: Random) -> Case:
    """Mostly one process, and DeepSpeed now and then: two ranks and DeepSpeed take longer."""
    kind, changes = random.random(), []
    files = ("standard.yaml",) * 4 + ("single.yaml",) * 2 + ("", "", "fast.yaml", "memory.yaml", "memory_zero3.yaml")
    launch = Case("accelerate", random.choice((None, 1, 1, 2, 2, 2)), random.choice(files))
    if kind < 0.5:
        launch = Case("python")
    elif kind < 0.62:
        launch = Case("torchrun", random.choice((1, 2, 2, 2)))
    if launch.yaml and random.random() < 0.25:
        changes += _yaml_changes(launch.yaml, random)
    if random.random() < 0.06:
        changes += [Change("flag", "deepspeed", [DEEPSPEED_JSON]), *_json_changes(random)]
    return replace(launch, changes=tuple(changes))


def _own_recipe(random: Random) -> Case:
    base = random.choice(("baseline", "standard", "standard", "fast", "fast", "memory", "sharded"))
    changes = [Change("flag", "recipe", [OWN_RECIPE]), Change("own", "base", base)]
    changes.append(Change("own", "purpose", "To try it."))
    everything = sorted(set(legal.settings()) - NOT_DRAWN - {"recipe", "task", "torch_compile"})
    for name in dict.fromkeys([*random.sample(_USUAL_CHANGES, random.choice((0, 1, 2, 3))), random.choice(everything)]):
        value = _typed(words_for(name, random, 0.1)[0])
        reason = "we tried it" if random.random() > 0.03 else ""
        changes.append(Change("own", f"changes.{name}", [value, reason]))
    if random.random() < 0.2:
        changes += changed_keys(_VALUES["own_recipe"], "own", random, 1)
    places = (Case(), Case("torchrun", 2), Case("accelerate", 2), Case("accelerate", 2, "standard.yaml"))
    return replace(random.choice(places), changes=tuple(changes))


def _sharded(random: Random) -> Case:
    """FSDP2 on CPU ranks, where accelerate's refusal of a CPU is lifted.

    Without offload: torch asks for the device that parameters come back to.
    """
    count, kind = random.choice((0, 1, 1, 2)), random.random()
    recipe = [Change("flag", "recipe", ["sharded"])] if random.random() < 0.6 else []
    if kind < 0.7:
        named = {f"fsdp_config.fsdp_{key}": values for key, values in _VALUES["fsdp"].items()}
        changes = (*recipe, *changed_keys(named, "yaml", random, count))
        return Case("accelerate", random.choice((None, 1, 2, 2)), "sharded.yaml", lifted=True, changes=changes)
    launch = random.choice((Case("torchrun", 2), Case("accelerate", 2, "standard.yaml")))
    words = [Change("flag", "fsdp", [random.choice(_FSDP_WORDS)] if random.random() < 0.7 else [])]
    prefix = random.choice(("", "", "fsdp_"))
    named = {prefix + key: [one for one in values if one != REMOVED] for key, values in _VALUES["fsdp"].items()}
    if written := changed_keys(named, "fsdp", random, count):  # Trainer's own `--fsdp_config`, a JSON file
        words += [Change("flag", "fsdp_config", [FSDP_JSON]), *written]
    return replace(launch, lifted=True, changes=(*recipe, *words))


def _tensor_parallel(random: Random) -> Case:
    changes = [Change("json", "zero_optimization", {"stage": random.choice((0, 1, 2, 2, 3))})]
    changes.append(Change("json", "train_micro_batch_size_per_gpu", "auto"))
    changes += changed_keys(_VALUES["sharing"], "json", random, random.choice((1, 1, 1, 2)))
    changes += changed_keys(_VALUES["deepspeed_json"], "json", random, random.choice((0, 0, 1)))
    processes = random.choice((1, 2, 2, 2))
    if random.random() < 0.5:
        return Case("torchrun", processes, changes=(Change("flag", "deepspeed", [DEEPSPEED_JSON]), *changes))
    named = Change("yaml", "deepspeed_config", {"deepspeed_config_file": DEEPSPEED_JSON})
    without = Change("yaml", "mixed_precision", REMOVED)
    return Case("accelerate", processes, "memory.yaml", changes=(named, without, *changes))


def _section(random: Random) -> Case:
    """Processes share a model or its examples by a section of the YAML."""
    file = random.choice(("standard.yaml", "memory.yaml", "sharded.yaml", "sharded.yaml"))
    named = {
        **{f"parallelism_config.parallelism_config_{name}": sizes for name, sizes in _VALUES["world_sizes"].items()},
        **{f"parallelism_config.{name}": values for name, values in _VALUES["parallelism"].items()},
    }
    changes = tuple(changed_keys(named, "yaml", random, random.choice((1, 1, 2))))
    return Case("accelerate", random.choice((None, 1, 2, 2)), file, lifted=file == "sharded.yaml", changes=changes)


def _exported(random: Random) -> Case:
    """Variables of a launcher that are found in the environment already."""
    named = {
        **_VALUES["variables"],
        **{f"PARALLELISM_CONFIG_{name.upper()}": [1, 2] for name in _VALUES["world_sizes"]},
    }
    changes = changed_keys(named, "variable", random, random.choice((1, 1, 2, 3)))
    if any(change.name.startswith("PARALLELISM") for change in changes) and random.random() < 0.8:
        changes.append(Change("variable", "ACCELERATE_USE_PARALLELISM_CONFIG", "true"))
    places = (Case(), Case("torchrun", 2), Case("accelerate", 2, "standard.yaml"))
    return replace(random.choice(places), changes=tuple(changes))


# How often each is drawn.
_LAUNCHES = {_plain: 70, _own_recipe: 8, _sharded: 9, _tensor_parallel: 5, _section: 4, _exported: 4}


def _typed(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


def _yaml_changes(file: str, random: Random) -> list[Change]:
    """Keys of the Accelerate YAML that are changed, dropped, misspelt or of another type."""
    named = {**_VALUES["yaml"]}
    if "deepspeed_config" in yaml.safe_load(shipped(file).read_text(encoding="utf-8")):
        named |= {f"deepspeed_config.{name}": values for name, values in _VALUES["deepspeed_section"].items()}
    changes = changed_keys(named, "yaml", random, random.choice((1, 1, 2)))
    if any(change.name.endswith("deepspeed_config_file") for change in changes):
        changes += _json_changes(random)
    return changes


def _json_changes(random: Random) -> list[Change]:
    start = [Change("json", "zero_optimization", {"stage": random.choice((2, 2, 1, 3))})]
    if random.random() < 0.7:  # as most people write it
        start += [Change("json", name, "auto") for name in _BATCH_SIZES]
    return [*start, *changed_keys(_VALUES["deepspeed_json"], "json", random, random.choice((0, 1, 2)))]


def changed_keys(values: dict[str, list[Any]], where: str, random: Random, count: int) -> list[Change]:
    return [Change(where, key, random.choice(values[key])) for key in random.sample(sorted(values), count)]
