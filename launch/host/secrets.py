"""What looks like a secret, and how it is kept out of records, and out of jobs that others read."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from launch.host.assigned import assigned
from recipes.errors import UserError, mistake
from recipes.run import HIDDEN, RunSpec

# Tokens of Hugging Face, GitHub, GitLab, OpenAI and AWS, web tokens, keys of Azure storage, and
# passwords in addresses, by how each starts and how long it is.
SECRET = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{15,}|\bsk-[\w-]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}|[?&]sig=[\w%]{20,}|AccountKey=\S{20,}|://[^\s/:@]+:[^\s/@]+@"
)
# Variables that hold one. Not TOKENIZERS_PARALLELISM.
_NAME = r"(?:TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTHORIZATION|[_-]KEY\b|APIKEY|ACCESSKEY)"
SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# Files also count tokens, name special ones such as `pad_token`, and columns such as `text_key`.
_HARMLESS_NAME = re.compile(
    r"TOKENS|TOKEN_(?:TYPE|ID)"
    r"|(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|SPECIAL|IMAGE|VIDEO|AUDIO)_TOKEN"
    r"|(?:SORT|TEXT|LABEL|INPUT|METRIC|COLUMN|IMAGE|PRIMARY|GROUP|PARTITION|DATA|BATCH|TARGET)[_-]KEY",
    re.IGNORECASE,
)
# What a comment assigns, or a text: `DB_PASSWORD = "..."`, `api_key: str = "..."`,
# `environ["API_KEY"] = "..."`, and the value of a pair such as `hub_token: [value, reason]`.
# Each part is bounded, or a file of one long word would take minutes.
_LEFT = (
    rf"((?<![\w.-])[\w.-]{{0,60}}{_NAME}[\w.-]{{0,60}})"
    r"([\"']?\]?\s{0,20}(?::[ \t]{0,20}[\w |.]{1,60}(?==))?[:=]"
)
_QUOTED = [
    re.compile(
        rf"{_LEFT}\s{{0,20}}[\[(]?\s{{0,20}}[rbfu]{{0,2}}{quote})"
        rf"(?![<\[])(?:\\[\s\S]|(?!{quote}){character})++(?={quote})",
        re.IGNORECASE,
    )
    for quote, character in ((3 * '"', r"[^\\]"), (3 * "'", r"[^\\]"), ('"', r"[^\\\n]"), ("'", r"[^\\\n]"))
]
# The same without quotes, which is text in YAML, and code in Python. Not numbers: counts of tokens.
_PLAIN = re.compile(
    rf"""{_LEFT}[ \t]{{0,20}}\[?)(?![-+\d._]+\s*(?:[,\]\n]|$))[^\s"'#,\[\](){{}}<>|&*$]{{8,}}""", re.IGNORECASE
)
_SHORTEST = 8  # a variable's value that is shorter hides half of a text, and is no key


class Unpickled(str):
    """A secret that does not go into a pickle, such as training_args.bin: there it is None."""

    def __reduce__(self):
        return type(None), ()

    def __deepcopy__(self, memo):
        return self


def in_environment(environment: Mapping[str, str] = os.environ) -> set[str]:
    """The values of environment variables whose names say that they are secret."""
    return {
        value for name, value in environment.items() if SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST
    }


def hide(content: Any, secrets: Collection[str] = ()) -> Any:
    """`content`, of JSON's types, with these secrets and all that looks like one as `***`."""
    if isinstance(content, dict):
        return {hide(name, secrets): hide(value, secrets) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [hide(value, secrets) for value in content]
    if not isinstance(content, str):
        return content
    for secret in secrets:
        content = content.replace(secret, HIDDEN)
    return SECRET.sub(HIDDEN, content)


def hide_assigned(text: str, is_python: bool = False) -> str:
    """The text of a file, with what it assigns to a name of a secret as `***`."""
    parts, done = [], 0
    for start, end in assigned(text, is_python, _is_secret):
        if not text.startswith(("<", "["), start):  # a special token
            parts += [text[done:start], HIDDEN]
            done = end
    text = "".join([*parts, text[done:]])
    for pattern in _QUOTED if is_python else (*_QUOTED, _PLAIN):
        text = pattern.sub(lambda match: match[1] + match[2] + HIDDEN if _is_secret(match[1]) else match[0], text)
    return text


def _is_secret(name: str) -> bool:
    return bool(SECRET_NAME.search(name)) and not _HARMLESS_NAME.search(name)


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
