"""Errors: the user's mistakes, each with its source and fix, and failures of machines."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One finding about a run. An `error` stops the run, an `advice` does not.

    `what` says what is wrong with `subject`: the name of a flag, a YAML key, a file or a variable.
    `source` is the origin of the subject's value: `command line`, a file, `library default`, ...
    """

    subject: str
    what: str
    fix: str = ""
    source: str = ""
    severity: str = "error"

    def __str__(self) -> str:
        what = self.what if self.what.endswith("...") else self.what.removesuffix(".")  # of a library's sentence
        where = f" ({self.source})" if self.source else ""
        fix = f" Fix: {self.fix}." if self.fix else ""
        return f"{self.subject}: {what}{where}.{fix}"


class UserError(Exception):
    """A mistake that the user can correct. Commands print it and exit 2, without a traceback."""

    def __init__(self, *problems: Problem):
        super().__init__(*problems)  # another process that unpickles the error gets the problems too
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 process`, `2 processes`, `1,000 steps`."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun}{ending if count != 1 else ''}"


def mistake(subject: str, what: str, fix: str, source: str = "") -> UserError:
    """Return a `UserError` with one problem, for the caller to raise."""
    return UserError(Problem(subject, what, fix, source))


def raise_errors(found: list[Problem]) -> list[Problem]:
    """Return the list if all problems in it are advice. Else raise `UserError` with the errors."""
    if errors := [problem for problem in found if problem.severity == "error"]:
        raise UserError(*errors)
    return found


def one_line(error: object) -> str:
    """Shorten an error or a text to one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:197]}..."


class Failure(RuntimeError):
    """A failure that stops a run, such as out of memory, NaN, a lost rank or a full disk.

    A subclass, such as `StreamBroke`, marks a cause that callers treat differently.
    """


class StreamBroke(Failure):
    """Reading the data failed, because of the network, a disk or a wrong row inside a stream.
    A later start may succeed, unless a wrong row is the cause.
    """
