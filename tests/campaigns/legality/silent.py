"""Rules against settings that change a run silently, and what in the trained run proves it.

What check refuses mostly fails without it, which needs no proof. Where it trains, the rule must be
here: with a function of the trained run that says what differs from what was asked, or, where two
steps cannot show it, with the reason why it is refused nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.campaigns.legality.case import Case
from tests.campaigns.legality.judge import PARSING, PROBE, Judgement
from tests.campaigns.legality.tried import Outcome

RANGE = "_is_in_range"  # the end of the names of such rows
Proof = Callable[[Case, Judgement, Outcome], str]


def silent_effect(rule: str, case: Case, judgement: Judgement, outcome: Outcome) -> str:
    """What trained instead of what was asked; empty if it is what was asked."""
    if rule in BEYOND_TWO_STEPS:
        return BEYOND_TWO_STEPS[rule]
    proof = _out_of_range if rule.endswith(RANGE) else SHOWN_BY.get(rule)
    return proof(case, judgement, outcome) if proof else ""


def _another_batch(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    asked = judgement.run["global_batch_size"] if judgement.run else 0
    return f"{outcome.batch} examples a step instead of {asked}" if outcome.batch != asked else ""


def _as_written(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    """Unknown names are dropped, wrong values too, and the recipe may be another."""
    if outcome.refused_by_parser:
        return outcome.refused_by_parser
    if judgement.run and all("finite number" in problem.what for problem in judgement.run.problems):
        return "nan and inf are not numbers"
    if judgement.run and all("both are given" in problem.what for problem in judgement.run.problems):
        return "one of two values of the same setting is dropped"
    no_value = (" takes ", " is not one of its values")
    if judgement.run and all(
        any(words in f" {problem.what}" for words in no_value) for problem in judgement.run.problems
    ):
        return "what is no value of the setting is refused, whether this run reads it or not"
    recipe = [change.value for change in case.changes if change.name == "recipe"]
    if recipe and outcome.record["recipe"] not in (recipe[-1], recipe[-1][0]):
        return f"trains {outcome.record['recipe']}"
    return _another_batch(case, judgement, outcome)


def _another_precision(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    run = judgement.run
    asked = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
    used, in_yaml = outcome.seen[0]["precision"], run.engine.mixed_precision
    if used == asked and run.explicit(asked):
        return ""
    return f"computes in {used}, although the run says {asked} and the YAML {in_yaml}"


def _compiles(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    return "compiles" if outcome.seen[0]["compiled"] and not judgement.run["torch_compile"] else ""


def _another_world(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    trained = outcome.processes
    return f"{trained} processes instead of {judgement.world}" if trained != judgement.world else ""


def _out_of_range(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    """A value that is out of range must be one of those that are known to change a run."""
    subjects = {
        problem.subject for name, found in judgement.errors.items() if name.endswith(RANGE) for problem in found
    }
    proofs = [_VALUES.get(subject) for subject in sorted(subjects)]
    found = [proof(outcome) if callable(proof) else proof or "" for proof in proofs]
    return "; ".join(found) if all(found) else ""


def _batch_of_one(outcome: Outcome) -> str:
    return f"trains {outcome.batch} examples a step"


_VALUES: dict[str, str | Callable[[Outcome], str]] = {
    "save_total_limit": lambda outcome: "keeps them all" if outcome.seen[0]["checkpoints"] else "",
    "include_num_input_tokens_seen": "any other word counts as `all`",
    "eval_delay": "a negative delay means none",
    "eval_steps": "a negative number means logging_steps",
    "label_smoothing_factor": "the labels' weights are negative",
    "lora_alpha": "the adapters are multiplied by 0",
    "lora_dropout": "the adapters see nothing",
    "weight_decay": "weights grow instead of decaying",
    "max_grad_norm": "any number below 0 turns clipping off",
    "global_batch_size": _batch_of_one,
    "early_stopping_patience": "0 stops nothing early",
    "max_steps": "any number below 0 means num_train_epochs",
    "num_train_epochs": "0 epochs train nothing",
    "save_steps": "an interval of 0 steps means never, except at the end",
}


def _another_optimizer(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    asked, used = judgement.run["optim"], outcome.seen[0]["optimizer"]
    return f"{used} instead of {asked}" if "CPUAdam" in used and not asked.startswith("adamw_torch") else ""


def _too_few_examples(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    return "the data fills no global batch" if outcome.seen[0]["examples"] < judgement.batch else ""


def _left_out(case: Case, judgement: Judgement, outcome: Outcome) -> str:
    is_left_out = all(problem.what.startswith("is left out") for problem in judgement.errors[PROBE])
    return "DeepSpeed trains its own default for what the JSON leaves out" if is_left_out else ""


SHOWN_BY: dict[str, Proof] = {
    PARSING: _as_written,
    PROBE: _left_out,
    "yaml_precision_agrees_with_arguments": _another_precision,
    "yaml_compiles_what_the_arguments_do_not": _compiles,
    "compile_settings_compile": lambda case, judgement, outcome: "compiles" if outcome.seen[0]["compiled"] else "",
    "single_engine_starts_one_process": _another_world,
    "batches_are_not_split": _another_batch,
    "static_graph_needs_accumulation_one": _too_few_examples,
    "accumulation_is_said_once": _another_batch,
    "offload_needs_adamw": _another_optimizer,
    "a_training_trains": lambda *_: "it trains",
    "saving_the_best_needs_evaluation": lambda case, judgement, outcome: (
        "" if outcome.seen[0]["checkpoints"] else "nothing is saved"
    ),
    "classification_takes_rows_as_they_are": lambda *_: "classified rows are neither joined nor masked",
    "nested_settings_are_known": lambda *_: "nothing reads that key",
    "deepspeed_json_keys_are_known": lambda *_: "nothing reads that key",
    "yaml_keys_are_known": lambda *_: "nothing reads that key",
    "sections_are_read": lambda *_: "nothing reads that value",
    "one_engine_is_asked_for": lambda *_: "the engine of --deepspeed trains, and the launch asks for another",
    "packing_frees_the_padding": lambda *_: "rows are packed, and padding_free is dropped",
}
BEYOND_TWO_STEPS: dict[str, str] = {
    "batch_size_is_not_searched": "the batch changes only where memory runs out",
    "adapters_need_trained_weights": "nothing but the adapters learns, on top of random weights",
    "fsdp2_shards_layer_by_layer": "a model below min_num_params is gathered whole; any real one fails",
    "a_language_model_is_a_decoder": "the loss falls because the model sees what it predicts",
    "sequences_fit_the_model": "rotary positions go on where the model knows none",
    "sixteen_bits_are_trained_by_a_stage": "Adam's first step is shorter than that of DDP",
    "batches_come_out_even": "ranks wait for each other only where the data does not divide",
}
