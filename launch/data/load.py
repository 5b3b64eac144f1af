"""Data for a run: read, tokenized by its columns, and checked before a single step is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening

from launch.data.batches import UNKNOWN, Example, Pad, Stack
from launch.data.labels import Labelled, labelled, recognise
from launch.data.mixture import Source, evaluated, figures, mixed, note_on, of_parts, tokens_of_parts
from launch.data.packing import Cut, Joined, Packs, in_rows, reach
from launch.data.sources import unread_files
from launch.data.streams import WINDOW, Stream, open_part, readers_of, stream_of
from launch.data.tokens import lengths_of, of_examples
from launch.host.world import World
from recipes.errors import UserError, mistake, plural
from recipes.mixture import title
from recipes.run import RunSpec, Settings

Rows = Cut | Packs | Joined | Labelled


@dataclass
class Data:
    """What Trainer needs, and a description for a person.

    `labels` are the names of a classifier's outputs and `problem_type` what it learns of them, None
    for language models. `commit` is the Hub's, of data from there; None if unknown.
    """

    train: Rows | Stream
    eval: Rows | None
    collator: Callable[[list[Example]], dict[str, torch.Tensor]]
    description: str
    labels: list[str] | None = None
    commit: str | None = None
    problem_type: str | None = None

    def collator_for(self, attention: str | None) -> Callable[[list[Example]], dict[str, torch.Tensor]]:
        """The collator for the model's attention: Flash is told where examples begin."""
        if "flash" not in (attention or ""):
            return self.collator
        if isinstance(self.train, Stream) and "position_ids" in self.train.longest:  # not in joined rows
            return Stack(UNKNOWN)
        if not isinstance(self.train, Packs):
            return self.collator
        packs = [self.train, self.eval] if isinstance(self.eval, Packs) else [self.train]
        return Stack(max(rows.most_examples for rows in packs))

    @property
    def examples(self) -> int:
        """How many there are to train on; 0 if unknown."""
        return 0 if isinstance(self.train, Stream) else len(self.train or ())

    def require_same(self, world: World) -> None:
        """Each process asks the Hub for itself. Raises `UserError` on one that got another commit
        than rank 0.
        """
        commit = world.decide(lambda: self.commit)
        if commit and self.commit and commit != self.commit:
            what = f"has changed on the Hub while the processes started: rank 0 reads {commit}, this one {self.commit}"
            raise mistake("dataset_name", what, "the same command again")


def load_data(run: RunSpec, tokenizer, classes: Sequence[str] = ()) -> Data:
    """The run's data, ready to train on. Raises `UserError` for anything the user can correct.

    It may take hours: one process of each node tokenizes, and the others wait. So it is to be
    called before a process group is joined, whose time-outs would end them. `classes` are the names
    that the model was trained to tell apart, in its order.
    """
    if run["dataset_streaming"]:
        return _streamed(run, tokenizer)
    if run["task"] == "sequence_classification":
        return _classification(run, tokenizer, classes)
    return _causal_lm(run, tokenizer)


def repeated_longest(rows: Rows | Stream, count: int) -> torch.utils.data.Dataset:
    """The longest example of the data, `count` times: it takes the most memory. Of a stream, the
    longest that it may have.
    """
    if isinstance(rows, Stream):
        return torch.utils.data.Subset([rows.longest], [0] * count)  # type: ignore[arg-type]
    longest = 0 if isinstance(rows, (Packs, Joined)) else int(lengths_of(rows.examples).argmax())
    return torch.utils.data.Subset(rows, [longest] * count)


# --- Language models -----------------------------------------------------------------------------


def _causal_lm(run: RunSpec, tokenizer) -> Data:
    found = tokens_of_parts(run, tokenizer)
    flag = "dataset_train_split"
    sources = [Source(str(part), part.weight, _learnable(run, tokens.train, flag)) for part, tokens in found]
    rows = _in_rows(run, tokenizer, mixed(sources), flag)
    notes = [note_on(run, tokenizer, part, tokens.columns, tokens.kind) for part, tokens in found]
    left_out = sum(len(tokens.train) for _, tokens in found) - sum(len(source.train) for source in sources)
    held_out, evaluation = _evaluation(run, tokenizer, [tokens.eval for _, tokens in found])
    text = _described(run, _counts(rows, run["max_length"], left_out), figures(sources, run["max_length"]), notes)
    commit = _commits(tokens.commit for _, tokens in found)
    return Data(rows, held_out, _collator(run, tokenizer), text + evaluation, commit=commit)


def _streamed(run: RunSpec, tokenizer) -> Data:
    opened = of_parts(run, lambda own, part: open_part(own, part, tokenizer))
    parts, evals, notes, commits = zip(*(found for _, found in opened), strict=True)
    stream = stream_of(run, tokenizer, parts)
    held_out, evaluation = _evaluation(run, tokenizer, evals)
    order = f"shuffled within {WINDOW:,} rows" if stream.shuffles else "in their order"
    packing = f", packed into sequences of {run['max_length']:,} tokens" if run["packing"] else ""
    dealt = f"{plural(sum(stream.shards), 'shard')} for {plural(readers_of(run), 'reader')}"
    lines = [
        f"{part.source}: {stream.share(number):.1%} of all, {plural(shards, 'shard')}"
        for number, (part, shards) in enumerate(zip(parts, stream.shards, strict=True))
    ]
    text = _described(run, f"streamed: {dealt}, {order}{packing}", lines, notes)
    return Data(stream, held_out, _collator(run, tokenizer), text + evaluation, commit=_commits(commits))


def _evaluation(run: RunSpec, tokenizer, tokens: Sequence[Dataset | None]) -> tuple[Rows | None, str]:
    """The examples of all parts that have any to evaluate on, and the line that describes them."""
    flag = "dataset_test_split"
    examples = evaluated(run, [None if part is None else _learnable(run, part, flag) for part in tokens])
    if examples is None:
        return None, ""
    rows = _in_rows(run, tokenizer, examples, flag)
    return rows, _held_out(run, rows, sum(len(part or ()) for part in tokens) - len(examples))


def _commits(commits: Iterable[str | None]) -> str | None:
    return ", ".join(filter(None, commits)) or None


def _collator(run: Settings, tokenizer) -> Callable:
    if run["packing"]:
        return Stack()
    if run["padding_free"]:
        return DataCollatorWithFlattening()
    # Padding is masked, so any token works.
    return Pad(tokenizer.pad_token_id or 0, run["max_length"])


def _learnable(run: Settings, tokens: Dataset, flag: str) -> Dataset:
    """The examples without those that have nothing to learn."""
    first = of_examples(tokens, tokens.data.column("first_learned").to_numpy())
    examples = tokens.select(np.flatnonzero(first < reach(run)))
    if not len(examples):
        raise _nothing_to_learn(run, flag)
    return examples


def _in_rows(run: Settings, tokenizer, examples: Dataset, flag: str) -> Cut | Packs | Joined:
    rows = in_rows(run, examples, tokenizer.pad_token_id or 0)
    if len(rows):
        return rows
    total, length = int(lengths_of(examples).sum()), run["max_length"]
    if total >= length:
        raise _nothing_to_learn(run, flag)
    what = f"the data of --{flag} has {total:,} tokens, too few for one packed sequence of {length:,}"
    raise mistake("max_length", what, f"--max_length {total} or less, or --packing false")


def _nothing_to_learn(run: Settings, flag: str) -> UserError:
    return mistake(
        flag,
        f"no example has anything to learn within {run['max_length']:,} tokens: "
        "all labels are masked, and the loss would be nan",
        "texts, completions or assistant messages that are not empty, or a larger --max_length",
    )


# --- Classification ------------------------------------------------------------------------------


def _classification(run: RunSpec, tokenizer, classes: Sequence[str]) -> Data:
    if not run["dataset_name"]:
        raise mistake("dataset_name", "is missing: classification needs labelled texts", "--dataset_name FILE_OR_ID")
    ((part, found),) = tokens_of_parts(run, tokenizer)
    target = recognise(run, found.train, classes)
    train = labelled(run, found.train, target, "dataset_train_split")
    held_out = None if found.eval is None else labelled(run, found.eval, target, "dataset_test_split")
    counts = _counts(train, run["max_length"], len(found.train) - len(train))
    text = _described(run, f"{counts}, {target.words}", [""], [unread_files(part.name, found.kind)])
    text += "" if held_out is None else _held_out(run, held_out, len(found.eval or ()) - len(held_out))
    collator = Pad(tokenizer.pad_token_id or 0, run["max_length"])
    return Data(train, held_out, collator, text, target.names, found.commit, target.problem_type)


# --- In words ------------------------------------------------------------------------------------


def _described(run: Settings, counts: str, lines: Sequence[str], notes: Sequence[str]) -> str:
    """The data for a person: with the note on the only part, or a line for each."""
    text = f"{title(run['dataset_name']) or 'stdlib source'}, {counts}"
    if len(notes) == 1:
        return text + notes[0]
    return "\n".join([text, *(line + note for line, note in zip(lines, notes, strict=True))])


def _held_out(run: Settings, rows: Rows, left_out: int) -> str:
    return f"\nevaluation: {_counts(rows, run['max_length'], left_out)}"


def _counts(rows: Rows, length: int, left_out: int) -> str:
    """How many examples or sequences there are, and what of the data is not in them."""
    lengths = lengths_of(rows.examples)
    total, shown = int(lengths.sum()), np.minimum(lengths, length)
    text = f"{len(rows):,} sequences of {length:,} tokens"
    if isinstance(rows, Joined) and (rest := total - len(rows) * length):
        text += f", {rest:,} tokens left over" + (", most with nothing to learn" if rest >= length else "")
    if isinstance(rows, Packs):
        text += f" ({len(lengths):,} examples side by side, {shown.sum() / (len(rows) * length):.1%} full)"
    if isinstance(rows, (Cut, Labelled)):
        text = f"{len(rows):,} examples of {shown.mean():,.0f} tokens, the longest {shown.max():,}"
    if isinstance(rows, Labelled) and (full := int((lengths == length).sum())):
        text += f", {full:,} of them cut there or just as long"
    if isinstance(rows, (Cut, Packs)) and (cut := total - int(shown.sum())):
        text += f", {cut:,} tokens cut ({cut / total:.1%}): examples longer than {length:,}"
        wrapped = "--packing_strategy wrapped continues them in the next sequence, for pre-training on texts"
        text += f" ({wrapped})" if isinstance(rows, Packs) else ""
    return text + (f", {left_out:,} left out: nothing to learn in them" if left_out else "")
