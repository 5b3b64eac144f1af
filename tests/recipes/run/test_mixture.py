"""The values of `dataset_name`: one name, several, or parts with weights."""

import pytest

from recipes.errors import UserError
from recipes.mixture import Part, parts_of, paths_of, title
from recipes.rules.check import require_legal
from recipes.run import fingerprints
from tests.support.runs import resolved

WEIGHTED = """[{name: chats.jsonl, weight: 3, split: 'train[:95%]'},
  {name: somebody/code, weight: 1.5, config: python, columns: {question: prompt, answer: completion}}]"""
CODE = Part("somebody/code", 1.5, None, "python", {"question": "prompt", "answer": "completion"})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.jsonl", [Part("a.jsonl")]),
        ("[{name: a.jsonl}]", [Part("a.jsonl")]),
        ("[a.jsonl, b, c]", [Part("a.jsonl"), Part("b"), Part("c")]),
        (WEIGHTED, [Part("chats.jsonl", 3, "train[:95%]"), CODE]),
    ],
)
def test_dataset_name_in_a_config_file_is_one_dataset_or_a_mixture(text, parts, config):
    named = resolved(["--config", config(f"dataset_name: {text}")])["dataset_name"]
    assert parts_of(named) == parts
    assert isinstance(named, str) == (len(parts) == 1)


WRONG = {
    "no parts": ("[]", "at least one part"),
    "a number": ("[a, 3]", "needs names, or entries with keys of name, weight"),
    "a misspelt field": (
        "[{name: a, wight: 2}]",
        "entries with keys of name, weight, split, config, columns; got 'wight'",
    ),
    "no name": ("[{weight: 2}]", "needs names, or entries with keys of name"),
    "a weight of nothing": ("[{name: a, weight: 0}]", "needs a weight above 0, got 0 for a"),
    "a weight for one alone": ("[{name: a, weight: 2}, b]", "weights for all parts or for none"),
    "columns that are a list": ("[{name: a, columns: [x]}]", "columns as a mapping: {question: prompt}"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG.values(), ids=WRONG)
def test_a_dataset_name_list_that_is_no_valid_mixture_is_refused(text, expected, config):
    with pytest.raises(UserError) as caught:
        require_legal(resolved(["--config", config(f"dataset_name: {text}")]))
    (found,) = caught.value.problems
    assert found.subject == "dataset_name" and expected in found.what and found.fix


def test_a_glob_pattern_names_the_matching_files_unless_a_file_is_named_like_the_pattern(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        (tmp_path / name).write_text("x")
    pattern = tmp_path / "*.jsonl"
    assert [path.name for path in paths_of(str(pattern))] == ["a.jsonl", "b.jsonl"]
    pattern.write_text("x")
    assert paths_of(str(pattern)) == [pattern]
    assert paths_of(str(tmp_path / "*.parquet")) == paths_of("somebody/data") == paths_of(None) == []


def test_the_fingerprint_of_a_mixture_depends_on_file_contents_and_weights_but_not_on_paths(tmp_path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b"):
            (tmp_path / folder / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')

    def of(folder: str, weight: float | None = None) -> str | None:
        parts = [{"name": str(tmp_path / folder / f"{name}.jsonl"), "weight": weight} for name in ("a", "b")]
        return fingerprints.of_data(parts)

    assert of("here") == of("there") != of("here", 2)
    whole = fingerprints.of_data(str(tmp_path / "here" / "*.jsonl"))
    (tmp_path / "here" / "b.jsonl").write_text('{"text": "c"}\n')
    assert of("here") != of("there") and fingerprints.of_data(str(tmp_path / "here" / "*.jsonl")) != whole


def test_the_title_of_a_long_mixture_names_three_datasets_and_counts_the_rest():
    assert title(["a", {"name": "b"}, "c", "d", "e"]) == "a, b, c and 2 more"
