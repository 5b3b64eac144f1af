"""How the processes that train together (the world) start, wait for each other and leave."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock

from launch.host.launcher import threads_per_process
from launch.host.processes import free_port
from recipes.errors import Failure, UserError, mistake, one_line
from recipes.rules.probe import arguments_for
from recipes.run import Place, RunSpec, here
from recipes.run.engine import launch_environment

if TYPE_CHECKING:
    from torch.distributed import Store
    from transformers import TrainingArguments

T = TypeVar("T")
_DROPPED_SECONDS = 0.1  # far longer than a thread takes to drop a tensor


@dataclass(frozen=True)
class World:
    size: int = 1
    rank: int = 0
    local_size: int = 1

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    @property
    def is_main(self) -> bool:
        """True on rank 0, the rank that prints."""
        return self.rank == 0

    def place(self) -> Place:
        """Describe this launched process: its machine, and the engine of its launcher."""
        return here(self.size, local_world_size=self.local_size, launched=True)

    @contextlib.contextmanager
    def meeting(self, timeout: float) -> Iterator[None]:
        """Hold each rank at the block's end until all ranks are there. This needs no process group.
        In the block, one node may take hours longer than another.

        On a single node, nobody waits, because all ranks read the same data and are ready together.
        Raises `Failure` if a rank gives no sign of life for `timeout` seconds.
        """
        if self.nodes == 1:
            yield
            return
        with _beating(self, early_store(self)):
            yield
            self.gather(None, timeout)

    def decide(self, decision: Callable[[], T]) -> T:
        """Call `decision` on rank 0. All ranks return its result, or raise its `UserError`.

        After any other error on rank 0, the other ranks raise a `Failure` instead of waiting.
        """
        own: tuple[Any, Exception | None] = None, None
        if self.is_main:
            try:
                own = decision(), None
            except UserError as error:
                own = None, error
            except Exception:
                self.gather((None, Failure("rank 0 failed: see the error that it printed")))
                raise
        result, refusal = self.gather(own)[0]
        if refusal:
            raise refusal
        return result

    def gather(self, own: T, timeout: float = math.inf) -> list[T]:
        """Exchange a value (`own`) between all ranks. Return the list of values in rank order.

        Waits until every rank has called. Before the process group exists, raises `Failure` if a
        rank neither calls nor sends a heartbeat for `timeout` seconds.
        """
        if self.size == 1:
            return [own]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        if dist.is_initialized():
            dist.all_gather_object(found, own)
            return found
        store, number = early_store(self), next(_gathers)
        store.set(f"{number}/{self.rank}", pickle.dumps(own))
        for other in range(self.size):
            silence = _silence(store, other)
            while not store.check([f"{number}/{other}"]):
                time.sleep(0.05)  # no signal interrupts a wait inside the store
                if next(silence) > timeout:
                    raise Failure(f"rank {other} has given no sign of life for {timeout:.0f} s (ddp_timeout)")
            found[other] = pickle.loads(store.get(f"{number}/{other}"))
        store.add(f"{number}/heard", 1)
        while self.is_main and store.add(f"{number}/heard", 0) < self.size:
            time.sleep(0.05)  # rank 0 may serve the store, and must not end before others have read
        return found

    @contextlib.contextmanager
    def heartbeat(self, timeout: int) -> Iterator[None]:
        """Send heartbeats in a process group, and print a note if the next rank sends none.

        If a collective takes longer than `timeout` seconds, one rank raises `RankHangs` and the
        others `Failure`, with the names of the ranks that did not answer.
        """
        if self.size == 1:
            yield
            return
        from torch.distributed import distributed_c10d

        with _beating(self, distributed_c10d._get_default_store()) as store:
            try:
                yield
            except RuntimeError as error:
                if not any(words in str(error) for words in _TIMED_OUT):
                    raise
                # A rank that waited has met the same error, or has lost its connection and left.
                store.set(f"waited/{self.rank}", "")
                time.sleep(2 * _BEAT_SECONDS)
                inside = {rank: name for rank in range(self.size) if (name := _last(store, rank).partition(" ")[2])}
                missing = {rank: name for rank, name in inside.items() if not store.check([f"waited/{rank}"])}
                who = " and ".join(missing.values()) or "the network between the ranks"
                kind = RankHangs if self.rank == min({self.rank, *inside} - {*missing}) else Failure
                raise kind(f"{who} did not answer within {timeout} s (ddp_timeout)") from error


# --- Signs of life --------------------------------------------------------------------------------
# A thread of each rank writes heartbeats to a store of torch.distributed, also during an
# evaluation, a save or a compilation, at no cost to a step. Without heartbeats, gloo only reports
# a time-out, and a stopped rank on a GPU is noticed after half an hour, without its name.

_BEAT_SECONDS = 5.0
_SILENT_SECONDS = 60.0  # a longer silence is reported; reading data may hold the GIL for some seconds
_TIMED_OUT = ("Timed out waiting", "wait timeout after", "Application timeout")  # of gloo and of the store
_gathers = itertools.count()


class RankHangs(Failure):
    """Ranks did not answer within `ddp_timeout`. The lowest rank that waited raises this error."""


@functools.cache  # rank 0's store also serves the training that follows, at the same address
def early_store(world: World) -> Store:
    """Return a store that all ranks share before the process group exists. torchrun and `accelerate
    launch` offer this store. Otherwise rank 0 opens it at MASTER_ADDR and MASTER_PORT.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if world.size == 1:
        return HashStore()
    serves = world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=serves, wait_for_workers=False, multi_tenant=True)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # in the prefix, to ignore the keys of a failed attempt
    return PrefixStore(f"early/{attempt}", store)


@contextlib.contextmanager
def _beating(world: World, store: Store) -> Iterator[Store]:
    """In the block, a second thread sends heartbeats. Yields a store for use by both threads."""
    store, left = store.clone(), threading.Event()  # the main thread may be waiting in the original store
    thread = threading.Thread(target=_beat, args=(store, world, left), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        left.set()
        thread.join(_BEAT_SECONDS)  # so that the thread's last message is that this rank has left


def _beat(store: Store, world: World, left: threading.Event) -> None:
    """Send heartbeats and watch the next rank's, until this rank leaves or the launcher ends."""
    parent, after = os.getppid(), (world.rank + 1) % world.size
    name, silence = f"rank {world.rank} (pid {os.getpid()} on {socket.gethostname()})", _silence(store, after)
    noted = False
    with contextlib.suppress(RuntimeError):
        for number in itertools.count():
            if left.wait(_BEAT_SECONDS if number else 0) or os.getppid() != parent:  # the launcher may hold the store
                break
            store.set(f"heartbeat/{world.rank}", f"{number} {name}")
            silent = next(silence) > _SILENT_SECONDS and bool(seen := _last(store, after))
            if silent and not noted:
                line = f"{seen.partition(' ')[2]}: no answer for {_SILENT_SECONDS:.0f} s. Is it stopped?"
                print(line, file=sys.stderr, flush=True)
            noted = silent  # one note per silence
        store.set(f"heartbeat/{world.rank}", "")  # this rank has left


def _silence(store: Store, rank: int) -> Iterator[float]:
    """Yield at each call of next() the seconds since a rank's last sign of life was seen."""
    last, since = _last(store, rank), time.monotonic()
    while True:
        yield time.monotonic() - since
        if (seen := _last(store, rank)) != last:
            last, since = seen, time.monotonic()


def _last(store: Store, rank: int) -> str:
    """Return a rank's last heartbeat, "COUNT NAME"; empty if the rank sent none or has left."""
    key = f"heartbeat/{rank}"
    return store.get(key).decode() if store.check([key]) else ""


# --- The launched run -----------------------------------------------------------------------------


def launched(environment: Mapping[str, str] = os.environ) -> World:
    """Return the world that a launcher announced, or else the world of this process alone."""
    if not {"RANK", "WORLD_SIZE"} <= set(environment):
        return World()
    size = int(environment["WORLD_SIZE"])
    return World(size, int(environment["RANK"]), int(environment.get("LOCAL_WORLD_SIZE", size)))


def require_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `UserError` if srun or mpirun started several processes that would train separately."""
    starters = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
    for variable, starter in starters.items():
        count = int(environment.get(variable, "1") or 1)
        if count > 1 and not {"RANK", "WORLD_SIZE"} <= set(environment) and "SLURM_PTY_PORT" not in environment:
            what = f"{starter} started {count} processes that would each train a model of their own"
            raise mistake(variable, what, f"use {starter} to start one `accelerate launch` on each node")


def prepare_process(run: RunSpec) -> None:
    """Prepare the environment, and DeepSpeed if the run uses it. Call this before other imports."""
    prepare_environment(run)
    if run.engine.kind == "deepspeed":
        if not run["verbose"]:  # DeepSpeed prints a line for each operator that it has compiled
            vars(import_module("deepspeed.comm.torch"))["print"] = lambda *words: None
        compile_safely()


def prepare_environment(run: RunSpec) -> None:
    """Set the environment variables that torch, accelerate, transformers and deepspeed read."""
    if run.engine.kind != "fsdp":  # otherwise transformers would load the weights on rank 0 alone
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    if run.engine.kind in ("deepspeed", "fsdp"):
        if not {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"} & set(os.environ) and not run["deepspeed"]:
            os.environ.update(launch_environment(run.engine))
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({**alone, "MASTER_PORT": str(free_port()), **os.environ})
    if run["measure"]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints a banner
    if run["expandable_segments"]:  # torch reads one of two variables at the first use of a GPU; the last entry wins
        others = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
        words = ",".join(filter(None, (others, "expandable_segments:True")))
        os.environ.update(PYTORCH_ALLOC_CONF=words, PYTORCH_CUDA_ALLOC_CONF=words)
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(run["use_regional_compilation"])
    if not run.hardware.cuda:
        # accelerate imports deepspeed, which would guess its accelerator and print warnings.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Otherwise the device is "cpu:0", on which transformers 5.17 cannot resume an optimizer.
        os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")


def use_threads(run: RunSpec, world: World) -> None:
    """Use this process's share of the cores for training on a CPU or for an offloaded optimizer.

    `accelerate launch` leaves each process one thread.
    """
    import torch

    if not run.hardware.cuda or run.engine.offload_optimizer != "none":
        torch.set_num_threads(threads_per_process(run.hardware.cores, world.local_size))


@contextlib.contextmanager
def process_group(run: RunSpec, world: World) -> Iterator[TrainingArguments]:
    """Join the process group for the block, by building the run's TrainingArguments. Yields them.

    Raises `Failure` if a rank does not join or answer within `ddp_timeout` seconds. Raises
    `UserError` if TrainingArguments refuse a value, or if the micro-batches of the ranks differ,
    for example because the nodes have different copies of fit.json, the file of `recipes fit`.
    """
    import torch

    args = _join(run)
    use_threads(run, world)
    torch.backends.cudnn.benchmark = bool(run["cudnn_benchmark"])
    if args.tf32:  # torch.compile's autotuning reads an older setting than the one that TrainingArguments set
        torch.set_float32_matmul_precision("high")
    try:
        sizes = sorted(set(world.gather(run.batch.micro)))
        if len(sizes) > 1:  # the ranks would wait for each other
            what = f"the ranks have different micro-batches: {', '.join(map(str, sizes))}"
            raise mistake("per_device_train_batch_size", what, f"--per_device_train_batch_size {sizes[0]}")
        with world.heartbeat(run["ddp_timeout"]):
            yield args
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        gc.collect()  # DDP and DeepSpeed objects must be gone before the process group, or gloo aborts at exit
        leave_group()


def _join(run: RunSpec) -> TrainingArguments:
    """Join the process group by building the run's TrainingArguments.

    Raises `UserError` with the message of TrainingArguments, and `Failure` if a rank is missing.
    """
    import torch
    from transformers import TrainingArguments

    # With `use_cpu` TrainingArguments do not forward ddp_timeout, and torch waits half an hour.
    torch.distributed.distributed_c10d.default_pg_timeout = timedelta(seconds=run["ddp_timeout"])
    try:
        args = arguments_for(run, TrainingArguments, {"disable_tqdm": True, "do_train": True})
    except torch.distributed.DistError as error:
        what = f"the ranks could not join; each waits for {run['ddp_timeout']} s (ddp_timeout)"
        raise Failure(f"{what}: {one_line(error)}") from None
    if run.engine.kind == "deepspeed" and run.world_size > 1:
        from deepspeed import comm

        # On a CPU, accelerate gives DeepSpeed no group if --deepspeed is added to a launch of plain
        # DDP. Without the group, ZeRO-3 would shard the model over a single process.
        if not comm.is_initialized():
            comm.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    return args


def leave_group() -> None:
    """Leave the process group, if there is one, after gloo's threads have dropped their tensors.

    To drop a tensor, a thread needs the GIL, but the group's destructor holds the GIL and waits for
    the thread (`~ProcessGroupGloo` and `~AsyncAllgatherWork` of torch 2.13). Without the sleep, a
    collective just before the end made one rank in thousands of trainings hang for ever.
    """
    import torch

    if torch.distributed.is_initialized():
        time.sleep(_DROPPED_SECONDS)
        torch.distributed.destroy_process_group()


# --- torch's compiler of C++, which DeepSpeed's operators need once -------------------------------


@functools.cache  # once in a process
def compile_safely() -> None:
    """From now on, compile under our lock, which Linux releases when its process ends. torch's lock
    is a file that stays if its process is killed, and then others wait for ever. Nor may we remove
    this file, because its process fails if the file is gone.
    """
    from unittest.mock import patch

    from torch.utils import cpp_extension

    compiles = cpp_extension.load

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        folder = Path(kwargs.get("build_directory") or cpp_extension._get_build_directory(name, verbose=False))
        if os.environ.get("LOCAL_RANK", "0") == "0" and not any(folder.glob("*.so")):
            line = "this takes minutes, but only once; a process waits while another compiles the same code"
            print(f"compiling {name} into {folder}: {line}", file=sys.stderr, flush=True)
        with FileLock(folder / "flock"), patch.object(cpp_extension, "FileBaton"):  # torch's lock
            return compiles(name, *args, **kwargs)

    cpp_extension.load = load
