"""Whether what `recipes check` said of a run and what became of it agree.

What check refuses mostly fails without the check, which needs no proof. Where it trains, each rule
that refused it must be here: with a proof that something else trained than was asked, or, where two
steps cannot show it, among UNPROVEN. Those are counted and printed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.campaigns.legality.case import Case, Change
from tests.campaigns.legality.judge import PARSING, PROBE, Judgement
from tests.campaigns.legality.tried import Outcome

# A similar case and a rule -> what becomes of the case, None if the rule refuses it too.
Twin = Callable[[Case, str], Outcome | None]


@dataclass(frozen=True)
class Disagreement:
    """`kind` stays the same while a case shrinks; `what` says what happened."""

    kind: str
    what: str

    @property
    def signature(self) -> str:
        """Equal for disagreements that probably have the same cause."""
        return self.kind + re.sub(r"\d+", "0", self.what)


@dataclass
class Comparison:
    """`proven` and `unproven` are rules against a run that trained, with what shows them right."""

    disagreement: Disagreement | None = None
    proven: dict[str, str] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)


def compare(judgement: Judgement, outcome: Outcome, case: Case, rules: list[str], twin: Twin) -> Comparison:
    """`rules` are those whose refusal has to be explained, of all that refuse the run."""
    if judgement.legal:
        return Comparison(_legal(judgement, outcome))
    found = Comparison()
    if not outcome.finished:
        return found  # it fails, as check says
    wrong = []
    for rule in rules:
        if rule in UNPROVEN:
            found.unproven[rule] = UNPROVEN[rule]
        elif proof := _proof(rule, Refused(rule, case, judgement, outcome, twin)):
            found.proven[rule] = proof
        else:
            wrong.append(rule)
    if wrong and (len(rules) == 1 or len(wrong) == len(rules)):  # others are tried on their own
        said = "; ".join(str(problem) for rule in wrong for problem in judgement.errors[rule])
        found.disagreement = Disagreement(f"refused by {', '.join(wrong)}, and trains", said[:300])
    return found


# --- Legal runs -----------------------------------------------------------------------------------

# Mistakes that train.py may report although check called the run legal: (subject, message, why).
LATE = [
    (r"dataset_(train_split|test_split|text_field|label_field)", r"", "check reads no data"),
    (r"dataset_name", r"(?!there is no file)", "check reads no data"),
    (r"completion_only_loss|assistant_only_loss", r"needs", "depends on the columns of the data"),
    (r"lora_target_modules", r"the model has no module", "only the built model has modules"),
    (r"model_name_or_path", r".* nor a model that can be read from the Hub", "only the Hub knows its models"),
    (r"max_length", r"the data of", "depends on the length of the data"),
    (r"TrainingArguments", r"Your assigned backend mpi", "whether torch was built with it, only torch knows"),
    (r"padding_free|packing", r".* see each other", "found by a forward pass of a small model"),
    (r"eval_use_gather_object", r"gathers objects", "check does not know whether a launcher starts the one process"),
    (r"fsdp_config", r"transformer_layer_cls_to_wrap: .* is not a part of", "only the model's class has layers"),
    (r"dtype", r".* another 16-bit type on a CPU", "only the built model has layers"),
]
# Advice that says before the start that another world will train: the user chose no YAML.
ADVISED = {"single_engine_starts_one_process"}
# Ends that no check can know: a training that diverges, and what a model passes between its layers.
_UNKNOWABLE = re.compile(
    r"the loss is (nan|inf)|weights are not numbers|underflow_overflow cannot look into this model"
)


def _legal(judgement: Judgement, outcome: Outcome) -> Disagreement | None:
    if outcome.code is None:
        return Disagreement("legal, and hangs", outcome.last_words())
    if outcome.finished:
        return _another_batch(judgement, outcome)
    if outcome.mistake:
        return _known_too_late(outcome)
    if _UNKNOWABLE.search(outcome.output) and not outcome.traceback:
        return None
    return Disagreement("legal, and fails", f"exit code {outcome.code}: {outcome.last_words()}")


def _known_too_late(outcome: Outcome) -> Disagreement | None:
    found = re.findall(r"^error +([\w.]+): (.*)", outcome.output, flags=re.M)
    for subject, what in found:
        if not any(re.fullmatch(name, subject) and re.match(message, what) for name, message, _ in LATE):
            return Disagreement("legal, and refused by train.py", f"{subject}: {what.partition(' (')[0][:200]}")
    return None if found else Disagreement("legal, and refused by train.py", outcome.last_words())


def _another_batch(judgement: Judgement, outcome: Outcome) -> Disagreement | None:
    if judgement.advised & ADVISED:
        return None
    world, batch = outcome.record["world_size"], outcome.batch
    if (world, outcome.processes) != (judgement.world, judgement.world):
        what = f"check says {judgement.world} processes, run.json {world}, and {outcome.processes} trained"
        return Disagreement("legal, and another world", what)
    enough = outcome.seen[0]["examples"] >= judgement.batch  # otherwise there is no whole batch
    if enough and batch != judgement.batch:
        return Disagreement("legal, and another batch", f"check says {judgement.batch}, and {batch} examples trained")
    return None


# --- Refused runs that train ----------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A run that `rule` refuses, and that trains without the check."""

    rule: str
    case: Case
    judgement: Judgement
    outcome: Outcome
    twin: Twin

    @property
    def first(self) -> dict:
        return self.outcome.seen[0]

    def is_ignored(self) -> str:
        """Without the refused setting exactly the same is trained, saved and evaluated."""
        others = [self.case.without([change]) for change in self.case.changes]
        if self.case.yaml:
            others.append(replace(self.case.without(self.case.of("yaml")), yaml="standard.yaml"))
        same = any(self._trains_the_same(other) for other in others)
        return "trains the same as without it" if same else ""

    def is_as(self, setting: str, value: str) -> str:
        """With this legal value the same is trained."""
        others = [replace(change, value=[value]) for change in self.case.changes if change.name == setting]
        for change in others:
            kept = [one for one in self.case.changes if one.name != setting]
            if self._trains_the_same(replace(self.case, changes=(*kept, Change("flag", setting, change.value)))):
                return f"trains the same as with {value}"
        return ""

    def _trains_the_same(self, case: Case) -> bool:
        other = self.twin(case, self.rule)
        return other is not None and other.finished and other.trained == self.outcome.trained


Proof = Callable[[Refused], str]
RANGE = "_is_in_range"  # the end of the names of such rows


def _proof(rule: str, refused: Refused) -> str:
    return PROVEN_BY[rule](refused) if rule in PROVEN_BY else ""


def _batch_is_another(refused: Refused) -> str:
    asked = refused.judgement.run["global_batch_size"] if refused.judgement.run else 0
    trained = refused.outcome.batch
    return f"{trained} examples a step instead of {asked}" if trained != asked else ""


def _is_not_as_written(refused: Refused) -> str:
    """Unknown names are dropped, wrong values too, and the recipe may be another."""
    if refused.outcome.refused_by_parser:
        return refused.outcome.refused_by_parser
    recipe = [change.value for change in refused.case.changes if change.name == "recipe"]
    if recipe and refused.outcome.record["recipe"] not in (recipe[-1], recipe[-1][0]):
        return f"trains {refused.outcome.record['recipe']}"
    return _batch_is_another(refused) or refused.is_ignored()


def _precision_is_another(refused: Refused) -> str:
    run, used = refused.judgement.run, refused.first["precision"]
    asked = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
    in_yaml = run.engine.mixed_precision
    if used == asked and run.explicit(asked):
        return ""
    return f"computes in {used}, although the run says {asked} and the YAML {in_yaml}"


def _world_is_another(refused: Refused) -> str:
    trained, asked = refused.outcome.processes, refused.judgement.world
    return f"{trained} processes instead of {asked}" if trained != asked else ""


def _optimizer_is_another(refused: Refused) -> str:
    asked, used = refused.judgement.run["optim"], refused.first["optimizer"]
    return f"{used} instead of {asked}" if "CPUAdam" in used and not asked.startswith("adamw_torch") else ""


def _compiles(refused: Refused) -> str:
    return "compiles" if refused.first["compiled"] and not refused.judgement.run["torch_compile"] else ""


def _has_too_few_examples(refused: Refused) -> str:
    return "the data fills no global batch" if refused.first["examples"] < refused.judgement.batch else ""


PROVEN_BY: dict[str, Proof] = {
    PARSING: _is_not_as_written,
    "yaml_precision_agrees_with_arguments": _precision_is_another,
    "yaml_compiles_what_the_arguments_do_not": _compiles,
    "compile_settings_compile": lambda refused: "compiles" if refused.first["compiled"] else "",
    "single_engine_starts_one_process": _world_is_another,
    "batches_are_not_split": _batch_is_another,
    "accumulation_is_said_once": _batch_is_another,
    "static_graph_needs_accumulation_one": _has_too_few_examples,
    "offload_needs_adamw": _optimizer_is_another,
    "saving_the_best_needs_evaluation": lambda refused: "" if refused.first["checkpoints"] else "nothing is saved",
    f"save_total_limit{RANGE}": lambda refused: "keeps them all" if refused.first["checkpoints"] else "",
    f"global_batch_size{RANGE}": _batch_is_another,
    f"num_train_epochs{RANGE}": lambda refused: "" if refused.first["steps"] else "trains nothing",
    f"include_num_input_tokens_seen{RANGE}": lambda refused: refused.is_as("include_num_input_tokens_seen", "all"),
    f"max_steps{RANGE}": lambda refused: refused.is_as("max_steps", "-1"),
    f"max_grad_norm{RANGE}": lambda refused: refused.is_as("max_grad_norm", "0"),
    f"eval_delay{RANGE}": lambda refused: refused.is_as("eval_delay", "0"),
    **{
        f"{name}{RANGE}": Refused.is_ignored
        for name in "eval_steps early_stopping_patience max_steps save_steps".split()
    },
    **dict.fromkeys(
        (
            f"eval_steps{RANGE}",
            f"early_stopping_patience{RANGE}",
            f"save_steps{RANGE}",
            "nested_settings_are_known",
            "deepspeed_json_keys_are_known",
            "yaml_keys_are_known",
            "sections_are_read",
            "one_engine_is_asked_for",
            "packing_frees_the_padding",
            "classification_takes_rows_as_they_are",
            "a_training_trains",
        ),
        Refused.is_ignored,
    ),
}
UNPROVEN: dict[str, str] = {
    PROBE: "what DeepSpeed's JSON leaves out gets DeepSpeed's own default",
    "batch_size_is_not_searched": "the batch changes only where memory runs out",
    **dict.fromkeys(
        ("only_the_demonstration_has_no_data", "only_the_demonstration_has_no_model"), "the demonstration's is trained"
    ),
    "adapters_need_trained_weights": "nothing but the adapters learns, on top of random weights",
    "fsdp2_shards_layer_by_layer": "a model below min_num_params is gathered whole; any real one fails",
    "a_language_model_is_a_decoder": "the loss falls because the model sees what it predicts",
    "sequences_fit_the_model": "rotary positions go on where the model knows none",
    "sixteen_bits_are_trained_by_a_stage": "Adam's first step is shorter than that of DDP",
    "batches_come_out_even": "ranks wait for each other only where the data does not divide",
    f"label_smoothing_factor{RANGE}": "the labels' weights are negative",
    f"lora_alpha{RANGE}": "the adapters are multiplied by 0",
    f"lora_dropout{RANGE}": "the adapters see nothing",
    f"weight_decay{RANGE}": "weights grow instead of decaying",
}
