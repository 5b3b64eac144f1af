"""Work spread over processes that have imported everything, and results as they come."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from launch.host.signals import end_with_parent

Item, Result = TypeVar("Item"), TypeVar("Result")
# Runs are forked from processes that have imported this: it saves each of them ten seconds.
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
