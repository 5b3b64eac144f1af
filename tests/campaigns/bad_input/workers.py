"""Two processes that fork cases: one has imported torch, the other forks in milliseconds."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.bad_input.attempt import BUSY, SECONDS, Answer, attempt
from tests.campaigns.bad_input.case import Case, write
from tests.campaigns.bad_input.judge import finding

_WITH_TORCH = ("train.py", "plan", "fit", "scale", "explain", "doctor", "merge", "prepare")


@dataclass(frozen=True)
class Result:
    number: int
    case: Case
    answer: Answer
    finding: str | None


def results(cases: list[tuple[int, Case]], folder: Path, world: Path) -> Iterator[Result]:
    """The results of numbered cases, as they come."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    working = [context.Process(target=_work, args=(cases, folder, world, heavy, queue)) for heavy in (True, False)]
    for process in working:
        process.start()
    left = len(working)
    while left:
        result = queue.get()
        if isinstance(result, Exception):
            raise result
        if result is None:
            left -= 1
        else:
            yield result
    for process in working:
        process.join()


def _work(cases: list[tuple[int, Case]], folder: Path, world: Path, heavy: bool, queue) -> None:
    try:
        from tests.campaigns.bad_input import preloaded

        preloaded.preload(heavy)
        for number, case in cases:
            if (case.argv[0] in _WITH_TORCH) == heavy:
                queue.put(_once(number, case, world, folder / ("heavy" if heavy else "light")))
        queue.put(None)
    except Exception as error:
        queue.put(RuntimeError(f"{type(error).__name__}: {error}"))
        raise


def _once(number: int, case: Case, world: Path, folder: Path) -> Result:
    write(case, world, folder)
    answer = attempt(case, folder)
    if answer.code is None:  # perhaps the machine is busy: the second time the processor's time counts
        write(case, world, folder)
        answer = attempt(case, folder, SECONDS, BUSY * SECONDS)
    return Result(number, case, answer, finding(case, answer))


@dataclass
class Totals:
    """The figures of a campaign. Prints each finding once, as it is added."""

    drawn: int = 0
    taken: int = 0
    slowest: float = 0.0
    findings: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result, whole: bool) -> None:
        answer, found = result.answer, result.finding
        self.drawn += 1
        self.taken += answer.taken and not found
        self.slowest = max(self.slowest, answer.seconds)
        if whole or (found and found not in self.findings):
            tail = answer.output if whole else "\n".join(answer.output.splitlines()[-6:])[-1500:]
            print(f"\n=== case {result.number}: {found or 'usable'}\n{result.case}", flush=True)
            print(f"exit code {answer.code} after {answer.seconds:.1f} s\n{tail}", flush=True)
        if found:
            self.findings[found] += 1
        if self.drawn % 500 == 0:
            print(f"... {self}", flush=True)

    def __str__(self) -> str:
        findings = self.findings.total()
        return (
            f"{self.drawn} cases: {self.taken} taken, {self.drawn - self.taken - findings} refused usably, "
            f"{findings} findings ({len(self.findings)} different), slowest {self.slowest:.1f} s"
        )
