"""The one way to tell a user that something is wrong: what, where it came from, what to write instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One finding about a run. An `error` stops it, an `advice` does not.

    `subject` is the name the user wrote (a flag, a YAML key, a file), `source` where it was written.
    """

    subject: str
    what: str
    fix: str = ""
    source: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        fix = f" Fix: {self.fix}." if self.fix else ""
        return f"{self.subject}: {self.what}{where}.{fix}"


class UserError(Exception):
    """A mistake the user can mend. Commands print it and exit with 2, without a traceback."""

    def __init__(self, *problems: Problem):
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def mistake(subject: str, what: str, fix: str = "", source: str = "") -> UserError:
    """A `UserError` with one problem, to be raised."""
    return UserError(Problem(subject, what, fix, source))


class Failure(RuntimeError):
    """What a machine does to a run: out of memory, NaN, a failed probe run, a lost rank, a full disk.

    The message says what happened. Subclasses name the cause, so that it is caught by type and never by its text.
    """
