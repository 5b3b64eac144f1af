"""From a file to the first step: train.py beside TRL's SFTTrainer with the same data and settings.

    python -m tests.benchmarks.data [--megabytes 400] [--processes 1] [--without_trl]

Writes a file of texts made of Python's own source, trains a small model on it packed, and
starts the same command a second time. Prints for each the seconds to the first step. train.py's
ranks wait 20 s for each other in the process group, which is shorter than the tokenizing and must
not matter.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from launch.data.demo import END_OF_TEXT, PADDING, demo_corpus

LENGTH, STEPS, BATCH = 1024, 12, 8
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
STEP = re.compile(r"step +\d+/|\{'loss'")


# --- What is trained ------------------------------------------------------------------------------


def write_model(folder: Path) -> None:
    """A small decoder and a tokenizer of 16,000 pieces that was trained on the same source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = [END_OF_TEXT, PADDING]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16000, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(demo_corpus(), trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=PADDING)
    whole.save_pretrained(folder)
    config = LlamaConfig(vocab_size=16000, max_position_embeddings=LENGTH, use_cache=False, **SHAPE)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_rows(file: Path, size: int) -> None:
    """Texts of lengths with a long tail, until the file has `size` bytes."""
    source, random = "".join(demo_corpus()), Random(0)
    with file.open("w", encoding="utf-8") as stream:
        while stream.tell() < size:
            length = int(min(20_000, max(10, 1200 * random.lognormvariate(0, 1))))
            start = random.randrange(len(source) - length)
            stream.write(json.dumps({"text": source[start : start + length]}) + "\n")


def ours(model: Path, data: Path, output: Path) -> list[str]:
    flags = {"model_name_or_path": model, "dataset_name": data, "output_dir": output, "max_length": LENGTH}
    flags |= {"recipe": "fast", "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    flags |= {"per_device_train_batch_size": 1, "global_batch_size": BATCH, "ddp_timeout": 20}
    return ["launch/train.py", *(word for name, value in flags.items() for word in (f"--{name}", str(value)))]


def trls(model: Path, data: Path, output: Path) -> list[str]:
    return ["tests/benchmarks/data.py", "--sft", str(model), str(data), str(output)]


def train_with_trl(model: str, data: str, output: str) -> None:
    """The same training by SFTTrainer, with the same recipe's arguments."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    from recipes import fast

    same = dict(max_steps=STEPS, logging_steps=1, save_strategy="no", disable_tqdm=True)
    args = fast(
        output, args_class=SFTConfig, max_length=LENGTH, per_device_train_batch_size=1, global_batch_size=BATCH, **same
    )
    args.dataset_num_proc = os.cpu_count()
    rows = load_dataset("json", data_files=data, split="train")
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()


# --- How it is measured ---------------------------------------------------------------------------


def seconds_to_first_step(command: list[str], cache: Path, processes: int) -> float:
    environment = {**os.environ, "HF_HOME": str(cache), "PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        environment["ACCELERATE_USE_CPU"] = "true"
    begun, found, output = time.perf_counter(), 0.0, []
    process = subprocess.Popen(
        [*launcher, *command], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if STEP.search(line) and not found:
            found = time.perf_counter() - begun
    if process.wait():
        sys.exit("".join(output[-30:]))
    return found


def main() -> None:
    if sys.argv[1:2] == ["--sft"]:
        train_with_trl(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.data")
    parser.add_argument("--megabytes", type=int, default=400, help="size of the file [400]")
    parser.add_argument("--processes", type=int, default=1, help="ranks [1]")
    parser.add_argument("--without_trl", action="store_true", help="only train.py")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, data = folder / "model", folder / "rows.jsonl"
        write_model(model)
        write_rows(data, options.megabytes * 10**6)
        programs = {"train.py": ours} | ({} if options.without_trl else {"SFTTrainer": trls})
        for name, command in programs.items():
            for number, when in enumerate(("first", "second")):
                words = command(model, data, folder / f"{name}-{number}")
                seconds = seconds_to_first_step(words, folder / f"cache of {name}", options.processes)
                print(f"{name:<11} {when:<6} start: {seconds:7.1f} s to the first step", flush=True)


if __name__ == "__main__":
    main()
