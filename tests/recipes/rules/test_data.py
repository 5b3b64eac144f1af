"""Rules about the data that a run names."""

from __future__ import annotations

from tests.support.runs import Run

ROW = '{"text": "a"}\n'

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
    ("the_data_exists", Run("--dataset_name ./nothing"), "dataset_name"),
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
    ("the_data_exists", Run()),
    ("the_data_exists", Run("--dataset_name imdb")),
    ("the_data_exists", Run("--dataset_name somebody/reviews --dataset_config en")),
    ("the_data_exists", Run("--dataset_name ./nothing", elsewhere=frozenset())),
]
