"""Load a run's data: read, tokenize and check it before the first step."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset

from launch.data.batches import Cut, Example, Joined, Packs, Pad, Stack, in_rows, nothing_to_learn, teaches
from launch.data.encode import IGNORED
from launch.data.labels import Labelled, Target, labelled, recognise
from launch.data.streams import Stream, open_part
from launch.data.tokens import hashes_of, lengths_of, numbers_of, of_parts, tokenized
from launch.host.world import World
from recipes.errors import UserError, mistake, plural
from recipes.mixture import parts_of_run, paths_of, title
from recipes.rules.data_and_model import file_kind, nothing_to_evaluate_on
from recipes.run import RunSpec, Settings
from recipes.run.files import files_in

Rows = Cut | Packs | Joined


@dataclass
class Data:
    """The data in the form that Trainer needs, and a description for people.

    `labels` are the names of a classifier's outputs, and `problem_type` is the kind of its target;
    both are None for language models. `commit` is the commit of Hub data, None if unknown.
    """

    train: Rows | Stream
    eval: Rows | None
    collator: Callable[[list[Example]], dict[str, torch.Tensor]]
    description: str
    labels: list[str] | None = None
    commit: str | None = None
    problem_type: str | None = None

    def collator_for(self, attention: str | None) -> Callable[[list[Example]], dict[str, torch.Tensor]]:
        """Return the collator for this attention; FlashAttention needs each example's start."""
        is_flash = isinstance(self.collator, Stack) and "flash" in (attention or "")
        return Stack(flash=True) if is_flash else self.collator


def require_same(data: Data, world: World) -> None:
    """Raise `UserError` on a rank that reads another commit of Hub data than rank 0. Commits
    can differ because each process asks the Hub for the newest commit.
    """
    commit = world.decide(lambda: data.commit)
    if commit and data.commit and commit != data.commit:
        what = f"changed on the Hub while the processes started: rank 0 reads {commit}, this rank {data.commit}"
        raise mistake("dataset_name", what, "run the same command again")


def load_data(run: RunSpec, tokenizer, classes: Sequence[str] = ()) -> Data:
    """Return the run's data, ready to train on. Raises `UserError` for data that cannot be used.

    Tokenizing may take hours: one process of each node tokenizes, and the others wait. Call this
    before a process group is joined, because the group's time-outs would end the waiting processes.
    `classes` are the class names of a model that was trained to classify, in the model's order.
    """
    is_classifier, streams = run["task"] == "sequence_classification", run["dataset_streaming"]
    if is_classifier and not run["dataset_name"]:
        raise mistake("dataset_name", "is missing: classification needs labelled texts", "--dataset_name FILE_OR_ID")
    parts, tokens = zip(*of_parts(run, tokenizer, open_part if streams else tokenized), strict=True)
    target = recognise(run, tokens[0].train, classes) if is_classifier else None
    train: Rows | Stream
    sources, weights = [one.train for one in tokens], [part.weight for part in parts]
    if streams:
        train = Stream(sources)
        words = str(train)
    else:
        train, words = _rows(run, tokenizer, sources, "dataset_train_split", target, weights)
    files = [file for part in parts_of_run(run) for path in paths_of(part.name) for file in (path, *files_in(path))]
    is_text = any(file_kind(file) == "text" for file in files)
    text = f"{title(run['dataset_name']) or 'stdlib source'}, {'each line an example, ' * is_text}{words}"
    evaluation = None
    if held_out := [one.eval for one in tokens if one.eval is not None]:
        evaluation, words = _rows(run, tokenizer, held_out, "dataset_test_split", target)
        evaluated = [] if streams else [*hashes_of(held_out)]
        trained = set(evaluated).intersection(hashes_of(sources if evaluated else []))
        shared = sum(row in trained for row in evaluated)
        text += f"\nevaluation: {words}" + f", {shared:,} of the rows are also trained on" * bool(shared)
    elif run["eval_strategy"] != "no":
        raise UserError(nothing_to_evaluate_on("the data sets have only other splits", streams))
    # Padding is masked, so any token works. XLNet classifies by the last token (transformers#1882).
    is_xlnet = (run.model or {}).get("model_type") == "xlnet"
    collator = Stack() if run["packing"] else Pad(tokenizer.pad_token_id or 0, run["max_length"], left=is_xlnet)
    commit = ", ".join(one.commit for one in tokens if one.commit) or None
    labels, kind = (target.names, target.problem_type) if target else (None, None)
    return Data(train, evaluation, collator, text, labels, commit, kind)


def repeated_longest(rows: Rows | Stream, count: int) -> torch.utils.data.Dataset:
    """Return `count` copies of the longest example, because it takes the most memory. For a stream,
    whose lengths are unknown, copy an invented example of `max_length` tokens.
    """
    if isinstance(rows, Stream):
        return torch.utils.data.Subset([rows.longest], [0] * count)  # type: ignore[arg-type]
    longest = 0 if isinstance(rows, (Packs, Joined)) else int(lengths_of(rows.examples).argmax())
    return torch.utils.data.Subset(rows, [longest] * count)


def _rows(
    run: Settings, tokenizer, tokens: Sequence[Dataset], flag: str, target: Target | None, weights: Sequence = (None,)
) -> tuple[Rows, str]:
    """Return the rows to train or evaluate on, and their description."""
    rows: Rows
    words = ""
    if target:
        rows, learns = labelled(run, tokens[0], target, flag), [lengths_of(tokens[0]) > 0]
    else:
        learns = [teaches(run, numbers_of(part, "first_learned")) for part in tokens]
        examples = [part.select(np.flatnonzero(one)) for part, one in zip(tokens, learns, strict=True)]
        if not all(map(len, examples)):
            raise nothing_to_learn(flag, run["max_length"])
        together = datasets.concatenate_datasets(examples)
        if None not in weights:  # a part that ends begins again, until each part has ended once
            shares = [weight / sum(weights) for weight in weights]
            together = datasets.interleave_datasets(examples, shares, run["seed"], stopping_strategy="all_exhausted")
        rows = in_rows(run, together, tokenizer.pad_token_id or 0)
        if not len(rows):
            total, length = lengths_of(together).sum(), run["max_length"]
            what = f"the data of --{flag} has {total:,} tokens, too few for one packed sequence of {length:,}"
            raise mistake("max_length", what, f"--max_length {total} or less, or --packing false")
    if left_out := sum(int((~one).sum()) for one in learns):
        first = f" (first: row {learns[0].argmin() + 1:,})" if len(learns) == 1 else ""
        words = f", {plural(left_out, 'row')} left out{first}: the text or answer is missing, empty or cut off"
    empty = sum(int(numbers_of(part, "empty_answers").sum()) for part in tokens)
    return rows, f"{rows}{words}" + f", {plural(empty, 'empty answer')} not learned" * bool(empty)


# --- Examples as a person reads them --------------------------------------------------------------


def shown_examples(data: Data, tokenizer, count: int) -> Iterator[str]:
    """Yield the first examples as text with « and » around learned tokens or, for a classifier, as
    `text -> label`. Packed examples are yielded one by one.
    """
    rows = data.train
    if isinstance(rows, Stream):
        rows = Cut(rows.beginning, rows.run["max_length"])
    elif not isinstance(rows, Cut):
        rows = Cut(rows.examples, rows.length)
    for number in range(min(count, len(rows))):
        ids, labels = rows[number]["input_ids"], rows[number]["labels"]
        if isinstance(rows, Labelled):
            yield f"{tokenizer.decode(ids)} -> {rows.examples[number]['label']}"
            continue
        end, said, shown = 0, "", ""
        for is_learned, piece in groupby(label != IGNORED for label in labels):
            end += len(list(piece))
            text = tokenizer.decode(ids[:end])[len(said) :]  # decoded alone, a piece may lose its first space
            said, shown = said + text, shown + (f"«{text}»" if is_learned else text)
        yield shown


def recorded(data: Data, tokenizer) -> dict[str, Any]:
    """Return the fields of run.json that describe the data: `classes`, or else `chats`.

    Texts count as chats if one of the first texts holds the words with which the chat template
    opens a user's message, because people also render chats themselves.
    """
    if data.labels:
        return {"classes": data.labels}
    mark, opening = "<content>", ""
    with contextlib.suppress(Exception):  # templates raise anything, and may refuse a chat without an answer
        chat = [{"role": "user", "content": mark}]
        opening = tokenizer.apply_chat_template(chat, tokenize=False).partition(mark)[0].strip()
    words = opening.splitlines()[-1].removeprefix(tokenizer.bos_token or "") if opening else ""
    are_chats = any(words in text for text in shown_examples(data, tokenizer, 16))
    return {"chats": bool(tokenizer.chat_template) and are_chats}


def shortened(text: str) -> str:
    """Put an example on one line. Of a long text, keep the start and the end."""
    text = text.replace("\n", "⏎")
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
