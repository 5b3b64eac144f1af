"""What looks like a secret, and how it is kept out of what is written and shown."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from recipes.run import HIDDEN

# Tokens of Hugging Face, GitHub, GitLab, OpenAI and AWS, web tokens, keys of Azure storage, and
# passwords in addresses, by how each starts and how long it is.
SECRET = re.compile(
    r"hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{20,}|glpat-[\w-]{15,}|\bsk-[\w-]{20,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}|[?&]sig=[\w%]{20,}|AccountKey=\S{20,}|://[^\s/:@]+:[^\s/@]+@"
)
# Variables that hold one. Not TOKENIZERS_PARALLELISM.
SECRET_NAME = re.compile(r"TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|_KEY\b|APIKEY", re.IGNORECASE)
_SHORTEST = 8  # a variable's value that is shorter hides half of a text, and is no key


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
