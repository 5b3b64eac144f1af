"""Draw random runs, and compare what `recipes check` says of them with what becomes of them.

    python -m tests.campaigns.legality --runs N --seed S [--workers K]

What check calls legal is trained for two steps; what it refuses is tried without the check. What is
refused mostly fails there, which needs no proof. Where it trains, something else must have trained
than was asked, or each rule that refused it must be in UNPROVEN, which lists what two steps cannot
show; that is counted and printed. All else is a disagreement, which is printed with the shortest
run that shows it. The same seed draws the same runs, whatever the number of workers. Returns 1 if
there was a disagreement.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import yaml

from launch.data.columns import check_columns
from recipes import legal
from recipes.errors import Problem, UserError
from recipes.rules.check import problems_by_rule
from recipes.rules.probe import probe_in_child
from recipes.run import RunSpec, here, resolve, with_fit
from recipes.run.files import shipped
from recipes.run.hardware import Hardware, read
from tests.campaigns.runs import (
    DEEPSPEED_JSON,
    DEMONSTRATION,
    FILES,
    FSDP_JSON,
    OWN_RECIPE,
    REMOVED,
    SECONDS,
    YAML,
    Case,
    Change,
    Outcome,
    described,
    flags,
    results,
    scratch_folder,
    tried,
    variables,
    write,
    write_material,
)

# --- Drawing: a launch, a model and its data, flags that belong together, and any others ----------

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
    """A case at random. The same `random` draws the same case.

    Most are nearly right: what is wrong on its own, the tests try already.
    """
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


# How it is launched: some bring a recipe of their own, shard with FSDP2, share a model or its
# examples between processes, or find a launcher's variables in the environment.


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


# --- What check says ------------------------------------------------------------------------------

PARSING = "what is written"  # the errors that no rule reports: unknown names, wrong types, the batch
PROBE = "the probe"  # the errors of the libraries


@dataclass
class Judgement:
    """`errors` by the name of the rule that reports them; none if the run is legal. `advised` are
    the rules that only advise.
    """

    errors: dict[str, list[Problem]] = field(default_factory=dict)
    run: RunSpec | None = None
    advised: frozenset[str] = frozenset()

    @property
    def legal(self) -> bool:
        return not self.errors


def judge(case: Case) -> Judgement:
    """As `recipes check --deep` does, in the current folder, which must be the case's own: the
    probe judges what no rule refuses, in a child of this process, which has imported the libraries.

    torchrun and plain python are another launch than check expects: there train.py's own counts.
    """
    announced = {"RANK": "0", "WORLD_SIZE": str(case.processes)} if case.launcher == "torchrun" else {}
    try:
        place = here(
            case.processes,
            hardware=_Lifted(**vars(read())) if case.lifted else read(),
            accelerate_config=YAML if case.yaml else None,
            launched=case.launcher != "accelerate",
            environment={**os.environ, **variables(case), **announced},
        )
        run = with_fit(resolve(flags(case), place))
    except UserError as error:
        return Judgement({PARSING: list(error.problems)})
    found = [*((PARSING, problem) for problem in run.problems), *problems_by_rule(run)]
    found += [("columns", problem) for problem in check_columns(run)]
    errors: dict[str, list[Problem]] = {}
    for name, problem in found:
        if problem.severity == "error":
            errors.setdefault(name, []).append(problem)
    if not errors:
        with mock.patch.dict(os.environ, variables(case)):
            problems = probe_in_child(run)
        errors |= {PROBE: problems} if problems else {}
    return Judgement(errors, run, frozenset(name for name, problem in found if problem.severity != "error"))


class _Lifted(Hardware):
    can_shard = True  # type: ignore[assignment]


# --- Whether both agree ---------------------------------------------------------------------------

# A similar case and a rule -> what becomes of the case, None if the rule refuses it too.
Twin = Callable[[Case, str], Outcome | None]


@dataclass
class Comparison:
    """`disagreement` says of which kind it is, and stays the same while a case shrinks; `what` says
    what happened. `proven` and `unproven` are rules against a run that trained, and why.
    """

    disagreement: str = ""
    what: str = ""
    proven: dict[str, str] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)

    @property
    def signature(self) -> str:
        """Equal for disagreements that probably have the same cause. Empty without one."""
        return self.disagreement and self.disagreement + re.sub(r"\d+", "0", self.what)


def compare(judgement: Judgement, outcome: Outcome, case: Case, rules: list[str], twin: Twin) -> Comparison:
    """`rules` are those whose refusal has to be explained, of all that refuse the run."""
    if judgement.legal:
        return _legal(judgement, outcome)
    found, wrong = Comparison(), []
    if not outcome.finished:
        return found  # it fails, as check says
    for rule in rules:
        if proof := what_else_trained(rule, case, judgement, outcome, twin):
            found.proven[rule] = proof
        elif why := taken_at_its_word(rule, judgement.errors.get(rule, []), case):
            found.unproven[rule] = why
        else:
            wrong.append(rule)
    if wrong and (len(rules) == 1 or len(wrong) == len(rules)):  # others are tried on their own
        found.disagreement = f"refused by {', '.join(wrong)}, and trains"
        found.what = "; ".join(str(problem) for rule in wrong for problem in judgement.errors[rule])[:300]
    return found


# Mistakes that train.py may report although check called the run legal: (subject, message, why).
LATE = [
    (r"dataset_(train|test)_split", r".*(nothing to learn|is empty)", "check reads columns, no rows"),
    (r"problem_type", r".*(holds one label a row|holds other values)", "check reads columns, no rows"),
    (r"(completion|assistant)_only_loss", r"(row \d+: the row has no|.*\bhas text)", "check reads columns, no rows"),
    (r"lora_target_modules", r"the model has no module", "only the built model has modules"),
    (r"model_name_or_path", r"models/nowhere .*: huggingface.co cannot be reached", "only the Hub knows its models"),
    (r"max_length", r"the data of", "depends on the length of the data"),
    (r"TrainingArguments|ddp_backend", r"Your assigned backend mpi", "only torch knows whether it was built with it"),
    (r"packing", r".* see each other", "found by a forward pass of a small model"),
    (r"fsdp_config", r"transformer_layer_cls_to_wrap: .* is not a part of", "only the model's class has layers"),
]
# Advice that says before the start that another world will train: the user chose no YAML.
ADVISED = {"single_engine_starts_one_process"}
# Ends that no check can know: a training that diverges.
_UNKNOWABLE = re.compile(r"the loss is (nan|inf)|weights are NaN or infinite")


def _legal(judgement: Judgement, outcome: Outcome) -> Comparison:
    if outcome.code is None:
        return Comparison("legal, and hangs", outcome.last_words())
    if outcome.finished:
        return _another_batch(judgement, outcome)
    if outcome.mistake:
        return _known_too_late(outcome)
    if _UNKNOWABLE.search(outcome.output) and not outcome.traceback:
        return Comparison()
    if "mixed dtype (CPU)" in outcome.output:
        return Comparison()  # only a CPU cannot mix two 16-bit types, and nobody trains so on a CPU
    return Comparison("legal, and fails", f"exit code {outcome.code}: {outcome.last_words()}")


def _known_too_late(outcome: Outcome) -> Comparison:
    found = re.findall(r"^error +([\w.]+): (.*)", outcome.output, flags=re.M)
    for subject, what in found:
        if not any(re.fullmatch(name, subject) and re.match(message, what) for name, message, _ in LATE):
            return Comparison("legal, and refused by train.py", f"{subject}: {what.partition(' (')[0][:200]}")
    return Comparison() if found else Comparison("legal, and refused by train.py", outcome.last_words())


def _another_batch(judgement: Judgement, outcome: Outcome) -> Comparison:
    if judgement.advised & ADVISED or judgement.run is None:
        return Comparison()
    world, batch = judgement.run.world_size, judgement.run.batch.total
    if (outcome.record["world_size"], outcome.processes) != (world, world):
        what = f"check says {world} processes, run.json {outcome.record['world_size']}, {outcome.processes} trained"
        return Comparison("legal, and another world", what)
    enough = outcome.seen[0]["examples"] >= batch  # otherwise there is no whole batch
    if enough and outcome.batch != batch:
        return Comparison("legal, and another batch", f"check says {batch}, and {outcome.batch} examples trained")
    return Comparison()


# --- Refused runs that train ----------------------------------------------------------------------


def what_else_trained(rule: str, case: Case, judgement: Judgement, outcome: Outcome, twin: Twin) -> str:
    """The difference of a run that `rule` refuses, and that trains without the check, from what was
    asked; also that it is the same without what the rule is about. Empty if nothing shows either.
    """
    run, first, record = judgement.run, outcome.seen[0], outcome.record
    recipe = [change.value for change in case.changes if change.name == "recipe"]
    if recipe and record["recipe"] not in (recipe[-1], recipe[-1][0]):
        return f"trains {record['recipe']}"
    if rule.startswith("only_the_demonstration_has_no_"):
        name = "dataset_name" if rule.endswith("data") else "model_name_or_path"
        return "" if record["settings"][name]["value"] else f"trains the demonstration's, without {name}"
    if run is not None:
        precision = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
        asked = {
            "examples a step": (run["global_batch_size"], outcome.batch),
            "processes": (run.world_size, outcome.processes),
            "precision": (precision, first["precision"]),
            "compiled": (bool(run["torch_compile"]), first["compiled"]),
        }
        different = [f"{name}: {used} instead of {wanted}" for name, (wanted, used) in asked.items() if wanted != used]
        if "CPUAdam" in first["optimizer"] and not run["optim"].startswith("adamw_torch"):
            different.append(f"{first['optimizer']} instead of {run['optim']}")
        if different:
            return "; ".join(different)
    if not first["steps"] or (rule == "saving_the_best_needs_evaluation" and not first["checkpoints"]):
        return "nothing is trained, or nothing saved"
    claims = any(_NO_EFFECT.search(f"{one.what} {one.fix}") for one in judgement.errors.get(rule, ()))
    return "trains the same as without it" if claims and _is_ignored(rule, case, judgement, outcome, twin) else ""


def _is_ignored(rule: str, case: Case, judgement: Judgement, outcome: Outcome, twin: Twin) -> bool:
    """True if without the refused setting exactly the same is trained, saved and evaluated."""
    others = [case.without([change]) for change in case.changes]
    subjects = {problem.subject for problem in judgement.errors.get(rule, ())}
    others.append(case.without([change for change in case.changes if change.name.rpartition(".")[2] in subjects]))
    if case.yaml:
        others.append(replace(case.without(case.of("yaml")), yaml="standard.yaml"))
    found = (twin(other, rule) for other in others)
    return any(other and other.finished and other.trained == outcome.trained for other in found)


# Messages of rules against a setting that is on, and that the run does not read.
_NO_EFFECT = re.compile(r"ignored|always trains|drops it")

# What two tiny steps cannot show: rule -> the refused values, with which its messages begin. Beside
# each rule, a test shows the real failure.
SHOWN = {
    "include_num_input_tokens_seen_is_in_range": "some|maybe",
    "label_smoothing_factor_is_in_range": "-0.1|2",
    "lora_alpha_is_in_range": "0",
    "lora_dropout_is_in_range": "-0.1|1",
    "save_total_limit_is_in_range": "0|-1",
    "weight_decay_is_in_range": "-0.1",
} | dict.fromkeys((
    "a_language_model_is_a_decoder adapters_need_trained_weights batch_size_is_not_searched batches_come_out_even "
    "fsdp2_shards_layer_by_layer sequences_and_models_are_not_divided sixteen_bits_are_trained_by_a_stage "
    "static_graph_needs_accumulation_one the_mode_fits_the_metric"
).split(), "")  # fmt: skip


def taken_at_its_word(rule: str, problems: list[Problem], case: Case) -> str:
    """The reason why a refusal of a run that trains needs no proof; empty if it needs one."""
    if rule in SHOWN and all(re.match(rf"({SHOWN[rule]})( |$)", one.what) or not SHOWN[rule] for one in problems):
        return "shown by a test"
    if rule == PARSING and all(_is_no_value(one.subject.removeprefix("--"), case) for one in problems):
        return "a misspelt name, or a value of another type"
    return ""


def _is_no_value(name: str, case: Case) -> bool:
    """True if `name` is no setting, or if the case gives it a word that is wrong for its type."""
    known = legal.settings().get(name)
    wrong = " ".join(_VALUES["wrong"].get(kind, "") for kind in known.types).split() if known else []
    values = [one.value for one in case.changes if one.name == name]
    words = [word for value in values for word in (value if isinstance(value, list) else [value])]
    return known is None or any(str(word) in wrong or (known.choices and word not in known.choices) for word in words)


# --- One run --------------------------------------------------------------------------------------

_reduced: set[tuple[str, str]] = set()  # the rules that this process has tried on their own, and how
_shrunk: set[str] = set()  # the disagreements that it has made small


@dataclass
class Result:
    """What became of a run. `rule` is that which refuses it if it was reduced to one."""

    number: int
    case: Case
    judgement: Judgement
    outcome: Outcome
    comparison: Comparison
    rule: str = ""


def run(scratch: Path, seed: str, number: int) -> list[Result]:
    """Draw a run and try it; if it is refused, also the smallest run that each rule refuses: beside
    a refusal that is explained, a wrong one would not be seen.
    """
    case = draw(Random(f"{seed}-{number}"))
    found = [attempt(scratch, number, case)]
    for rule in {} if found[0].comparison.disagreement else found[0].judgement.errors:
        small = shrink(case, lambda other, rule=rule: rule in _judged(scratch, other).errors)
        key = (rule, repr(small))
        if key not in _reduced:
            _reduced.add(key)
            found.append(attempt(scratch, number, small, rule))
    return found


def attempt(scratch: Path, number: int, case: Case, rule: str = "") -> Result:
    """Judge and try a case, and if both disagree, find the smallest that does.

    With a `rule` only its refusal counts, whatever else explains the run.
    """
    result = once(scratch, number, case, rule)
    kind, signature = result.comparison.disagreement, result.comparison.signature
    if kind and signature not in _shrunk:
        _shrunk.add(signature)
        small = shrink(case, lambda other: once(scratch, number, other, rule).comparison.disagreement == kind)
        return once(scratch, number, small, rule)
    return result


def once(scratch: Path, number: int, case: Case, rule: str = "") -> Result:
    """What check says of a case, what becomes of it, and whether the two disagree."""
    _in_new_folder(scratch, case)
    try:
        judgement = judge(case)
    except Exception:
        said = traceback.format_exc()
        failed = Comparison("check itself fails", said.strip().splitlines()[-1])
        return Result(number, case, Judgement(), Outcome(1, said), failed)
    outcome = tried(case, checked=judgement.legal)
    if outcome.code is None:  # perhaps the machine is busy
        _in_new_folder(scratch, case)
        outcome = tried(case, checked=judgement.legal, seconds=3 * SECONDS)
    rules = [rule] if rule in judgement.errors else list(judgement.errors)
    comparison = compare(judgement, outcome, case, rules, partial(_twin, scratch))
    return Result(number, case, judgement, outcome, comparison, rule)


def _twin(scratch: Path, case: Case, rule: str) -> Outcome | None:
    judgement = _judged(scratch, case)
    return None if rule in judgement.errors else tried(case, checked=judgement.legal)


def _judged(scratch: Path, case: Case) -> Judgement:
    _in_new_folder(scratch, case)
    try:
        return judge(case)
    except Exception:
        return Judgement()


def _in_new_folder(scratch: Path, case: Case) -> None:
    """Go to a new folder with the case's files."""
    own = scratch / f"worker-{os.getpid()}"
    shutil.rmtree(own / "case", ignore_errors=True)
    write(case, own / "case", write_material(own / "material"))
    os.chdir(own / "case")


def shrink(case: Case, remains: Callable[[Case], bool]) -> Case:
    """The case with one thing after another dropped, as long as `remains` of it is true."""
    while smaller := next((other for other in _smaller(case) if remains(other)), None):
        case = smaller
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one thing dropped or made plain."""
    for where in (*FILES, "variable", "flag"):  # all of a file at once
        if other := case.of(where):
            yield case.without(other)
    for change in case.changes:
        yield case.without([change])
    plain = Case()
    if not case.of("yaml"):
        if case.launcher != plain.launcher:
            yield replace(case, launcher=plain.launcher, processes=None, yaml="")
        if case.yaml not in ("", "standard.yaml"):
            yield replace(case, yaml="standard.yaml")
    if case.processes == 2:
        yield replace(case, processes=1)
    if (case.model, case.data) != (plain.model, plain.data):
        yield replace(case, model=plain.model, data=plain.data)


# --- All of them ----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.legality")
    parser.add_argument("--runs", type=int, default=100, help="how many runs to draw [100]")
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same runs [0]")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--case", metavar="CASE", help="try one case, as a disagreement prints it")
    options = parser.parse_args()
    started, counts, seen = time.monotonic(), Counter[str](), set[str]()
    unproven, early = Counter[str](), Counter[str]()
    with scratch_folder() as scratch:
        if options.case:
            return _alone(once(scratch, 0, eval(options.case)))
        work = partial(run, scratch, options.seed)
        for one in chain.from_iterable(results(work, range(options.runs), options.workers)):
            found, legal, finished = one.comparison, one.judgement.legal, one.outcome.finished
            counts["reduced" if one.rule else "legal" if legal else "refused"] += 1
            counts["trained"] += legal and finished
            counts["proven"] += len(found.proven)
            counts["disagreements"] += bool(found.disagreement)
            unproven.update(f"{rule}: {why}" for rule, why in found.unproven.items())
            if legal and not finished and not found.disagreement:
                early[re.sub(r"\d+", "0", one.outcome.last_words())[:110]] += 1
            if found.disagreement and found.signature not in seen:
                seen.add(found.signature)
                print(f"\n=== run {one.number}: {found.disagreement}\n{found.what}\n{described(one.case)}")
                print(f"--case {shlex.quote(repr(one.case))}", flush=True)
    for title, counted in (
        ("legal runs that ended early, as check cannot know", early),
        ("refusals of runs that train, taken at their word", unproven),
    ):
        if counted:
            print(f"{title}:", *(f"{count} x {text}" for text, count in counted.most_common()), sep="\n  ")
    print(
        f"{counts['legal'] + counts['refused']} runs drawn: {counts['legal']} legal, of which {counts['trained']} "
        f"trained to the end; {counts['refused']} refused and tried without the check, and {counts['reduced']} "
        f"reduced to one rule: {counts['proven']} refusals proven, {unproven.total()} unproven; "
        f"{counts['disagreements']} disagreements ({len(seen)} different) "
        f"({time.monotonic() - started:.0f} s, seed {options.seed})"
    )
    return int(bool(seen))


def _alone(result: Result) -> int:
    print(described(result.case))
    for rule, problems in result.judgement.errors.items():
        print(f"check: {rule}: " + "; ".join(map(str, problems)))
    print(result.outcome.output, result.comparison.proven, result.comparison.unproven, sep="\n")
    print(result.comparison.disagreement or "check and reality agree")
    return int(bool(result.comparison.disagreement))


if __name__ == "__main__":
    sys.exit(main())
