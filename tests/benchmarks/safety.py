"""Is a plan safe? Random trainings on this CPU, each under a limit of what was planned for it.

    python -m tests.benchmarks.safety [--cases 100] [--seed 17] [--workers 1]

The measure of "Can I fine-tune this?" estimators (arXiv 2510.21048): how many runs go out of memory
under their estimate, and how much of it nobody needed. `--memory_limit` counts from the moment
before the model is loaded: the libraries and the data are not in a plan. What a training of a model
of almost no size takes from there on is measured first, and added to each limit.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import psutil

from tests.benchmarks.resident import ALLOCATOR

Json = dict[str, object]
# On a CPU oneDNN keeps compiled kernels for each shape it has met in bf16, tens of MiB of them.
_NO_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1", "LRU_CACHE_CAPACITY": "1"}
SMALLEST = 400 << 20  # bytes of a plan: a dozen MiB of Python's own objects must not decide
_WIDTHS = {"hidden_size": (384, 512, 768), "num_hidden_layers": (2, 4, 6), "vocab_size": (8_000, 32_000)}
_OPTIMIZERS = "adamw_torch adamw_torch_fused adafactor sgd adagrad rmsprop adamw_bnb_8bit lion_32bit lion_8bit"
_OPTIMIZERS += " paged_adamw_32bit ademamix_8bit rmsprop_bnb"


@dataclass(frozen=True)
class Case:
    """One training: a model's config.json, and the flags of train.py beside model and data."""

    number: int
    config: Json
    flags: tuple[str, ...]


# --- What is drawn -------------------------------------------------------------------------------


def cases(seed: int) -> Iterator[Case]:
    """Legal and illegal ones: `planned` returns None for those."""
    number = 0
    while True:
        draw = random.Random(f"{seed} {number}")
        config = _config(draw)
        yield Case(number, config, tuple(_flags(draw, config)))
        number += 1


def _config(draw: random.Random) -> Json:
    family = draw.choice("llama qwen2 qwen3 mistral gemma2 gpt2 opt phi bert qwen3_moe".split())
    width, layers, words = (draw.choice(sizes) for sizes in _WIDTHS.values())
    heads = width // 64
    config: Json = {"model_type": family, "vocab_size": words, "max_position_embeddings": 1024}
    if family == "gpt2":
        return {**config, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    config |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    if family == "opt":
        return {**config, "ffn_dim": 4 * width, "word_embed_proj_dim": width}
    config["intermediate_size"] = draw.choice((2, 4)) * width
    if family in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "qwen3_moe"):
        config["num_key_value_heads"] = heads // draw.choice([one for one in (1, 2) if heads % one == 0])
        config["tie_word_embeddings"] = draw.random() < 0.5
        config["head_dim"] = 64
    if family == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    return config


def _flags(draw: random.Random, config: Json) -> Iterator[str]:
    yield from ("--recipe", draw.choice(("baseline", "standard", "fast")), "--max_steps", "3")
    if config["model_type"] == "bert":
        yield from ("--task", "sequence_classification")
    chosen = {
        "max_length": draw.choice((64, 128, 256, 384)),
        **_batch(draw),
        "optim": draw.choice(_OPTIMIZERS.split()),
        "weight_decay": draw.choice((0.0, 0.1)),
        "gradient_checkpointing": draw.random() < 0.3,
        "save_strategy": draw.choice(("no", "steps")),
        "save_steps": 2,
    }
    if draw.random() < 0.5:
        chosen |= {"eval_strategy": "steps", "eval_steps": 2}
        chosen |= {"dataset_train_split": "train[:80%]", "dataset_test_split": "train[80%:]"}
        chosen["per_device_eval_batch_size"] = draw.choice((1, 4, 16, 32))
    if draw.random() < 0.3:
        chosen["bf16"] = True
    if draw.random() < 0.4:
        chosen |= {"use_peft": True, "lora_r": draw.choice((4, 16, 64)), "lora_dropout": draw.choice((0.0, 0.1))}
        chosen["use_dora"] = draw.random() < 0.3
        if draw.random() < 0.3:
            chosen["load_in_4bit"] = True
    for name, value in chosen.items():
        yield from (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))


def _batch(draw: random.Random) -> Json:
    """Half of the cases leave it to the planner, which gets a limit: see `_planned`."""
    if draw.random() < 0.5:
        return {"global_batch_size": 8}
    return {
        "per_device_train_batch_size": draw.choice((1, 2, 4, 8)),
        "gradient_accumulation_steps": draw.choice((1, 1, 2)),
    }


# --- What is measured ----------------------------------------------------------------------------


_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_WITH_ALL = "--recipe standard --max_steps 4 --max_length 64 --save_strategy steps --save_steps 2 --eval_strategy steps"
_WITH_ALL += " --eval_steps 2 --dataset_train_split train[:80%] --dataset_test_split train[80%:]"


def own_bytes(folder: Path) -> int:
    """What Python and the libraries' threads take in a training, beside its tensors."""
    case = Case(0, {"model_type": "llama", "vocab_size": 300, **_TINY}, tuple(_WITH_ALL.split()))
    limited = [*_written(case, folder), "--memory_limit", "4"]
    ran = _in_a_child(lambda: _trained(limited, folder / "log"), folder / "ran.json")
    assert ran and ran["code"] == 0, (folder / "log").read_text()
    return max(ran["needed"], ran["reserved"])


def result(case: Case, own: int, folder: Path) -> Json | None:
    """Planned and needed bytes, and how the training ended; None if it is not legal, or small."""
    argv = _written(case, folder)
    usable = round(random.Random(case.number).uniform(0.3, 2) * 1e9)
    plan = _in_a_child(lambda: _planned(argv, usable), folder / "plan.json")
    if plan is None or plan["bytes"] < SMALLEST:
        return None
    if "--use_peft" in case.flags:
        _in_a_child(lambda: _saved_weights(folder / "model"), folder / "saved.json")
    micro = ("--per_device_train_batch_size", str(plan["micro"])) if "--global_batch_size" in argv else ()
    plan["bytes"] += own
    limited = [*argv, *micro, "--memory_limit", repr(plan["bytes"] / 1e9)]
    ran = _in_a_child(lambda: _trained(limited, folder / "log"), folder / "ran.json") or {"code": "killed"}
    return {"case": case.number, "model": case.config["model_type"], "flags": " ".join(case.flags), **plan, **ran}


def _written(case: Case, folder: Path) -> list[str]:
    from launch.data.demo import demo_tokenizer

    model, rows = folder / "model", folder / "data.jsonl"
    model.mkdir()
    demo_tokenizer().save_pretrained(model)
    (model / "config.json").write_text(json.dumps({**case.config, "pad_token_id": 0, "num_labels": 2}))
    draw = random.Random(case.number)
    given = dict(zip(case.flags[::2], case.flags[1::2], strict=True))
    # A fifth is for evaluations: enough for a whole batch, though several texts may share a row.
    count = max(200, 15 * int(given.get("--per_device_eval_batch_size", 0)))
    # Most are longer than --max_length, so that in 3 steps a cut one meets accumulated gradients.
    texts = [" ".join(str(draw.random()) for _ in range(draw.choice((3, 10, 30, 30, 30, 30)))) for _ in range(count)]
    labels = {"label": 0} if "--task" in case.flags else {}
    rows.write_text(
        "".join(
            json.dumps({"text": text, **labels, **_label(labels, place)}) + "\n" for place, text in enumerate(texts)
        )
    )
    return [
        *("--model_name_or_path", str(model), "--dataset_name", str(rows)),
        *("--output_dir", str(folder / "out"), "--report_to", "none", *case.flags),
        *(() if "--use_peft" in case.flags else ("--from_scratch", "true")),
    ]


def _label(labels: Json, place: int) -> Json:
    return {"label": place % 2} if labels else {}


def _saved_weights(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)


def _planned(argv: list[str], usable: int) -> Json | None:
    """The run at its own micro-batch, or at the largest that fits `usable` bytes."""
    from launch.training.model import load_config, load_tokenizer
    from recipes.errors import UserError
    from recipes.planner.fits import MARGIN
    from recipes.planner.plan import plan_run
    from recipes.rules.check import require_legal
    from recipes.run import resolve

    try:
        run = resolve(argv)
        require_legal(run)
        as_it_is = run.explicit("per_device_train_batch_size")
        found = plan_run(run, load_config(run, load_tokenizer(run)), 64 << 30 if as_it_is else usable, as_it_is)
    except UserError:
        return None
    if not found.fits:
        return None
    total = found.total_bytes
    return {"planned": total, "bytes": round(total * (1 + MARGIN)), "micro": found.micro_batch, "traced": found.traced}


def _trained(argv: list[str], log: Path) -> Json:
    from launch import train
    from launch.host import memory

    before = of_files = data = 0

    def limit_from_here(limit_bytes: int, cuda: bool) -> None:
        nonlocal before, of_files, data
        before, of_files, data = psutil.Process().memory_info().rss, _bytes("RssFile"), _bytes("VmData")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: see proc(5)
        limit(limit_bytes + before, cuda)

    limit = memory.limit
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    with patch.object(memory, "limit", limit_from_here):
        code = train.main(argv)
    code_of_kernels = _bytes("RssFile") - of_files
    needed = memory.peak(cuda=False) - before - code_of_kernels
    return {"code": code, "needed": needed, "reserved": _bytes("VmData") - data}


def _bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _in_a_child(work: Callable[[], Json | None], told: Path) -> Json | None:
    """What `work` returns in a fork of this process, which has imported everything."""
    child = os.fork()
    if not child:
        try:
            told.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return json.loads(told.read_text()) if told.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the logs of runs that did not end well")
    options = parser.parse_args()
    wanted = {**ALLOCATOR, **_NO_CACHES, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # read when a process starts
        _, most = resource.getrlimit(resource.RLIMIT_STACK)
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, most))  # of threads: reserved, hardly used
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], {**os.environ, **wanted})
    import bitsandbytes  # noqa: F401  what a training imports is not a part of a plan
    import deepspeed  # noqa: F401

    _preload()
    found = [one for one in _all(options) if one]
    return _summary(found)


def _preload() -> None:
    """Import once what every case needs: each is a fork of this process."""
    from recipes.rules.check import check
    from recipes.run import resolve

    for name in ("launch.train", "launch.training.build", "launch.data.load", "launch.commands.plan", "peft"):
        importlib.import_module(name)
    check(resolve([]))  # it keeps what it has read of the libraries' source
    gc.freeze()


def _all(options: argparse.Namespace) -> Iterator[Json | None]:
    drawn, done = cases(options.seed), 0
    with tempfile.TemporaryDirectory() as name:
        own = own_bytes(Path(name))
    print(f"a training of a model of almost no size takes {own / 2**20:.0f} MiB beside what it imports", flush=True)
    with ThreadPoolExecutor(options.workers) as pool:
        while done < options.cases:
            batch = [next(drawn) for _ in range(min(2 * options.workers, options.cases - done))]
            for one in pool.map(lambda case: _one(case, own, options.keep), batch):
                done += one is not None
                yield one


def _one(case: Case, own: int, keep: Path | None) -> Json | None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = result(case, own, folder)
        if one is None:
            return None
        over = one["bytes"] / one["needed"] - 1 if one.get("needed") else float("nan")
        print(f"{one['code']} {over:+.1%} {one['bytes'] / 2**20:.0f} MiB {one['model']} {one['flags']}", flush=True)
        if keep and one["code"]:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{case.number}.log").write_text((folder / "log").read_text())
        return {**one, "over": over}


def _summary(found: list[Json]) -> int:
    failed = [one for one in found if one["code"]]
    over = sorted(one["over"] for one in found if not one["code"])
    print(f"\n{len(found)} trainings: {len(failed)} ran out of what was planned (with its margin)")
    if over:
        print(
            f"limit above what was needed: median {over[len(over) // 2]:+.1%}, from {over[0]:+.1%} to {over[-1]:+.1%}"
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
