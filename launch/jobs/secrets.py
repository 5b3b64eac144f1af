"""What looks like a secret. It must not get into a job, whose text is stored and read by others."""

from __future__ import annotations

from collections.abc import Sequence

from launch.host.secrets import SECRET
from recipes.errors import UserError, mistake
from recipes.run import RunSpec


def refuse_secrets(run: RunSpec, argv: Sequence[str]) -> None:
    """Raises `UserError` if a token is set, or an argument of train.py looks like a secret."""
    tokens = [name for name in run.given if name.endswith("_token") and run[name]]
    similar = [word.partition("=")[0] if word.startswith("--") else "argument" for word in argv if SECRET.search(word)]
    if tokens or similar:
        raise _refused((tokens or similar)[0])


def without_secrets(text: str) -> str:
    """A job's text, unchanged.

    Raises `UserError` if a flag of the target has put a secret into it.
    """
    found = SECRET.search(text)
    if found:
        raise _refused(f"{found.group()[:6]}...")
    return text


def _refused(subject: str) -> UserError:
    what = "looks like a secret, and would be written into the job, where others can read it"
    return mistake(subject, what, "HF_TOKEN or the like in the environment of the job, or `hf auth login` there")
