"""Rules about the data that a run names."""

from __future__ import annotations

import pytest
from datasets import Dataset, load_dataset
from transformers import Trainer

from tests.support.real_failures import TOKENS, arguments, assert_fires, tiny_llama
from tests.support.runs import Run

ROW = '{"text": "a"}\n'
WEIGHTED = "dataset_name: [{name: a, weight: 1}, {name: b, weight: 2}]"

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "the_data_exists": (Run("--dataset_name d.csv"), Run("--dataset_name d.csv", files={"d.csv": "text\na\n"})),
    "a_data_file_can_be_read": (
        Run("--dataset_name d.xlsx", files={"d.xlsx": "a"}),
        Run("--dataset_name d.jsonl", files={"d.jsonl": ROW}),
    ),
    "a_data_file_has_one_split": (
        Run("--dataset_name d.jsonl --eval_strategy steps", files={"d.jsonl": ROW}),
        Run(
            "--dataset_name d.jsonl --eval_strategy steps --dataset_test_split train[95%:]"
            " --dataset_train_split train[:10]+train[20:95%]",
            files={"d.jsonl": ROW},
        ),
    ),
    "a_stream_is_told_how_long": (
        Run("--dataset_name d --dataset_streaming"),
        Run("--dataset_name d --dataset_streaming --max_steps 9"),
    ),
    "a_stream_has_whole_splits": (
        Run("--dataset_name d --dataset_streaming --max_steps 9 --dataset_train_split train[:95%]"),
        Run("--dataset_name d --dataset_streaming --max_steps 9 --dataset_train_split en"),
    ),
    "a_streamed_mixture_has_weights": (
        Run("--dataset_name a b --dataset_streaming --max_steps 9"),
        Run("--config c.yaml --dataset_streaming --max_steps 9", files={"c.yaml": WEIGHTED}),
    ),
    "a_stream_has_no_classes": (
        Run("--dataset_name d --dataset_streaming --max_steps 9 --task sequence_classification"),
        Run("--dataset_name d --max_steps 9 --task sequence_classification"),
    ),
    "a_stream_has_an_order_of_its_own": (
        Run("--dataset_streaming --max_steps 9 --train_sampling_strategy group_by_length"),
        Run("--dataset_streaming --max_steps 9 --train_sampling_strategy sequential"),
    ),
    "a_stream_is_one_epoch": (
        Run("--dataset_streaming --max_steps 9 --save_strategy epoch"),
        Run("--dataset_streaming --max_steps 9 --save_strategy steps"),
    ),
    "zstandard_is_installed": (
        Run("--dataset_name d.jsonl.zst", files={"d.jsonl.zst": "x"}, missing=("zstandard",)),
        Run("--dataset_name d.jsonl.zst", files={"d.jsonl.zst": "x"}),
    ),
    "a_mixture_is_for_language_models": (
        Run("--dataset_name a b --task sequence_classification"),
        Run("--dataset_name a --task sequence_classification"),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    (
        "a_data_file_has_one_split",
        Run("--dataset_name d.jsonl --dataset_train_split validation", files={"d.jsonl": ROW}),
        "dataset_train_split",
    ),
    (
        "a_data_file_has_one_split",
        Run("--dataset_name d.jsonl --eval_strategy epoch --dataset_test_split test", files={"d.jsonl": ROW}),
        "dataset_test_split",
    ),
    (
        "a_stream_has_whole_splits",
        Run("--dataset_streaming --max_steps 9 --eval_strategy steps --dataset_test_split test+dev"),
        "dataset_test_split",
    ),
    (
        "a_stream_has_whole_splits",
        Run(
            "--config c.yaml", files={"c.yaml": "{dataset_name: [{name: d, split: 'a[:9]'}], dataset_streaming: true}"}
        ),
        "dataset_name",
    ),
    ("the_data_exists", Run("--dataset_name ./nothing"), "dataset_name"),
    (
        "a_mixture_is_for_language_models",
        Run(
            "--config c.yaml --task sequence_classification",
            files={"c.yaml": "dataset_name: [{name: imdb, columns: {review: text}}]"},
        ),
        "dataset_name",
    ),
    ("the_data_exists", Run("--dataset_name d/*.jsonl", files={"d/a.csv": "a"}), "dataset_name"),
    ("the_data_exists", Run("--dataset_name d.jsonl e.jsonl", files={"d.jsonl": ROW}), "dataset_name"),
    ("the_data_exists", Run("--dataset_name d.jsonl.gz"), "dataset_name"),
    ("a_data_file_can_be_read", Run("--dataset_name d.parquet.gz", files={"d.parquet.gz": "a"}), "dataset_name"),
    ("a_data_file_can_be_read", Run("--dataset_name d/*", files={"d/a.csv": "a", "d/b.jsonl": ROW}), "dataset_name"),
    ("a_data_file_can_be_read", Run("--dataset_name d/*", files={"d/a.csv": "a", "d/b.csv": ""}), "dataset_name"),
    (
        "a_data_file_has_one_split",
        Run("--dataset_name d.jsonl e.jsonl --eval_strategy steps", files={"d.jsonl": ROW, "e.jsonl": ROW}),
        "dataset_test_split",
    ),
    (
        "a_data_file_has_one_split",
        Run("--config c.yaml", files={"c.yaml": "dataset_name: [{name: d.jsonl, split: test}]", "d.jsonl": ROW}),
        "dataset_name",
    ),
    ("the_data_exists", Run("--dataset_name /no/where"), "dataset_name"),
    ("a_data_file_can_be_read", Run("--dataset_name d.jsonl", files={"d.jsonl": ""}), "dataset_name"),
    (
        "a_data_file_can_be_read",
        Run("--dataset_name d.jsonl --dataset_config en", files={"d.jsonl": ROW}),
        "dataset_config",
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("a_data_file_has_one_split", Run("--dataset_name d.jsonl --dataset_test_split test", files={"d.jsonl": ROW})),
    ("a_data_file_has_one_split", Run("--dataset_name d --eval_strategy epoch", files={"d/a.jsonl": ROW})),
    (
        "persistent_workers_change_a_resume",
        Run("--dataset_streaming --max_steps 9 --dataloader_num_workers 1 --dataloader_persistent_workers"),
    ),
    (
        "an_unseeded_sampler_changes_a_resume",
        Run('--dataset_streaming --max_steps 9 --accelerator_config {"use_seedable_sampler":false}'),
    ),
    (
        "a_streamed_mixture_has_weights",
        Run("--dataset_name d/*.jsonl --dataset_streaming --max_steps 9", files={"d/a.jsonl": ROW, "d/b.jsonl": ROW}),
    ),
    (
        "a_streamed_mixture_has_weights",
        Run(
            "--config c.yaml", files={"c.yaml": "{dataset_name: [{name: d, columns: {a: b}}], dataset_streaming: true}"}
        ),
    ),
    ("the_data_exists", Run()),
    ("the_data_exists", Run("--dataset_name d/*.csv", files={"d/a.csv": "a"})),
    ("the_data_exists", Run("--dataset_name d.jsonl somebody/reviews", files={"d.jsonl": ROW})),
    ("a_data_file_can_be_read", Run("--dataset_name d/*", files={"d/a.csv": "a", "d/b.csv.gz": "b"})),
    (
        "a_data_file_has_one_split",
        Run("--dataset_name d.jsonl somebody/reviews --eval_strategy steps", files={"d.jsonl": ROW}),
    ),
    ("a_mixture_is_for_language_models", Run("--dataset_name a b")),
    ("the_data_exists", Run("--dataset_name imdb")),
    ("the_data_exists", Run("--dataset_name somebody/reviews --dataset_config en")),
    ("the_data_exists", Run("--dataset_name ./nothing", elsewhere=frozenset())),
]


def test_trainer_asks_how_long_a_stream_is_trained(fresh_state, tmp_path):
    rows = Dataset.from_list([TOKENS] * 4).to_iterable_dataset()
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        Trainer(tiny_llama(), arguments(tmp_path, max_steps=-1), train_dataset=rows)
    assert_fires("a_stream_is_told_how_long", {"recipe": "baseline", "dataset_name": "d", "dataset_streaming": True})


def test_the_library_takes_no_slice_of_a_stream(tmp_path):
    (tmp_path / "d.jsonl").write_text(ROW)
    with pytest.raises(ValueError, match="Bad split"):
        load_dataset("json", data_files=str(tmp_path / "d.jsonl"), streaming=True, split="train[:95%]")
    stream = {"recipe": "baseline", "dataset_name": "d", "dataset_streaming": True, "max_steps": 9}
    assert_fires("a_stream_has_whole_splits", {**stream, "dataset_train_split": "train[:95%]"})


def test_a_file_compressed_with_zstandard_needs_the_package(tmp_path, monkeypatch):
    import datasets
    from fsspec.compression import compr

    monkeypatch.delitem(compr, "zstd", raising=False)  # where fsspec looks for it, once it was imported
    monkeypatch.setattr(datasets.config, "ZSTANDARD_AVAILABLE", False)
    (tmp_path / "d.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 20)
    with pytest.raises(Exception, match="Compression type zstd not supported"):
        datasets.load_dataset("json", data_files=str(tmp_path / "d.jsonl.zst"), cache_dir=str(tmp_path))
