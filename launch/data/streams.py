"""Streaming: data that is read while it trains, from the Hub or from files larger than the disk.

The library `datasets` reads, and knows its place in each shard. Three things are ours, because its
own were tried. Its shuffle buffer is empty after a resume: 25 of 50 waiting rows were lost. Here a
window of examples is packed as one small data set and put into another order, which depends on
nothing that came before. `repeat` gives every round the same order, while `set_epoch` moves all
workers of a process at once: each worker begins its rounds anew. And `interleave_datasets` mixes
rows before they are tokenized, and gives all of them the columns of all parts: no row would tell
its format. Here a window has tokens of every part, by its weight.

A part that ends begins its next round while the others go on, in the same window: the shares are
those of the weights, however small a part is. A single source's rounds share no window, so that
each of its rows comes once before one comes again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import fsspec.asyn
import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset

from launch.data import sources
from launch.data.batches import Example, in_rows, joins, nothing_to_learn, teaches
from launch.data.encode import IGNORED
from launch.data.tokens import Encoder, Tokenized, naming, token_table, tokenized
from recipes.errors import StreamBroke, UserError, plural
from recipes.mixture import Part
from recipes.run import Json, RunSpec

WINDOW = 1_000  # examples that are packed and shuffled together
PLACE = "place"  # in an example, and in a batch: where the stream goes on after it
SHARDS = 1024  # of rows that are on the disk: as many readers as any world has get as many rows


@dataclass
class Stream(torch.utils.data.IterableDataset):
    """Examples without end. Each comes with its place: the window, how many examples of it were
    taken, and where in each part it begins. That is the part's round, the state of the rows before
    a piece of it, and how many examples of this piece were used.

    Each of `ranks` x workers readers has rows of its own. `places` are those where a resume goes
    on, by worker; the first batch is that of the worker `turn`.
    """

    parts: Sequence[Encoder]
    rank: int = 0
    ranks: int = 1
    places: Mapping[str, Json] = field(default_factory=dict)
    turn: int = 0
    first_round: int = 0

    def __post_init__(self) -> None:
        self.run = run = self.parts[0].run
        self.seed = run["seed"] if run["data_seed"] is None else run["data_seed"]
        self.shuffles = run["train_sampling_strategy"] != "sequential"

    def __str__(self) -> str:
        order = f"shuffled within {WINDOW:,} rows" if self.shuffles else "in their order"
        packing = f", packed into sequences of {self.run['max_length']:,} tokens" if self.run["packing"] else ""
        return f"streamed: {plural(sum(self.shards), 'shard')}, {order}{packing}"

    @property
    def longest(self) -> Example:
        """The longest example that there may be: it takes the most memory."""
        filled = [0] * self.run["max_length"]
        return self._in_rows(token_table([(filled, filled)]))[0]

    @property
    def shards(self) -> list[int]:
        return [encode.source.rows.num_shards for encode in self.parts]

    def share(self, number: int) -> float:
        """Of the examples, that the part of this number has."""
        weights = [encode.source.part.weight or 1 for encode in self.parts]
        return weights[number] / sum(weights)

    def __iter__(self) -> Iterator[Example]:
        info = torch.utils.data.get_worker_info()
        workers = info.num_workers if info else 1
        worker = ((info.id if info else 0) + self.turn) % workers
        if info:
            fsspec.asyn.reset_lock()  # a lock that is held while a worker is forked would stay held in it
        begin = {"round": self.first_round, "rows": None, "used": 0}
        place = self.places.get(str(worker)) or {"window": 0, "taken": 0, "parts": [begin] * len(self.parts)}
        try:
            for example, at in self._examples(self.rank * workers + worker, self.ranks * workers, place):
                yield {**example, PLACE: {"worker": worker, **at}}
        except (UserError, StreamBroke) as error:
            # A worker's error would arrive as text. This one is raised when its turn comes, after
            # all the examples before it were trained.
            yield {PLACE: error}

    def _examples(self, reader: int, readers: int, place: Json) -> Iterator[tuple[Example, Json]]:
        taken, first = place["taken"], place["window"]
        of_parts = (self._of_part(number, reader, readers, first, at) for number, at in enumerate(place["parts"]))
        for window, found in enumerate(zip(*of_parts, strict=True), start=first):
            starts, tables = zip(*found, strict=True)
            examples = self._in_rows(pa.concat_tables(tables))
            order = np.arange(len(examples))
            if self.shuffles:
                np.random.default_rng((self.seed, reader, window, *(at["round"] for at in starts))).shuffle(order)
            for count in range(taken, len(order)):
                yield examples[int(order[count])], {"window": window, "taken": count + 1, "parts": starts}
            taken = 0

    def _of_part(self, number: int, reader: int, readers: int, first: int, at: Json) -> Iterator[tuple[Json, pa.Table]]:
        """A part's examples in each window from this one on, and its place before them."""
        alone, each = len(self.parts) == 1, WINDOW * self.share(number)
        pieces = self._pieces(number, reader, readers, at)
        at, left = next(pieces)
        for window in itertools.count(first):
            wanted, start, taken = round(each * (window + 1)) - round(each * window), None, []
            while start is None or (wanted and not alone):
                if not len(left):
                    at, left = next(pieces)
                start = start or at
                taken.append(left[:wanted])
                at, left = {**at, "used": at["used"] + len(taken[-1])}, left[wanted:]
                wanted -= len(taken[-1])
            yield start, pa.concat_tables(taken)

    def _pieces(self, number: int, reader: int, readers: int, at: Json) -> Iterator[tuple[Json, pa.Table]]:
        """What there is to learn in a part, piece by piece and round after round, and its place."""
        encode, turn, before, used = self.parts[number], at["round"], at["rows"], at["used"]
        size = math.ceil(WINDOW * self.share(number))
        with naming(encode.source.part.name if self.parts[1:] else ""):
            while True:
                rows, fellow, fellows = dealt(encode.source.rows, reader, readers)
                if self.shuffles:
                    rows.set_epoch(1 + int(np.random.default_rng((self.seed, number, turn)).integers(2**31)))
                learns = bool(before or used)  # of a round that an earlier start began, nobody knows
                for table, after in replace(encode.source, rows=rows).tables(size * fellows, before):
                    tokens = encode(table.take(np.arange(fellow, len(table), fellows)))
                    tokens = tokens.filter(teaches(encode.run, tokens["first_learned"].to_numpy()))[used:]
                    if len(tokens):
                        yield {"round": turn, "rows": before, "used": used}, tokens
                        learns = True
                    before, used = after, 0
                if not learns:
                    raise nothing_to_learn("dataset_name", self.run["max_length"])
                turn, before = turn + 1, None

    def _in_rows(self, tokens: pa.Table) -> Sequence[Example]:
        """A window's examples, packed if the run packs."""
        padding = self.parts[0].tokenizer.pad_token_id or 0
        if joins(self.run):
            # Joining leaves the last part out if it is not full: here one of every window.
            rest = -len(tokens["input_ids"].combine_chunks().flatten()) % self.run["max_length"]
            tokens = pa.concat_tables([tokens, token_table([([padding] * rest, [IGNORED] * rest)])])
        return in_rows(self.run, Dataset(tokens, fingerprint="a window"), padding)  # or it computes one


def dealt(rows: IterableDataset, reader: int, readers: int) -> tuple[IterableDataset, int, int]:
    """A reader's shards; its number among the readers that have the same ones, and how many these
    are. They take the rows in turns.

    All readers have as many, or, of many shards, one more at most. The rows are a new object: the
    library shares a round's number between the copies in a process's workers.
    """
    shards = rows.num_shards
    groups = readers if shards >= 8 * readers else math.gcd(shards, readers)
    return rows.shard(groups, reader % groups, contiguous=False), reader // groups, readers // groups


def open_part(run: RunSpec, tokenizer, part: Part) -> Tokenized:
    """A part to train on as a stream, and its tokens to evaluate on, which are made once and kept.
    Raises `UserError` for what the user can correct.
    """
    commit = sources.newest_commit(part.name)
    splits = sources.open_splits(run, part, commit, SHARDS)
    wanted = sources.wanted_splits(run, part, list(splits))
    sources.rows_needed(wanted, list(splits))  # raises for a split that is not there
    rows = splits[wanted["dataset_train_split"]]
    if rows.num_shards % (run.data_parallel_size * max(1, run["dataloader_num_workers"])):
        rows = rows.reshard()  # of Parquet each group of rows is a shard, of other files nothing changes
    # A worker that is not forked gets the settings pickled, which their environment cannot be.
    encode = Encoder(sources.source_of(run, part, rows), {name: run[name] for name in run}, tokenizer)
    if (first := next(encode.source.tables(WINDOW), None)) is not None:
        encode(first[0], 0)  # what is wrong with its columns is said before a model is loaded
    evaluation = None
    if test := wanted.get("dataset_test_split"):
        evaluation = tokenized(run.given_too(dataset_test_split=test), tokenizer, replace(part, split=test)).eval
    return Tokenized(encode, evaluation, commit)
