"""Keep texts that look like a secret out of records, and out of jobs that others can read."""

import hashlib
import os
import re
from collections.abc import Collection
from typing import Any

from recipes.errors import UserError, mistake
from recipes.run import HIDDEN, RunSpec

# The pattern finds passwords in URLs and, by beginning and length, tokens of Hugging Face, GitHub,
# GitLab, OpenAI and AWS, JSON web tokens, and storage keys and signatures of Azure.
SECRET = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{15,}|\bsk-[\w-]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}|[?&]sig=[\w%]{20,}|AccountKey=\S{20,}|://[^\s/:@]+:[^\s/@]+@"
)
# Names of variables and keys that hold secrets. TOKENIZERS_PARALLELISM is no such name.
_NAME = r"(?:TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTHORIZATION|[_-]KEYS?\b|APIKEY|ACCESSKEY)"
SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# Harmless names: counts of tokens, special tokens such as `pad_token`, columns such as `text_key`.
_HARMLESS_NAME = re.compile(
    r"TOKENS|TOKEN_(?:TYPE|ID)|(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|SPECIAL)_TOKEN|(?:SORT|TEXT|LABEL|INPUT|COLUMN)[_-]KEY",
    re.IGNORECASE,
)
# A secret's name with a value: `hub_token: x`, `API_KEY=x`, `{"name": "API_KEY", "value": "x"}`.
# Each part has a bound: without bounds, searching a file of one long word would take minutes.
_ASSIGNED = re.compile(
    rf"""(?<![\w.-])([\w.-]{{0,60}}{_NAME}[\w.-]{{0,60}})["']?\]?(?:,?\s{{0,20}}["']?value["']?)?"""
    r"""\s{0,20}(?:[:,]|\+?=(?!=))\s{0,20}(?!(?:null|none|true|false|[-+\d._]+)\b)\S""",
    re.IGNORECASE,
)
_SHORTEST = 8  # a shorter value is no key, and would be hidden wherever a text holds it by chance


def in_environment() -> set[str]:
    """Return the values of environment variables named like API_KEY, except very short values."""
    named = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    return {value for value in named if len(value.strip()) >= _SHORTEST}


def hide(content: Any, secrets: Collection[str]) -> Any:
    """Return `content` (JSON types) with `***` in place of `secrets` and texts that look secret."""
    if isinstance(content, dict):
        return {hide(name, secrets): hide(value, secrets) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [hide(value, secrets) for value in content]
    if not isinstance(content, str):
        return content
    for secret in secrets:
        content = content.replace(secret, HIDDEN)
    return SECRET.sub(HIDDEN, content)


def recorded_text(text: str) -> str:
    """Return the text of a file, or `***` and a hash of the text if it seems to hold a secret."""
    assigned = any(not _HARMLESS_NAME.search(found[1]) for found in _ASSIGNED.finditer(text))
    if not assigned and hide(text, in_environment()) == text:
        return text
    return f"{HIDDEN} seems to hold a secret; sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def refuse_tokens(run: RunSpec) -> None:
    """Raise `UserError` if a setting holds an access token: the job's command would show it."""
    for name in run.given:
        if name.endswith("_token") and run[name]:
            raise _refused(name)


def without_secrets(text: str) -> str:
    """Return a job's text unchanged. Raises `UserError` if a part of it looks like a secret."""
    if found := SECRET.search(text):
        raise _refused(f"{found.group()[:6]}...")
    return text


def _refused(subject: str) -> UserError:
    what = "looks like a secret, and would be written into the job, where others can read it"
    return mistake(subject, what, "set HF_TOKEN or the like in the job's environment, or run `hf auth login` there")
