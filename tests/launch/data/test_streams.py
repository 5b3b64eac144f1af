"""Streams: each row once a round for any number of readers, and no row lost at any stop."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset, IterableDataset

from launch.data.load import load_data, repeated_longest
from launch.data.streams import PLACE, WINDOW
from recipes.errors import StreamBroke, UserError
from tests.support.rows import CHAT, jsonl, learned, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")

STREAM = dict(dataset_streaming=True, max_steps=100, max_length=64)
PACKED, SEQUENTIAL = {"packing": True}, {"train_sampling_strategy": "sequential"}


@pytest.fixture
def folder(tmp_path):
    """Four files of rows that tell where they were."""
    (tmp_path / "folder").mkdir()
    for number in range(4):
        jsonl(tmp_path, texts(*(f"{number}.{row}" for row in range(30 + number))), f"folder/{number}.jsonl")
    return str(tmp_path / "folder")


def stream(name, tokenizer, **chosen):
    return load_data(run_with(dataset_name=name, **{**STREAM, **chosen}), tokenizer).train


def rows_of(examples, tokenizer):
    return [learned(tokenizer, example).removesuffix("<|endoftext|>") for example in examples]


def first(stream, count):
    return list(itertools.islice(stream, count))


# --- Which rows, in which order -------------------------------------------------------------------


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_one_epoch_of_a_stream_has_each_row_once_over_any_number_of_ranks(readers, folder, tokenizer):
    seen = []
    for reader in range(readers):
        own = iter(replace(stream(folder, tokenizer), rank=reader, ranks=readers))
        seen += rows_of(itertools.takewhile(lambda example: example[PLACE]["parts"][0]["round"] == 0, own), tokenizer)
    assert sorted(seen) == sorted(f"{number}.{row}" for number in range(4) for row in range(30 + number))


def test_each_reader_of_a_stream_with_fewer_rows_than_readers_gets_a_row(tmp_path, tokenizer):
    few = stream(jsonl(tmp_path, texts("a", "b", "c")), tokenizer)
    found = [rows_of(first(replace(few, rank=rank, ranks=5), 2), tokenizer)[1] for rank in range(5)]
    assert set(found) <= {"a", "b", "c"}


def test_each_epoch_and_each_seed_of_a_stream_has_another_order(folder, tokenizer):
    one = rows_of(first(stream(folder, tokenizer), 252), tokenizer)
    other = rows_of(first(stream(folder, tokenizer, seed=1), 126), tokenizer)
    assert sorted(one[:126]) == sorted(one[126:]) == sorted(other)
    assert one[:126] != one[126:] and one[:126] != other
    assert one == rows_of(first(stream(folder, tokenizer), 252), tokenizer)


def test_each_epoch_of_a_stream_begins_with_another_file(folder, tokenizer, monkeypatch):
    monkeypatch.setattr("launch.data.streams.WINDOW", 5)  # fewer rows than a file has
    found = rows_of(first(stream(folder, tokenizer), 4 * 126), tokenizer)
    assert len({row.partition(".")[0] for row in found[::126]}) > 1


def test_sequential_sampling_of_a_stream_follows_the_order_of_the_files(folder, tokenizer):
    found = rows_of(first(stream(folder, tokenizer, **SEQUENTIAL), 40), tokenizer)
    assert found == [f"0.{row}" for row in range(30)] + [f"1.{row}" for row in range(10)]


def test_a_stream_shuffles_rows_only_within_windows_of_consecutive_rows(tmp_path, tokenizer):
    rows = texts(*(str(row) for row in range(WINDOW + 500)))
    found = rows_of(first(stream(jsonl(tmp_path, rows), tokenizer), WINDOW), tokenizer)
    assert sorted(found, key=int) == [str(row) for row in range(WINDOW)] != found


# --- A resume -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, PACKED, PACKED | {"packing_strategy": "wrapped"}, SEQUENTIAL], ids=str)
@pytest.mark.parametrize("readers", [1, 3, 8])
def test_a_stream_resumes_exactly_after_any_example(settings, readers, folder, tokenizer):
    whole = replace(stream(folder, tokenizer, **settings), rank=readers - 1, ranks=readers)
    examples = first(whole, 40)
    for stop, example in list(enumerate(examples[:-1], start=1))[::3]:
        place = json.loads(json.dumps(example[PLACE]))
        goes_on = replace(whole, places={"0": place})
        assert _plain(first(goes_on, 1)[0]) == _plain(examples[stop]), stop


def _plain(example):
    return {name: value if name == PLACE else list(map(int, value)) for name, value in example.items()}


# --- Mixtures -------------------------------------------------------------------------------------


@pytest.fixture
def parts(folder, tmp_path):
    """Parts of other formats and numbers of shards; the smaller ones end several times a window."""
    questions = [{"q": f"{number}+1=", "a": f"A{number}", "prompt": "unused"} for number in range(11)]
    Dataset.from_list(texts(*(f"B{row}" for row in range(700)))).save_to_disk(tmp_path / "saved")
    return [
        {"name": folder, "weight": 3},
        {"name": str(tmp_path / "saved"), "weight": 2.5},
        {"name": jsonl(tmp_path, questions, "asked.jsonl"), "weight": 1, "columns": {"q": "prompt", "a": "completion"}},
        {"name": jsonl(tmp_path, [{"messages": CHAT}] * 8, "chats.jsonl"), "weight": 0.5},
    ]


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_datasets_of_a_streamed_mixture_appear_in_proportion_to_their_weights(ranks, parts, tokenizer):
    found, part_of = [], {"A": 2, "B": 1, "<": 3}
    for rank in range(ranks):
        own = first(replace(stream(parts, tokenizer, max_length=128), rank=rank, ranks=ranks), 3_500 // ranks)
        found += [part_of.get(text[0], 0) for text in rows_of(own, tokenizer)]
    shares = np.bincount(found) / len(found)
    assert abs(shares - np.array([3, 2.5, 1, 0.5]) / 7).max() < 0.01


@pytest.mark.parametrize("settings", [{}, PACKED], ids=str)
@pytest.mark.parametrize(("reader", "readers"), [(0, 1), pytest.param(5, 6, marks=pytest.mark.slow)])
def test_a_streamed_mixture_resumes_exactly_after_any_example(settings, reader, readers, parts, tokenizer):
    whole = replace(stream(parts, tokenizer, max_length=128, **settings), rank=reader, ranks=readers)
    stops = (1, 60, 110) if settings else (7, 1_000, 1_001)  # in two windows
    examples = first(whole, stops[-1] + 5)
    for stop in stops:
        goes_on = replace(whole, places={"0": json.loads(json.dumps(examples[stop - 1][PLACE]))})
        assert list(map(_plain, first(goes_on, 5))) == list(map(_plain, examples[stop : stop + 5])), stop


def test_a_mistake_in_one_dataset_of_a_streamed_mixture_names_that_dataset(tmp_path, tokenizer):
    rows = {"good": texts("a"), "other": [{"words": "b"}], "empty": texts("", "")}
    names = {name: jsonl(tmp_path, part, f"{name}.jsonl") for name, part in rows.items()}

    def run(*chosen):
        return run_with(dataset_name=[{"name": names[name], "weight": 1} for name in chosen], **STREAM)

    assert problem(run("good", "other"), tokenizer).what == f"there is no column 'text'; {names['other']} has words"
    (example,) = load_data(run("good", "empty"), tokenizer).train
    assert f"{names['empty']}: there is nothing to learn" in str(example[PLACE])


# --- Kinds of sources -----------------------------------------------------------------------------


def test_parquet_row_groups_are_the_shards_of_a_stream(tmp_path, tokenizer):
    Dataset.from_list(texts(*map(str, range(40)))).to_parquet(tmp_path / "data.parquet", batch_size=10)
    run = run_with(dataset_name=str(tmp_path / "data.parquet"), dataloader_num_workers=4, **STREAM)
    assert "streamed: 4 shards, shuffled within 1,000 rows" in load_data(run, tokenizer).description


@pytest.mark.parametrize("packing", [False, True])
def test_stream_rows_whose_completion_lies_beyond_max_length_are_left_out(packing, tmp_path, tokenizer):
    rows = [{"prompt": "a" * 64, "completion": "lost"}, {"prompt": "a" * 60, "completion": "kept"}]
    found = first(stream(jsonl(tmp_path, rows), tokenizer, packing=packing), 2)
    assert rows_of(found, tokenizer) == ["kept", "kept"]


def test_streamed_wrapped_packing_keeps_every_token_and_pads_the_last_sequence(tmp_path, tokenizer):
    rows = texts("abc" * 30, "def" * 10, "gh")
    settings = {**PACKED, "packing_strategy": "wrapped", **SEQUENTIAL}
    sequences = first(stream(jsonl(tmp_path, rows), tokenizer, **settings), 2)
    assert [len(row["input_ids"]) for row in sequences] == [64, 64]
    text = "".join(row["text"] + "<|endoftext|>" for row in rows)
    assert "".join(learned(tokenizer, {"labels": row["labels"].tolist()}) for row in sequences) == text


def test_fit_on_a_stream_repeats_an_example_of_max_length(folder, tokenizer):
    (one, other) = repeated_longest(stream(folder, tokenizer), 2)
    assert one == other and len(one["input_ids"]) == 64


# --- What goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "cause"), [('{"text": oops}', "JSON"), ('{"text": "a", "more": 6}', "column names don't match")]
)
def test_a_stream_yields_the_data_blocks_before_a_malformed_row_and_then_the_error(line, cause, tmp_path, tokenizer):
    """The library reads ten megabytes at once, and takes the columns from the first of them."""
    file = tmp_path / "data.jsonl"
    rows = [json.dumps({"text": "a", "source": "b" * 2000})] * 6_000
    file.write_text("\n".join([*rows, line, rows[0]]) + "\n")
    *examples, last = stream(file, tokenizer)
    assert len(examples) >= 5_000
    assert isinstance(last[PLACE], UserError) and cause in str(last[PLACE])


def test_a_network_failure_in_a_stream_raises_stream_broke_and_no_user_error(folder, tokenizer, monkeypatch):
    found = stream(folder, tokenizer)
    batches = IterableDataset.iter

    def iter_once(self, size):
        yield next(batches(self, 100))
        raise ConnectionError("the Hub does not answer")

    monkeypatch.setattr(IterableDataset, "iter", iter_once)
    *examples, last = found
    assert len(examples) == 100
    assert isinstance(last[PLACE], StreamBroke) and "read any further: the Hub does not" in str(last[PLACE])
