"""A run that somebody might write, as plain data, and what really becomes of it.

A `Case` is written into a folder of its own, in which all its commands work as they are printed.
`tried` starts it there as its launcher would, in forks of this process, which has imported
everything: the real code of `accelerate launch` reads the YAML and decides, and only where it would
start processes, ranks are forked. Each rank is train.py as it is, with somebody who watches.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import yaml

from launch.host.processes import free_port
from launch.host.signals import end_with_parent
from recipes.catalog import RECIPES
from recipes.run.files import Json, shipped
from tests.support.running import ROOT, SCRIPT

REMOVED = "(removed)"  # the value of a key that is taken out of a file
DEMONSTRATION = "demonstration"  # the name of the model and the data that a run does not name
YAML, DEEPSPEED_JSON, CONFIG = "accelerate.yaml", "ds.json", "run.yaml"
FSDP_JSON, OWN_RECIPE = "fsdp.json", "mine.yaml"
FILES = {"yaml": YAML, "json": DEEPSPEED_JSON, "config": CONFIG, "fsdp": FSDP_JSON, "own": OWN_RECIPE}


@dataclass(frozen=True)
class Change:
    """Something that a case does differently: a `flag`, a key of a file in FILES, or a `variable`.

    `name` is a flag, or the keys on the way into the file with dots between them. The value of a
    flag is a list of the words that follow it.
    """

    where: str
    name: str
    value: Any = None


@dataclass(frozen=True)
class Case:
    """`launcher` is python, torchrun or accelerate. `processes` is None where only the YAML says
    it. `yaml` is the shipped file that the Accelerate YAML begins with; without one, `accelerate`
    takes the recipe's own.
    With `lifted` accelerate does not refuse to shard on a CPU, as in tests/support/fsdp_on_cpu.py.
    """

    launcher: str = "python"
    processes: int | None = None
    yaml: str = ""
    model: str = "llama"
    data: str = "texts.jsonl"
    lifted: bool = False
    changes: tuple[Change, ...] = ()

    def of(self, where: str) -> list[Change]:
        return [change for change in self.changes if change.where == where]

    def without(self, dropped: Iterable[Change]) -> Case:
        gone = list(dropped)
        return replace(self, changes=tuple(change for change in self.changes if change not in gone))

    def with_flags(self, **flags: str) -> Case:
        """The case with these flags besides, or with another value of theirs."""
        kept = [change for change in self.changes if change.where != "flag" or change.name not in flags]
        return replace(self, changes=(*kept, *(Change("flag", name, [value]) for name, value in flags.items())))


# --- As commands and files ------------------------------------------------------------------------


def flags(case: Case) -> list[str]:
    """The command line of train.py: two steps of a tiny model, unless the case says otherwise."""
    ours = {"max_length": "64", "max_steps": "2", "output_dir": "out"}
    if case.model != DEMONSTRATION:
        ours = {"model_name_or_path": f"models/{case.model}", "dataset_name": f"data/{case.data}", **ours}
    changed = {change.name for change in case.changes if change.where in ("flag", "config")}
    words = [word for name, value in ours.items() if name not in changed for word in (f"--{name}", value)]
    if case.of("config"):
        words += ["--config", CONFIG]
    for change in case.of("flag"):
        words += [f"--{change.name}", *change.value]
    return words


def launch(case: Case) -> list[str]:
    """The words before train.py's own."""
    if case.launcher == "accelerate":
        asked = ["--num_processes", str(case.processes)] if case.processes is not None else []
        return ["accelerate", "launch", "--config_file", YAML if case.yaml else _own_yaml(case), *asked, str(SCRIPT)]
    if case.launcher == "torchrun":
        return ["torchrun", "--nproc_per_node", str(case.processes), str(SCRIPT)]
    return ["python", str(SCRIPT)]


def _own_yaml(case: Case) -> str:
    """As `recipes train` launches where no YAML is named: beside --deepspeed plain DDP's."""
    if any(change.name == "deepspeed" for change in case.changes if change.where in ("flag", "config", "own")):
        return str(shipped("standard.yaml"))
    asked = [change.value for change in case.changes if change.name == "recipe"]
    name = asked[-1] if asked and isinstance(asked[-1], str) else (asked or [["standard"]])[-1][0]
    own = contents(case).get(OWN_RECIPE, {}) if name == OWN_RECIPE else {}
    if (engine := shipped(str(own.get("engine", "missing.yaml")))).is_file():
        return str(engine)
    name = str(own.get("base", name))
    return str(shipped(RECIPES[name if name in RECIPES else "standard"]().engine))


def variables(case: Case) -> dict[str, str]:
    """The variables that the environment of the launch holds besides."""
    return {change.name: str(change.value) for change in case.of("variable")}


def contents(case: Case) -> dict[str, Json]:
    """The files of a case by name."""
    found = {}
    if case.yaml:
        found[YAML] = _changed(yaml.safe_load(shipped(case.yaml).read_text(encoding="utf-8")), case.of("yaml"))
    for where in sorted(set(FILES) - {"yaml"}):
        if case.of(where):
            found[FILES[where]] = _changed({}, case.of(where))
    return found


def _changed(content: Json, changes: list[Change]) -> Json:
    for change in changes:
        *way, last = change.name.split(".")
        place = content
        for key in way:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        if change.value == REMOVED:
            place.pop(last, None)
        else:
            place[last] = deepcopy(change.value)
    return content


def described(case: Case) -> str:
    """The command that checks it, the launch, and its files, for a person to copy."""
    check = ["recipes", "check", *(["--accelerate_config", YAML] if case.yaml else [])]
    check += ["--num_processes", str(case.processes)] if case.processes is not None else []
    lines = [shlex.join([*check, *flags(case)]), shlex.join([*launch(case), *flags(case)]).replace(f"{ROOT}/", "")]
    if case.lifted:
        lines.insert(0, "FSDP shards on CPU ranks")
    if named := variables(case):
        lines.insert(0, "export " + shlex.join(f"{name}={value}" for name, value in named.items()))
    return "\n".join([*lines, *(f"{name}: {json.dumps(content)}" for name, content in contents(case).items())])


def write(case: Case, folder: Path, material: Path) -> None:
    """Everything that the commands read, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("models", "data"):
        (folder / name).symlink_to(material / name)
    for name, content in contents(case).items():
        text = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
        (folder / name).write_text(text, encoding="utf-8")


# --- What drawn runs train on ---------------------------------------------------------------------

ROWS = 80
_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
_T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
# Folder -> class, its config's kind and sizes.
_MODELS = {
    "llama": ("LlamaForCausalLM", "llama", {**_WIDE, "max_position_embeddings": 256}),
    "llama-tied": ("LlamaForCausalLM", "llama", {**_WIDE, "tie_word_embeddings": True}),
    "llama-short": ("LlamaForCausalLM", "llama", {**_WIDE, "max_position_embeddings": 32}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", _GPT2),
    "opt": ("OPTForCausalLM", "opt", _OPT),
    "bert": ("BertForMaskedLM", "bert", _WIDE),
    "bert-classifier": ("BertForSequenceClassification", "bert", {**_WIDE, "num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", "t5", _T5),
}


def write_material(folder: Path) -> Path:
    """Tiny models in models/ and small files in data/, written once. Takes seconds."""
    if (folder / "complete").exists():
        return folder
    _write_models(folder / "models")
    texts = [f"Example {n} says " + "well " * (1 + n % 7) + "and ends." for n in range(ROWS)]
    chats = [
        [{"role": "user", "content": f"What is {n} and one?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
        for n in range(ROWS)
    ]
    rows = {
        "texts": [{"text": text} for text in texts],
        "few": [{"text": text} for text in texts[:3]],
        "pairs": [{"prompt": text[:12], "completion": text[12:]} for text in texts],
        "chats": [{"messages": chat} for chat in chats],
    }
    labels = [f"{text},{('bad', 'fair', 'good')[n % 3]}" for n, text in enumerate(texts)]
    files = {f"{name}.jsonl": "".join(json.dumps(row) + "\n" for row in content) for name, content in rows.items()}
    files |= {"texts.txt": "\n".join(texts), "labels.csv": "\n".join(["text,label", *labels])}
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / "data" / name).write_text(content, encoding="utf-8")
    (folder / "complete").touch()
    return folder


def _write_models(folder: Path) -> None:
    import torch
    import transformers
    from transformers.utils import logging

    from tests.support.models import chat_tokenizer

    logging.disable_progress_bar()
    tokenizer = chat_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    for name, (model, kind, sizes) in _MODELS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **ids, **sizes)
        getattr(transformers, model)(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "empty").mkdir()
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text("{}", encoding="utf-8")


# --- One rank -------------------------------------------------------------------------------------

# Variables of a rank: train.py's check is switched off; FSDP shards on a CPU; it ends at a moment.
UNCHECKED, LIFTED, MOMENT = "CAMPAIGN_UNCHECKED", "CAMPAIGN_LIFTED", "CAMPAIGN_MOMENT"


def rank(argv: list[str]) -> int:
    """Train in this process, which ends afterwards: nothing that is replaced here is put back.

    What was seen goes to observed/RANK.json in the current folder.
    """
    from launch import train

    if os.environ.get(UNCHECKED):
        _switch_off_the_check()
    if os.environ.get(LIFTED):
        from tests.support.fsdp_on_cpu import lift_the_refusal

        lift_the_refusal()
    seen: dict[str, Any] = {"rows": {}, "losses": []}
    _watch(seen)
    with contextlib.ExitStack() as stack:
        if MOMENT in os.environ:
            from tests.campaigns.resuming import watched

            stack.enter_context(watched("out"))
        try:
            return train.main(argv)
        finally:
            Path("observed").mkdir(exist_ok=True)
            file = Path("observed", f"{os.environ.get('RANK', 0)}.json")
            part = file.with_suffix(".part")  # the rank may be killed meanwhile
            part.write_text(json.dumps(seen, default=str), encoding="utf-8")
            part.rename(file)


def _switch_off_the_check() -> None:
    """Nothing is refused, and a value that is not of its setting's type is passed on."""
    from launch import train
    from recipes.run import command_line

    coerce = command_line.coerce

    def anything(value: object, known) -> object:
        try:
            return coerce(value, known)
        except ValueError:
            return float(value) if isinstance(value, str) and value in ("nan", "inf", "1.5") else value

    train.require_legal = lambda run: []
    train.require_constructible = lambda run: None
    command_line.coerce = anything


def _watch(seen: dict[str, Any]) -> None:
    """Two methods of Trainer write down what they do."""
    from transformers import Trainer

    train, step = Trainer.train, Trainer.training_step

    def watched_train(trainer, *args, **kwargs):
        try:
            return train(trainer, *args, **kwargs)
        finally:
            seen.update(_facts(trainer))

    def watched_step(trainer, model, inputs, *args, **kwargs):
        seen["rows"].setdefault(str(trainer.state.global_step + 1), []).extend(_rows(inputs))
        loss = step(trainer, model, inputs, *args, **kwargs)
        seen["losses"].append(float(loss))
        return loss

    Trainer.train, Trainer.training_step = watched_train, watched_step


def _rows(inputs) -> list[int]:
    """A checksum for each row of a micro-batch."""
    ids = inputs["input_ids"]
    if inputs.get("attention_mask") is not None:
        parts = [row[mask.bool()] for row, mask in zip(ids, inputs["attention_mask"], strict=True)]
    else:
        parts = list(ids)
    return [zlib.crc32(part.cpu().numpy().tobytes()) for part in parts]


def _facts(trainer) -> dict[str, Any]:
    """How it really trained: what accelerate and Trainer made of the settings."""
    accelerator, optimizer = trainer.accelerator, trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return {
        "engine": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "compiled": accelerator.state.dynamo_plugin.backend.value != "NO",
        "optimizer": type(optimizer).__name__,
        "examples": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else sys.maxsize,
        "steps": trainer.state.global_step,
        "weights": sum(float(_local(one).double().abs().sum()) for one in trainer.model.parameters()),
        "evaluations": sum("eval_loss" in entry for entry in trainer.state.log_history),
        "checkpoints": sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")),
    }


def _local(parameter):
    """This rank's shard, where the parameter is sharded."""
    parameter = getattr(parameter, "ds_tensor", parameter)
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


# --- All ranks, as the launcher starts them -------------------------------------------------------

_GRACE = 5  # seconds: a rank that another one leaves may still print why it ends too


def forked(work: Callable[[], int | None], environment: Mapping[str, str] | None = None) -> int:
    """The process id of a fork that does `work`, and ends with its exit code."""
    sys.stdout.flush()
    return os.fork() or _end_with(work, environment)


def _end_with(work: Callable[[], int | None], environment: Mapping[str, str] | None) -> NoReturn:
    code = 1
    try:
        end_with_parent()
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        code = work() or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(case: Case) -> int:
    """Run the case in the current folder to its end. Returns the launcher's exit code."""
    words = flags(case)
    if case.launcher == "python":
        return rank(words)
    if case.launcher == "torchrun":
        return _ranks(case.processes or 1, os.environ, words)
    return _accelerate([*launch(case)[2:], *words])


def _accelerate(words: list[str]) -> int:
    import torch.distributed.run as torchrun
    from accelerate.commands import launch as launcher

    def start_ranks(args) -> None:
        config, _, _ = torchrun.config_from_args(args)
        if code := _ranks(config.nproc_per_node, os.environ, args.training_script_args):
            raise SystemExit(code)

    class Started:
        def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
            self.pid, self.returncode = forked(lambda: rank(command[2:]), env), 0

        def wait(self) -> None:
            if code := os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]):
                raise SystemExit(code)

    torchrun.run = start_ranks
    launcher.subprocess = SimpleNamespace(Popen=Started, CalledProcessError=subprocess.CalledProcessError)
    launcher.launch_command(launcher.launch_command_parser().parse_args(words))
    return 0


def _ranks(count: int, environment: Mapping[str, str], words: list[str]) -> int:
    """Fork the ranks of one machine. Returns 0, or the exit code of the first that failed: as under
    torchrun, all others end with it.
    """
    world = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    running = set()
    for number in range(count):
        own = {"OMP_NUM_THREADS": 1, **world, "RANK": number, "LOCAL_RANK": number}
        running.add(forked(lambda: rank(words), {**environment, **{name: str(own[name]) for name in own}}))
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status:
            _end(running)
            return os.waitstatus_to_exitcode(status)
    return 0


def _end(ranks: set[int]) -> None:
    """Wait for those that one rank has left alone; after a while SIGTERM, and at last SIGKILL."""
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        for pid in ranks:
            os.kill(pid, number)
        deadline = time.monotonic() + _GRACE
        while ranks and time.monotonic() < deadline:
            ranks.discard(os.waitpid(-1, os.WNOHANG)[0])
            time.sleep(0.02)


# --- What becomes of it ---------------------------------------------------------------------------

SECONDS = 90  # a run takes one or two; only a hang takes as long


@dataclass
class Outcome:
    """`code` is the exit code of the launcher, None if it was killed because it took too long.

    `seen` is what each rank observed, `record` the run.json.
    """

    code: int | None
    output: str
    seen: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.code == 0 and self.record.get("status") == "finished"

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    @property
    def mistake(self) -> bool:
        """True if train.py refused it as a mistake of the user's, without a traceback."""
        before, printed, _ = f"\n{self.output}".partition("\nerror  ")
        return bool(self.code and printed) and "Traceback" not in before

    @property
    def processes(self) -> int:
        """How many processes trained one model together, as each of them saw it."""
        seen = {rank.get("processes") for rank in self.seen}
        return len(self.seen) if seen == {len(self.seen)} else -1

    @property
    def batch(self) -> int:
        """Examples of the first step over all ranks. Ranks that share their examples count once."""
        rows = [rank["rows"].get("1", []) for rank in self.seen]
        shared = len(rows) > 1 and all(own == rows[0] for own in rows) and len(set(rows[0])) > 1
        return len(rows[0]) if shared else sum(len(own) for own in rows)

    @property
    def trained(self) -> list[Any]:
        """Everything by which two trainings can be told apart, of each rank."""
        names = ("engine", "rows", "losses", "weights", "evaluations", "checkpoints")
        return [[rank.get(name) for name in names] for rank in self.seen]

    def last_words(self) -> str:
        """The line that says why it failed, as short as it can be copied."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip() and line.isprintable()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b.*:", line)]
        refused = [line for line in lines if line.startswith("error ")]
        return (errors or refused or lines or ["(no output)"])[-1][:240]


def tried(case: Case, *, checked: bool, seconds: float = SECONDS) -> Outcome:
    """Run a case that is written in the current folder."""
    environment = {**os.environ, **variables(case)}
    environment |= {name: "1" for name, is_set in ((UNCHECKED, not checked), (LIFTED, case.lifted)) if is_set}
    log = Path("log.txt")
    with log.open("wb") as stream:

        def work() -> int:
            os.setsid()
            os.dup2(stream.fileno(), 1)
            os.dup2(1, 2)
            return start(case)

        code = _ended(forked(work, environment), seconds)
    seen = [json.loads(file.read_text()) for file in sorted(Path("observed").glob("*.json"))]
    records = [file for file in sorted(Path().rglob("run.json")) if file.is_file()]
    return Outcome(code, log.read_text(errors="replace"), seen, json.loads(records[0].read_text()) if records else {})


def _ended(pid: int, seconds: float) -> int | None:
    """The exit code of a process, None if it took longer. Its whole session is dead afterwards."""
    deadline, code = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        for _ in range(100):  # a rank that is still dying holds the lock of the output folder
            os.killpg(pid, 0)
            time.sleep(0.02)
    return code


# --- Many of them, in processes that have imported everything -------------------------------------

Item, Result = TypeVar("Item"), TypeVar("Result")
# Runs are forked from processes that have imported this, which saves each of them ten seconds.
_IMPORTED = """
    deepspeed accelerate.commands.launch torch.distributed.run peft bitsandbytes
    launch.train launch.output.resume launch.training.trainer launch.training.model tests.support.fsdp_on_cpu
""".split()


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for a campaign, and what each of its processes finds in its environment.

    Before torch is imported.
    """
    own = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    own["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"  # killed runs leave their locks behind
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        os.environ.update(own, HF_HOME=f"{folder}/hf")
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
        yield Path(folder)


def results(work: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`work` of every item, in any order. A worker that dies ends the campaign with an error."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _prepare) as pool:
        try:
            for done in as_completed([pool.submit(work, item) for item in items]):
                yield done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _prepare() -> None:
    end_with_parent()
    for name in _IMPORTED:
        importlib.import_module(name)
    with contextlib.suppress(Exception):  # DeepSpeed's compiled optimizer: looking for it takes three seconds
        importlib.import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load(verbose=False)
    gc.freeze()
