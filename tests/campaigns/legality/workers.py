"""Several campaigns at once, each in a process that has imported everything."""

from __future__ import annotations

import multiprocessing
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.legality.case import Case, described
from tests.campaigns.legality.material import write_material


def results(seed: str, numbers: list[int], folder: Path, workers: int, kind: str = "plain") -> Iterator[Any]:
    """The results of the runs with these numbers, as they come."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaigns.legality.preloaded"])
    queue = context.Queue()
    processes = [
        context.Process(target=_work, args=(seed, numbers[place::workers], folder, place, kind, queue))
        for place in range(workers)
    ]
    for process in processes:
        process.start()
    working = len(processes)
    while working:
        result = queue.get()
        if result is None:
            working -= 1
        elif isinstance(result, BaseException):
            raise result
        else:
            yield result
    for process in processes:
        process.join()


def _work(seed: str, numbers: list[int], folder: Path, place: int, kind: str, queue) -> None:
    from tests.campaigns.legality.campaign import Campaign

    try:
        campaign = Campaign(seed, folder / f"worker-{place}", _material(folder, place), kind)
        parent = multiprocessing.parent_process()
        for number in numbers:
            if parent is None or not parent.is_alive():
                return
            for result in campaign.run(number):
                queue.put(result)
        queue.put(None)
    except BaseException as error:
        queue.put(RuntimeError(f"worker {place}: {type(error).__name__}: {error}"))
        raise


def _material(folder: Path, place: int) -> Path:
    return write_material(folder / f"material-{place}")


def try_alone(case: Case, folder: Path) -> bool:
    """Try one case in this process, and print everything. Whether it disagrees."""
    from tests.campaigns.legality import preloaded  # noqa: F401
    from tests.campaigns.legality.campaign import Campaign

    campaign = Campaign("", folder / "worker", _material(folder, 0))
    judgement, outcome, found = campaign.once(case)
    print(described(case))
    for rule, problems in judgement.errors.items():
        print(f"check: {rule}: " + "; ".join(map(str, problems)))
    print(outcome.output)
    print(found.kind if found else "check and reality agree")
    return found is not None


@dataclass
class Totals:
    """The figures of a campaign. Prints each disagreement as it is added."""

    drawn: int = 0
    legal: int = 0
    trained: int = 0
    refused: int = 0
    reduced: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    disagreements: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, result) -> None:
        if result.reduced:
            self.reduced += 1
        else:
            self.drawn += 1
            self.legal += result.legal
            self.trained += result.legal and result.finished
            if result.ended:
                self.ended[re.sub(r"\d+", "0", result.ended)[:110]] += 1
            self.refused += not result.legal
        if result.disagreement:
            self._report(result)

    def _report(self, result) -> None:
        signature, text = result.disagreement.signature, described(result.case)
        self.disagreements.append(text)
        if signature in self.seen:
            return
        self.seen.add(signature)
        print(f"\n=== run {result.number}: {result.disagreement.kind}\n{result.disagreement.what}\n{text}")
        print(f"--case '{result.case.as_json()}'", flush=True)

    def __str__(self) -> str:
        late = "".join(f"  {count} x {text}\n" for text, count in self.ended.most_common())
        return (f"legal runs that ended early, as check cannot know:\n{late}" if late else "") + (
            f"{self.drawn} runs drawn: {self.legal} legal, of which {self.trained} trained to the end; "
            f"{self.refused} refused and tried without the check, and {self.reduced} reduced to one rule; "
            f"{len(self.disagreements)} disagreements ({len(self.seen)} different)"
        )
