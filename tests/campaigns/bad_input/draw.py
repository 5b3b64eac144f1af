"""Draws a case: a valid command, and something in it or in one of its files made wrong."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.campaigns.bad_input import mutate
from tests.campaigns.bad_input.case import Case
from tests.campaigns.bad_input.world import RUN


@dataclass(frozen=True)
class Seed:
    """A legal command in the valid world, and the files that it reads."""

    kind: str
    command: str
    files: tuple[str, ...] = ()
    weight: int = 1
    to_the_end: bool = False

    @property
    def argv(self) -> list[str]:
        return self.command.split()


_TRAIN = "train.py --model_name_or_path model --recipe baseline --max_steps 1 --output_dir out --max_length 64"
_CLASSES = "--task sequence_classification"
_RESUME = " ".join(RUN).replace("run", "unfinished")
_SMALL = ("trainer_state.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def _seeds() -> list[Seed]:
    texts = ("texts.jsonl", "texts.json", "texts.csv", "texts.txt", "texts.parquet", "pairs.jsonl", "pairs.csv")
    chats = ("chats.jsonl", "chats.json", "chat_pairs.jsonl", "chat_pairs.parquet")
    tokens = ("tokens.jsonl", "tokens.parquet")
    labels = ("labels.csv", "numbers.jsonl", "names.jsonl", "numbers.parquet", "names.parquet")
    found = [
        *(
            Seed("data", f"{_TRAIN} --dataset_name data/{name}", (f"data/{name}",), 2)
            for name in (*texts, *chats, *tokens)
        ),
        *(Seed("data", f"{_TRAIN} --dataset_name data/{name} {_CLASSES}", (f"data/{name}",), 2) for name in labels),
        Seed("data", f"{_TRAIN} --dataset_name data/chats.jsonl --assistant_only_loss", ("data/chats.jsonl",), 2),
        *(
            Seed("data", f"{_TRAIN} --dataset_name data/{name}.jsonl", (f"data/{name}.jsonl",), 2)
            for name in ("sharegpt", "alpaca", "tools", "mixed")
        ),
        Seed("data", f"{_TRAIN} --dataset_name data/texts.jsonl --dataset_streaming", ("data/texts.jsonl",)),
        Seed("config", "check --config mixture.yaml", ("mixture.yaml",), 2),
        Seed("config", f"{_TRAIN} --config mixture.yaml", ("mixture.yaml",), 2),
        Seed("data", f"{_TRAIN} --dataset_name data/texts.jsonl --packing", ("data/texts.jsonl",)),
        Seed("data", f"{_TRAIN} --dataset_name data/folder", ("data/folder/train.jsonl", "data/folder/test.jsonl"), 2),
        Seed(
            "data",
            f"{_TRAIN} --dataset_name data/saved --eval_strategy steps --eval_steps 1",
            ("data/saved/dataset_dict.json", "data/saved/train/state.json", "data/saved/train/dataset_info.json"),
            2,
        ),
        Seed("model", f"{_TRAIN} --dataset_name data/texts.jsonl", tuple(f"model/{name}" for name in _SMALL[1:]), 2),
        Seed("model", f"{_TRAIN} --dataset_name data/labels.csv {_CLASSES}", ("model/config.json",)),
        Seed("config", "check --config config.yaml", ("config.yaml",), 5),
        Seed("config", "train --config config.yaml", ("config.yaml",), 2),
        Seed("config", "plan --gpu L4 --config config.yaml", ("config.yaml",)),
        Seed("recipe", "check --recipe mine.yaml", ("mine.yaml",), 3),
        Seed("recipe", "check --recipe on_top.yaml", ("mine.yaml", "on_top.yaml"), 2),
        Seed("recipe", "show mine.yaml", ("mine.yaml",)),
        Seed("recipe", "copy mine.yaml written.yaml", ("mine.yaml",)),
        Seed("recipe", "check --recipe mine.py:mine", ()),
        Seed("accelerate", "check --accelerate_config standard.yaml", ("standard.yaml",), 2),
        Seed("accelerate", "check --recipe sharded --gpu L4 --accelerate_config sharded.yaml", ("sharded.yaml",), 3),
        Seed("accelerate", "check --recipe memory --accelerate_config memory.yaml", ("memory.yaml",), 2),
        Seed("accelerate", "check --recipe memory_zero3 --accelerate_config memory_zero3.yaml", ("memory_zero3.yaml",)),
        Seed("accelerate", "train --accelerate_config standard.yaml", ("standard.yaml",)),
        Seed("accelerate", "submit local --dry_run --accelerate_config fast.yaml --recipe fast", ("fast.yaml",)),
        Seed(
            "accelerate",
            "check --accelerate_config accelerate_with_json.yaml",
            ("accelerate_with_json.yaml", "deepspeed.json"),
            3,
        ),
        Seed("engine", "check --deepspeed deepspeed.json", ("deepspeed.json",), 3),
        Seed("engine", "check --accelerator_config accelerator.json", ("accelerator.json",)),
        Seed("engine", "train.py --output_dir out --deepspeed deepspeed.json", ("deepspeed.json",)),
        Seed("site", "submit slurm --gpus_per_node 2 --dry_run", ("site/accelerate-recipes/site.yaml",), 3),
        Seed("azure", "check --azureml azure.yaml", ("azure.yaml",), 2),
        Seed("record", "compare run unfinished", ("run/run.json", "unfinished/run.json"), 3),
        Seed("record", "compare run unfinished --json --target train_loss 2", ("run/run.json",)),
        Seed("record", "show ./run", ("run/run.json",), 2),
        Seed("record", "diff run fast", ("run/run.json",), 2),
        Seed("record", "diff ./run ./unfinished --json", ("run/run.json",)),
        Seed("record", "rerun run --dry_run --output_dir again", ("run/run.json",), 3),
        Seed("record", "rerun run --dry_run --exact", ("run/run.json",)),
        Seed("record", "check --config run/run.json", ("run/run.json",), 2),
        Seed("record", f"train.py {_RESUME} --max_steps 2", ("unfinished/run.json",), 2),
        Seed("note", "status run", ("run/submission.json", "run/run.json", "run/train.log"), 2),
        Seed("note", "status .", ("run/submission.json", "slurm/submission.json", "unfinished/run.json"), 2),
        Seed("note", "logs run", ("run/submission.json", "run/train.log"), 2),
        Seed("note", "logs slurm", ("slurm/submission.json",)),
        Seed("note", "submit local -- --output_dir run", ("run/submission.json", "run/out_of_memory.json"), 2),
        Seed("fit", f"check {' '.join(RUN)} --max_steps 2", ("run/fit.json",), 2),
        Seed("adapter", "merge adapter", ("adapter/adapter_config.json", "adapter/run.json", "model/config.json"), 2),
        Seed("data", f"{_TRAIN.replace('train.py', 'prepare')} --dataset_name data/chats.jsonl", ("data/chats.jsonl",)),
        Seed("timings", "scale report timings.jsonl --output report", ("timings.jsonl",), 2),
        Seed("timings", "scale report timings.csv --output report", ("timings.csv",), 2),
        Seed("timings", "check --measure timings.csv", ("timings.csv",)),
        Seed(
            "checkpoint",
            f"train.py {_RESUME} --max_steps 3",
            tuple(f"unfinished/checkpoint-2/{name}" for name in _SMALL),
            2,
            to_the_end=True,
        ),
    ]
    commands = (
        "list", "show fast", "show fast --diff standard --num_processes 2", "copy fast written.yaml",
        "where train.py",
        "plan --model 1.2B --gpu L4 --num_processes 4", "check --recipe fast --num_processes 2 --learning_rate 1e-4",
        "check --gpu L4 --model_name_or_path model --use_peft", "fit --recipe fast --num_processes 2",
        "doctor --num_processes 2",
        "train --recipe fast --num_processes 2 --max_steps 1", "rerun run --dry_run",
        "submit local --dry_run -- --max_steps 3",
        "submit slurm --nodes 2 --gpus_per_node 4 --cpus_per_task 32 --time 8:00:00 --dry_run -- --seed 1",
        "submit azureml --nodes 2 --processes_per_node 8 --compute gpus --data azureml:texts:1 --dry_run",
        "status run", "logs run",
        "compare run unfinished --target train_loss 2", "diff run fast",
        "scale run --num_processes 1 2 --recipe standard",
        "scale report timings.jsonl --output report", "explain accumulation",
        f"{_TRAIN} --dataset_name data/texts.jsonl",
        f"check {' '.join(RUN)}", "check --accelerate_config memory --recipe memory",
    )  # fmt: skip
    return [*found, *(Seed("flags", command, (), 4) for command in commands)]


SEEDS = _seeds()
_READERS = ("list", "show", "check", "compare", "diff", "status", "logs", "where", "plan")
_FILES: dict[str, Callable[[Random, bytes], bytes]] = {
    ".jsonl": mutate.json_lines, ".json": mutate.json_file, ".yaml": mutate.yaml_file, ".csv": mutate.csv_file,
}  # fmt: skip
_NAMES = [
    "a[1]",
    "a*",
    "a?b",
    "a::b",
    "a b",
    "é",
    "a\nb",
    "-a",
    "a{b,c}",
    "a#b",
    "a%20b",
    "[a",
    "a:b",
    "~a",
    "$a",
    "\udce9",
    "A" * 200,
]


def draw(random: Random, world: Path) -> Case:
    """A case of the kind that its seed has; the same random numbers draw the same."""
    seed = random.choices(SEEDS, [one.weight for one in SEEDS])[0]
    argv, files = seed.argv, {}
    if not seed.files or random.random() < 0.05:
        for _ in range(random.choice([1, 1, 2])):
            argv = mutate.argv(random, argv, _flags())
    elif seed.kind == "data" and random.random() < 0.08:
        argv, files = _renamed(random, seed, world)
    else:
        name = random.choice(seed.files)
        files = {name: _changed(random, name, (world / name).read_bytes())}
    if argv[:2] == ["submit", "local"] and "--dry_run" not in argv:
        argv = argv if "--" in argv else [*argv, "--dry_run"]
    only_reads = argv[0] in _READERS or (argv == seed.argv and "unfinished" not in argv)
    return Case(seed.kind, argv, files, seed.to_the_end, only_reads)


def _changed(random: Random, name: str, valid: bytes) -> bytes | None:
    if random.random() < 0.02:
        return None
    suffix = Path(name).suffix
    if suffix == ".parquet":
        return _parquet(random, valid)
    return _FILES.get(suffix, mutate.any_bytes)(random, valid)


def _renamed(random: Random, seed: Seed, world: Path) -> tuple[list[str], dict[str, bytes | None]]:
    """The same data under a name that a library may take for something else."""
    old, new = Path(seed.files[0]), random.choice(_NAMES)
    where = Path("data", new, old.name) if random.random() < 0.3 else old.with_name(new + old.suffix)
    argv = [str(where) if word == str(old) else word for word in seed.argv]
    return argv, {str(where): (world / old).read_bytes()}


def _parquet(random: Random, valid: bytes) -> bytes:
    """Damaged bytes, or a whole file whose columns have other types."""
    if random.random() < 0.3:
        return mutate.any_bytes(random, valid)
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(io.BytesIO(valid))
    name = random.choice(table.column_names)
    place, rows = table.column_names.index(name), len(table)
    kinds: list[Callable[[], Any]] = [
        lambda: pyarrow.array([None] * rows),
        lambda: pyarrow.array(list(range(rows))),
        lambda: pyarrow.array([n / 2 for n in range(rows)]),
        lambda: pyarrow.array([n % 2 == 0 for n in range(rows)]),
        lambda: pyarrow.array([b"\xe9"] * rows),
        lambda: pyarrow.array(["a", "b"] * (rows // 2)).dictionary_encode(),
        lambda: pyarrow.array(["a", None] * (rows // 2)),
        lambda: pyarrow.array([[1, 2]] * rows),
        lambda: pyarrow.array([["a", "b"]] * rows),
        lambda: pyarrow.array([[[1], [2]]] * rows),
        lambda: pyarrow.array([{"a": 1}] * rows),
        lambda: pyarrow.array([[{"role": "user"}]] * rows),
        lambda: pyarrow.array([1] * rows, pyarrow.timestamp("us")),
        lambda: pyarrow.array([1] * rows, pyarrow.decimal128(10, 2)),
        lambda: pyarrow.array([10**9 * n for n in range(rows)]),
        lambda: pyarrow.array([float("nan")] * rows),
        lambda: pyarrow.array([[1.5, None]] * rows),
        lambda: pyarrow.array(["x"] * rows, pyarrow.large_string()),
    ]
    way = random.random()
    if way < 0.1:
        table = table.drop_columns([name])
    elif way < 0.2:
        table = table.slice(0, 0)
    elif way < 0.3:
        table = table.append_column(
            random.choice(["text", "messages", "prompt", "label", "input_ids", ""]), random.choice(kinds)()
        )
    else:
        table = table.set_column(place, name, random.choice(kinds)())
    written = io.BytesIO()
    pyarrow.parquet.write_table(table, written)
    return written.getvalue()


def _flags() -> list[str]:
    from recipes import legal

    own = "num_processes nodes processes_per_node accelerate_config gpu json deep dry_run output exact target follow"
    # --fresh moves what a mistyped output folder holds.
    return [name for name in [*legal.settings(), *own.split()] if name != "fresh"]
