"""Work spread over processes that have imported everything, and results as they come."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

Item, Result = TypeVar("Item"), TypeVar("Result")


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaigns.legality.preloaded"])
    with ProcessPoolExecutor(workers, context, _end_with_the_campaign) as pool:
        try:
            for done in as_completed([pool.submit(work, item) for item in items]):
                yield done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _end_with_the_campaign() -> None:
    """A worker would wait for more work for ever, if the campaign was killed."""
    threading.Thread(target=_wait_and_end, daemon=True).start()


def _wait_and_end() -> None:
    campaign = multiprocessing.parent_process()
    if campaign is not None:
        campaign.join()
        os._exit(1)
