"""Draw random runs, and compare what `recipes check` says of them with what becomes of them.

    python -m tests.campaigns.legality --runs N --seed S [--workers K]

What check calls legal is trained for two steps; what it refuses is tried without the check. What is
refused mostly fails there, which needs no proof. Where it trains, each rule that refused it must be
in one of two tables: PROVEN_BY proves that something else trained than was asked; UNPROVEN lists
what two steps cannot show, and is counted and printed. All else is a disagreement, which is printed
with the shortest run that shows it. The same seed draws the same runs, whatever the number of
workers. Returns 1 if there was a disagreement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import re
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
from unittest import mock

from launch.data.columns import check_columns
from recipes.errors import Problem, UserError
from recipes.rules.check import problems_by_rule
from recipes.rules.probe import probe_in_child
from recipes.run import RunSpec, here, resolve, with_fit
from recipes.run.hardware import Hardware, read
from tests.campaigns.drawing import draw
from tests.campaigns.pool import results, scratch_folder
from tests.campaigns.runs import (
    FILES,
    SECONDS,
    YAML,
    Case,
    Outcome,
    described,
    flags,
    from_json,
    tried,
    variables,
    write,
    write_material,
)

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
        if rule in UNPROVEN:
            found.unproven[rule] = UNPROVEN[rule]
        elif rule in PROVEN_BY and (proof := PROVEN_BY[rule](Refused(rule, case, judgement, outcome, twin))):
            found.proven[rule] = proof
        else:
            wrong.append(rule)
    if wrong and (len(rules) == 1 or len(wrong) == len(rules)):  # others are tried on their own
        found.disagreement = f"refused by {', '.join(wrong)}, and trains"
        found.what = "; ".join(str(problem) for rule in wrong for problem in judgement.errors[rule])[:300]
    return found


# Mistakes that train.py may report although check called the run legal: (subject, message, why).
LATE = [
    (r"dataset_(train_split|test_split|text_field|label_field)", r"", "check reads no data"),
    (r"dataset_name", r"(?!there is no file)", "check reads no data"),
    (r"completion_only_loss|assistant_only_loss", r"(needs|row [\d,]+: has no)", "depends on the columns of the data"),
    (r"lora_target_modules", r"the model has no module", "only the built model has modules"),
    (r"model_name_or_path", r".* cannot be loaded as a \w+: We couldn't connect", "only the Hub knows its models"),
    (r"max_length", r"the data of", "depends on the length of the data"),
    (r"TrainingArguments", r"Your assigned backend mpi", "whether torch was built with it, only torch knows"),
    (r"packing", r".* see each other", "found by a forward pass of a small model"),
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


def _legal(judgement: Judgement, outcome: Outcome) -> Comparison:
    if outcome.code is None:
        return Comparison("legal, and hangs", outcome.last_words())
    if outcome.finished:
        return _another_batch(judgement, outcome)
    if outcome.mistake:
        return _known_too_late(outcome)
    if _UNKNOWABLE.search(outcome.output) and not outcome.traceback:
        return Comparison()
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


@dataclass(frozen=True)
class Refused:
    """A run that `rule` refuses, and that trains without the check.

    Its methods, and the functions below, are proofs: they say what else trained than was asked.
    Empty is no proof.
    """

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
        subjects = {problem.subject for problem in self.judgement.errors.get(self.rule, ())}
        others.append(self.case.without([change for change in self.case.changes if change.name in subjects]))
        if self.case.yaml:
            others.append(replace(self.case.without(self.case.of("yaml")), yaml="standard.yaml"))
        return "trains the same as without it" if any(map(self._trains_the_same, others)) else ""

    def is_as(self, setting: str, value: str) -> str:
        """With this legal value the same is trained."""
        kept = tuple(change for change in self.case.changes if change.name != setting)
        if kept == self.case.changes:
            return ""
        same = self._trains_the_same(replace(self.case, changes=kept).with_flags(**{setting: value}))
        return f"trains the same as with {value}" if same else ""

    def _trains_the_same(self, case: Case) -> bool:
        other = self.twin(case, self.rule)
        return other is not None and other.finished and other.trained == self.outcome.trained


Proof = Callable[[Refused], str]


def _batch_is_another(refused: Refused) -> str:
    asked = refused.judgement.run["global_batch_size"] if refused.judgement.run else 0
    trained = refused.outcome.batch
    return f"{trained} examples a step instead of {asked}" if trained != asked else ""


def _is_not_as_written(refused: Refused) -> str:
    """Unknown names are dropped, wrong values too, and the recipe may be another."""
    if said := _refused_by_parser(refused.case):
        return said
    recipe = [change.value for change in refused.case.changes if change.name == "recipe"]
    if recipe and refused.outcome.record["recipe"] not in (recipe[-1], recipe[-1][0]):
        return f"trains {refused.outcome.record['recipe']}"
    return _batch_is_another(refused) or refused.is_ignored()


def _refused_by_parser(case: Case) -> str:
    """The error of Hugging Face's own parser of these dataclasses."""
    from transformers import HfArgumentParser, TrainingArguments

    from recipes.flags import RunFlags

    classes, said = (TrainingArguments, RunFlags), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _, unknown = HfArgumentParser(classes, allow_abbrev=False).parse_known_args(flags(case))  # type: ignore[arg-type]
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    known = {field.name for cls in classes for field in dataclasses.fields(cls)}
    unknown += [change.name for change in case.of("config") if change.name not in known]
    return f"unknown: {' '.join(unknown)}" if unknown else ""


def _precision_is_another(refused: Refused) -> str:
    run, used = refused.judgement.run, refused.first["precision"]
    asked = "bf16" if run["bf16"] else "fp16" if run["fp16"] else "no"
    in_yaml = run.engine.mixed_precision
    if used == asked and run.explicit(asked):
        return ""
    return f"computes in {used}, although the run says {asked} and the YAML {in_yaml}"


def _world_is_another(refused: Refused) -> str:
    trained, asked = refused.outcome.processes, refused.judgement.run.world_size
    return f"{trained} processes instead of {asked}" if trained != asked else ""


def _optimizer_is_another(refused: Refused) -> str:
    asked, used = refused.judgement.run["optim"], refused.first["optimizer"]
    return f"{used} instead of {asked}" if "CPUAdam" in used and not asked.startswith("adamw_torch") else ""


def _compiles(refused: Refused) -> str:
    return "compiles" if refused.first["compiled"] and not refused.judgement.run["torch_compile"] else ""


def _has_too_few_examples(refused: Refused) -> str:
    return "the data fills no global batch" if refused.first["examples"] < refused.judgement.run.batch.total else ""


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
    "save_total_limit_is_in_range": lambda refused: "keeps them all" if refused.first["checkpoints"] else "",
    "global_batch_size_is_in_range": _batch_is_another,
    "num_train_epochs_is_in_range": lambda refused: "" if refused.first["steps"] else "trains nothing",
    "include_num_input_tokens_seen_is_in_range": lambda refused: refused.is_as("include_num_input_tokens_seen", "all"),
    "max_grad_norm_is_in_range": lambda refused: refused.is_as("max_grad_norm", "0"),
    "eval_delay_is_in_range": lambda refused: refused.is_as("eval_delay", "0"),
    "max_steps_is_in_range": Refused.is_ignored,
    "eval_steps_is_in_range": Refused.is_ignored,
    "save_steps_is_in_range": Refused.is_ignored,
    "early_stopping_patience_is_in_range": Refused.is_ignored,
    "nested_settings_are_known": Refused.is_ignored,
    "deepspeed_json_keys_are_known": Refused.is_ignored,
    "yaml_keys_are_known": Refused.is_ignored,
    "sections_are_read": Refused.is_ignored,
    "one_engine_is_asked_for": Refused.is_ignored,
    "packing_frees_the_padding": Refused.is_ignored,
    "classification_takes_rows_as_they_are": Refused.is_ignored,
    "a_training_trains": Refused.is_ignored,
}
UNPROVEN: dict[str, str] = {
    PROBE: "what DeepSpeed's JSON leaves out gets DeepSpeed's own default",
    "batch_size_is_not_searched": "the batch changes only where memory runs out",
    **dict.fromkeys(
        ("only_the_demonstration_has_no_data", "only_the_demonstration_has_no_model"), "the demonstration's is trained"
    ),
    "sequences_and_models_are_not_divided": "tp_size divides nothing: ranks compute the same examples",
    "adapters_need_trained_weights": "nothing but the adapters learns, on top of random weights",
    "fsdp2_shards_layer_by_layer": "a model below min_num_params is gathered whole; any real one fails",
    "a_language_model_is_a_decoder": "the loss falls because the model sees what it predicts",
    "sequences_fit_the_model": "rotary positions go on where the model knows none",
    "sixteen_bits_are_trained_by_a_stage": "Adam's first step is shorter than that of DDP",
    "batches_come_out_even": "ranks wait for each other only where the data does not divide",
    "label_smoothing_factor_is_in_range": "the labels' weights are negative",
    "lora_alpha_is_in_range": "the adapters are multiplied by 0",
    "lora_dropout_is_in_range": "the adapters see nothing",
    "weight_decay_is_in_range": "weights grow instead of decaying",
}


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
        key = (rule, re.sub(r"\d+", "0", small.as_json()))
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
    if len(case.changes) > 3:  # half of them at once
        middle = len(case.changes) // 2
        yield case.without(case.changes[:middle])
        yield case.without(case.changes[middle:])
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
    parser.add_argument("--case", metavar="JSON", help="try one case, as a disagreement prints it")
    options = parser.parse_args()
    started, counts, seen = time.monotonic(), Counter[str](), set[str]()
    unproven, early = Counter[str](), Counter[str]()
    with scratch_folder() as scratch:
        if options.case:
            return _alone(once(scratch, 0, from_json(options.case)))
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
                print(f"--case '{one.case.as_json()}'", flush=True)
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
