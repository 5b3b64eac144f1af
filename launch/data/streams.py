"""Stream data: rows are read while the run trains, so that the data may be larger than the disk.

The library `datasets` reads the rows and tracks the position in each shard. Three features of
`datasets` failed when we tried them, and are replaced here:
- Its shuffle buffer is empty after a resume: 25 of 50 waiting rows were lost. Here a window of
  examples is packed as one small data set, and shuffled independently of earlier windows.
- `repeat` keeps one order in all epochs, and `set_epoch` affects all workers of a process at once.
  Here each worker begins each epoch on its own, in a new order.
- `interleave_datasets` mixes rows before they are tokenized and gives each row the columns of all
  data sets, which hides each row's format. Here a window mixes tokens of all data sets by weight.

A mixture's data sets are its parts. A part that ends begins its next epoch in the same window, so
that the shares match the weights even if a part is small. Without a mixture, no window spans two
epochs, so that each row comes once before any row comes again.
"""

import functools
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
from launch.data.tokens import Encoder, Tokenized, encoder_of, naming, token_table, tokenized
from recipes.errors import StreamBroke, UserError, plural
from recipes.mixture import Part
from recipes.run import Json, RunSpec

WINDOW = 1_000  # examples that are packed and shuffled together
PLACE = "place"  # the key under which an example or a batch holds the place where the stream continues
SHARDS = 1024  # of data on the disk: enough for any number of readers to get nearly equal shares


@dataclass
class Stream(torch.utils.data.IterableDataset):
    """An endless stream of examples, in windows of about WINDOW examples. Each example carries the
    place where a resume continues: its window's index (`window`), how many examples of this window
    are used (`taken`), and where this window begins in each part of the data (`parts`): the epoch
    (`round`), the `datasets` state (`rows`), and how many examples to skip after it (`used`).

    Each worker of each rank reads rows of its own. `places` maps a worker to the place where this
    worker resumes; workers without a place begin in epoch `first_round`. Worker `turn` goes first.
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
        order = f"shuffled within {WINDOW:,} rows" if self.shuffles else "not shuffled"
        packing = f", packed into sequences of {self.run['max_length']:,} tokens" if self.run["packing"] else ""
        return f"streamed: {plural(sum(self.shards), 'shard')}, {order}{packing}"

    @property
    def longest(self) -> Example:
        """An invented example of maximal length: no example of the stream takes more memory."""
        return self._in_rows(token_table([([0] * self.run["max_length"],) * 2]))[0]

    @functools.cached_property
    def beginning(self) -> Dataset:
        """The first examples of the first data set, in the order in which one reader reads them."""
        _, tokens = next(self._pieces(0, 0, 1, {"round": 0, "rows": None, "used": 0}))
        return Dataset(tokens, fingerprint="a window")

    @property
    def shards(self) -> list[int]:
        return [encode.source.rows.num_shards for encode in self.parts]

    def share(self, number: int) -> float:
        """Return the fraction of all examples that come from the data set with this index."""
        weights = [encode.source.part.weight or 1 for encode in self.parts]
        return weights[number] / sum(weights)

    def __iter__(self) -> Iterator[Example]:
        info = torch.utils.data.get_worker_info()
        workers = info.num_workers if info else 1
        worker = ((info.id if info else 0) + self.turn) % workers
        if info:
            fsspec.asyn.reset_lock()  # a lock that is held during the fork would stay held in the worker
        begin = {"round": self.first_round, "rows": None, "used": 0}
        place = self.places.get(str(worker)) or {"window": 0, "taken": 0, "parts": [begin] * len(self.parts)}
        try:
            for example, at in self._examples(self.rank * workers + worker, self.ranks * workers, place):
                yield {**example, PLACE: {"worker": worker, **at}}
        except (UserError, StreamBroke) as error:
            # An error raised in a worker would reach the rank only as text. The rank raises the
            # error in PLACE after it has trained on all earlier batches.
            yield {PLACE: error}

    def _examples(self, reader: int, readers: int, place: Json) -> Iterator[tuple[Example, Json]]:
        taken, first = place["taken"], place["window"]
        of_parts = (self._of_part(number, reader, readers, first, at) for number, at in enumerate(place["parts"]))
        for window, found in enumerate(zip(*of_parts, strict=True), start=first):
            starts, tables = zip(*found, strict=True)
            # Interleave the parts by their shares: joined and unshuffled examples keep this order.
            even = np.concatenate([(np.arange(len(table)) + 0.5) / len(table) for table in tables if len(table)])
            examples = self._in_rows(pa.concat_tables(tables).take(np.argsort(even, kind="stable")))
            order = np.arange(len(examples))
            if self.shuffles:
                np.random.default_rng((self.seed, reader, window, *(at["round"] for at in starts))).shuffle(order)
            for count in range(taken, len(order)):
                yield examples[int(order[count])], {"window": window, "taken": count + 1, "parts": starts}
            taken = 0

    def _of_part(self, number: int, reader: int, readers: int, first: int, at: Json) -> Iterator[tuple[Json, pa.Table]]:
        """For data set `number`, yield each window's start and examples, from window `first` on."""
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
        """Yield tables of data set `number` endlessly, from place `at` on, each with its start."""
        encode, turn, before, used = self.parts[number], at["round"], at["rows"], at["used"]
        size = math.ceil(WINDOW * self.share(number))
        with naming(encode.source.part.name if self.parts[1:] else ""):
            while True:
                rows, fellow, fellows = dealt(encode.source.rows, reader, readers)
                if self.shuffles:
                    rows.set_epoch(1 + int(np.random.default_rng((self.seed, number, turn)).integers(2**31)))
                learns = bool(before or used)  # assumed True for an epoch that an earlier start began
                for table, after in replace(encode.source, rows=rows).tables(size * fellows, before):
                    begin = fellow if before or fellow < len(table) else fellow % len(table)  # fewer rows than readers
                    tokens = encode(table.take(np.arange(begin, len(table), fellows)))
                    tokens = tokens.filter(teaches(encode.run, tokens["first_learned"].to_numpy()))[used:]
                    if len(tokens):
                        yield {"round": turn, "rows": before, "used": used}, tokens
                        learns = True
                    before, used = after, 0
                if not learns:
                    raise nothing_to_learn("dataset_name", self.run["max_length"])
                turn, before = turn + 1, None

    def _in_rows(self, tokens: pa.Table) -> Sequence[Example]:
        """Return a window's examples as rows: packed with --packing, else one example per row."""
        padding = self.parts[0].tokenizer.pad_token_id or 0
        if joins(self.run):
            # Joining would drop an incomplete last row of every window, so padding completes it.
            rest = -len(tokens["input_ids"].combine_chunks().flatten()) % self.run["max_length"]
            tokens = pa.concat_tables([tokens, token_table([([padding] * rest, [IGNORED] * rest)])])
        return in_rows(self.run, Dataset(tokens, fingerprint="a window"), padding)  # else `datasets` computes a hash


def dealt(rows: IterableDataset, reader: int, readers: int) -> tuple[IterableDataset, int, int]:
    """Deal the shards of `rows` to the readers (the data workers of all ranks). Return one reader's
    shards, its index among the readers that share these shards, and the number of those readers.

    Readers get equally many shards (from 8 each on, some may get one more). Call `set_epoch` on the
    returned rows only: on `rows`, `set_epoch` would change the epoch of all workers of the process.
    """
    shards = rows.num_shards
    groups = readers if shards >= 8 * readers else math.gcd(shards, readers)
    return rows.shard(groups, reader % groups, contiguous=False), reader // groups, readers // groups


def open_part(run: RunSpec, tokenizer, part: Part) -> Tokenized:
    """Open a part of the data as a stream to train on. Its evaluation split is cached as tokens.
    Raises `UserError` if a split is missing, or if the first rows cannot be read or encoded.
    """
    commit = sources.newest_commit(part.name)
    splits = sources.open_splits(run, part, commit, SHARDS)
    wanted, _ = sources.wanted_splits(run, part, list(splits))
    rows = splits[wanted["dataset_train_split"]]
    if rows.num_shards % (run.batch.data_parallel * max(1, run["dataloader_num_workers"])):
        rows = rows.reshard()  # makes each row group of Parquet a shard; other files stay as they are
    encode = encoder_of(run, tokenizer, part, rows)
    if (first := next(encode.source.tables(WINDOW), None)) is not None:
        encode(first[0], 0)  # reports malformed rows among the first ones, before a model is loaded
    evaluation = None
    if test := wanted.get("dataset_test_split"):
        evaluation = tokenized(run.given_too(dataset_test_split=test), tokenizer, replace(part, split=test)).eval
    return Tokenized(encode, evaluation, commit)
