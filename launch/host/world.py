"""The world: which processes train together. What was launched is what trains, or nothing does."""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from launch.host.processes import free_port
from recipes.errors import UserError, mistake
from recipes.run import RunSpec, with_fit
from recipes.run.engine import Engine, from_deepspeed, from_environment, from_yaml, launch_environment, shipped

if TYPE_CHECKING:
    from transformers import TrainingArguments

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    size: int = 1
    rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints: rank 0 does."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """The first rank of every node: what is missing on one node only must not go unsaid."""
        return self.rank % self.local_size == 0

    def decide(self, decision: Callable[[], T]) -> T:
        """One rank decides, all hear it: the result of `decision`, called on rank 0; its `UserError` on every rank."""
        if self.size == 1:
            return decision()
        import torch.distributed as dist

        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer = [decision(), None]
            except UserError as error:
                answer = [None, error.problems]
        dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise UserError(*answer[1])
        return answer[0]


def launched(environment: Mapping[str, str] = os.environ) -> World:
    """The world a launcher announced in the environment. Raises `UserError` where processes cannot find each other."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = int(environment["WORLD_SIZE"])
        return World(size, int(environment["RANK"]), int(environment.get("LOCAL_WORLD_SIZE", size)))
    for variable, starter in (
        ("SLURM_STEP_NUM_TASKS", "srun"),
        ("OMPI_COMM_WORLD_SIZE", "mpirun"),
        ("PMI_SIZE", "mpirun"),
    ):
        count = int(environment.get(variable, "1") or 1)
        if count > 1:
            raise mistake(
                variable,
                f"{starter} started {count} processes that would each train a model of their own",
                f"start one process a node with {starter}, and `accelerate launch` in it",
            )
    return World()


def on_launched_engine(run: RunSpec) -> RunSpec:
    """The run on the engine that will really run it: the launched one, or its own where that is DeepSpeed.

    A recipe with offload under plain DDP would train without it; so it starts DeepSpeed itself, with its own YAML.
    """
    return with_fit(replace(run, engine=_launched_engine(run)))


def _launched_engine(run: RunSpec) -> Engine:
    if run["deepspeed"]:
        return from_deepspeed(run["deepspeed"])
    engine = from_environment(run.environment)
    own = from_yaml(shipped(run.recipe.engine))
    if own.kind == "deepspeed" and (engine is None or engine.kind in ("single", "ddp")):
        return own
    return engine or from_yaml(shipped("single.yaml"))


def prepare_environment(run: RunSpec) -> None:
    """What must be in the environment before torch and deepspeed are imported."""
    if run.engine.kind == "deepspeed":
        if "ACCELERATE_USE_DEEPSPEED" not in os.environ and not run["deepspeed"]:
            os.environ.update(launch_environment(run.engine))
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**alone, "MASTER_PORT": str(free_port())}.items():
            os.environ.setdefault(name, value)
    if run["measure"]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler announces itself
    if not run.hardware.cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # accelerate imports deepspeed, which would guess, aloud


@contextlib.contextmanager
def joined(run: RunSpec, world: World, args: TrainingArguments) -> Iterator[None]:
    """The world that TrainingArguments joined, checked against the launched one, and left cleanly at the end.

    Raises `UserError` where several processes were launched and each is a world of its own.
    """
    import torch

    if args.world_size != world.size:
        raise mistake(
            "use_cpu",
            f"{world.size} processes were launched, and each would train a model of its own",
            "leave use_cpu to the recipe",
            run.setting("use_cpu").source,
        )
    if args.use_cpu:  # the launchers set OMP_NUM_THREADS to 1, which leaves all other cores idle
        torch.set_num_threads(max(1, run.hardware.cores // world.local_size))
    torch.backends.cudnn.benchmark = bool(run["cudnn_benchmark"])
    if not gc.get_freeze_count():  # once in a process
        gc.freeze()  # the libraries' half million objects stay: to look at them takes 0.3 s of every collection
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        gc.collect()  # what DDP and DeepSpeed built must be gone before the process group, or gloo aborts at exit
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
