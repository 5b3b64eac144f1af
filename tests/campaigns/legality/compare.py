"""Whether what `recipes check` said of a run and what became of it agree."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.campaigns.legality.case import Case
from tests.campaigns.legality.judge import Judgement
from tests.campaigns.legality.silent import silent_effect
from tests.campaigns.legality.tried import Outcome


@dataclass(frozen=True)
class Disagreement:
    """`kind` stays the same while a case shrinks; `what` says what happened."""

    kind: str
    what: str

    @property
    def signature(self) -> str:
        """Equal for disagreements that probably have the same cause."""
        return self.kind + re.sub(r"\d+", "0", self.what)


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
    (r"dtype", r".* another 16-bit type on a CPU", "only the built model has layers"),
]
# Advice that says before the start that another world or batch will train, and why it is no error.
ADVISED = {
    "single_engine_starts_one_process": "the user chose no YAML, and may launch two processes otherwise",
}
# Ends that no check can know: a training that diverges, and what a model passes between its layers.
_UNKNOWABLE = re.compile(
    r"the loss is (nan|inf)|weights are not numbers|underflow_overflow cannot look into this model"
)


def compare(case: Case, judgement: Judgement, outcome: Outcome) -> Disagreement | None:
    """None if check and reality agree."""
    return _legal(judgement, outcome) if judgement.legal else _refused(case, judgement, outcome)


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
    if judgement.advised & ADVISED.keys() or outcome.only_constructed:
        return None
    world, batch = outcome.record["world_size"], outcome.batch
    if (world, outcome.processes) != (judgement.world, judgement.world):
        what = f"check says {judgement.world} processes, run.json {world}, and {outcome.processes} trained"
        return Disagreement("legal, and another world", what)
    enough = outcome.seen[0]["examples"] >= judgement.batch  # otherwise there is no whole batch
    if enough and batch != judgement.batch:
        return Disagreement("legal, and another batch", f"check says {judgement.batch}, and {batch} examples trained")
    return None


def _refused(case: Case, judgement: Judgement, outcome: Outcome) -> Disagreement | None:
    if not outcome.finished or outcome.only_constructed:
        return None  # it fails, as check says, or might fail in a step that nobody takes
    unexplained = [rule for rule in judgement.errors if not silent_effect(rule, case, judgement, outcome)]
    if len(unexplained) < len(judgement.errors):
        return None  # something else than asked was trained
    said = "; ".join(str(problem) for rule in unexplained for problem in judgement.errors[rule])
    return Disagreement(f"refused by {', '.join(unexplained)}, and trains", said[:300])
