"""Whether an answer is one that a person can use."""

from __future__ import annotations

import json
import re

from tests.campaigns.bad_input.attempt import SECONDS, Answer
from tests.campaigns.bad_input.case import Case

_ERROR = re.compile(r"^error  ", re.MULTILINE)
_NO = ("compare", "doctor")  # whose exit code 1 is an answer


def finding(case: Case, answer: Answer) -> str | None:
    """What is wrong with an answer, in a line that is the same for the same cause; None if nothing
    is.
    """
    last = next((line for line in reversed(answer.output.splitlines()) if line.strip()), "")
    if answer.code is None:
        return f"hangs: more than {SECONDS} s"
    if answer.code < 0:
        return f"dies of signal {-answer.code}"
    if "Traceback (most recent call last)" in answer.output:
        return f"traceback: {_place(answer.output)}: {_short(last)}"
    if answer.taken:
        return None
    if answer.code == 1 and case.argv[0] in _NO:
        return None
    if answer.code != 2:
        return f"exit code {answer.code}: {_short(last)}"
    return None if _is_usable(answer.output) else f"no fix: {_short(last)}"


def _place(output: str) -> str:
    """The last line of ours in a traceback."""
    ours = re.findall(r'File "[^"]*/((?:launch|recipes)/[^"]*)", line (\d+)', output)
    return ":".join(ours[-1]) if ours else "outside"


def _short(text: str) -> str:
    return re.sub(r"\d+", "0", text)[:150]


def _is_usable(output: str) -> bool:
    """Whether each error says what is wrong and what to write instead, or argparse does its way."""
    if "usage: recipes" in output and re.search(r": error: .+", output):
        return True
    problems = _as_json(output)
    if problems is not None:
        return all(problem["subject"] and problem["what"] and problem["fix"] for problem in problems)
    errors = [part for part in _ERROR.split(output)[1:] if part.strip()]
    return bool(errors) and all(" Fix: " in re.split(r"(?m)^advice  ", error)[0] for error in errors)


def _as_json(output: str) -> list[dict] | None:
    """The errors in what --json prints; None if it is not JSON."""
    start = output.find("{\n")
    try:
        found = json.loads(output[start:])
    except ValueError:
        return None
    problems = found.get("problems", []) if isinstance(found, dict) else []
    return [problem for problem in problems if problem["severity"] == "error"] or None
