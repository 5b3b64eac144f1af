"""Prints a secret of an Azure key vault: `HF_TOKEN="$(python3 launch/host/key_vault.py ADDRESS)"`.

A job on Azure ML runs it, with the managed identity of its compute: the job's YAML holds the
secret's address, and the value goes through a pipe into the environment of the training. Tried
against a vault imitated on one machine, not yet on Azure.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

_VERSION = "7.4"  # of Key Vault's REST interface


def main(argv: list[str]) -> int:
    """Exit code: 0, or 1 with a line on stderr that says what to change."""
    if len(argv) != 1:
        print("key_vault.py takes one argument, the address of a secret", file=sys.stderr)
        return 1
    try:
        print(read_secret(argv[0]))
    except OSError as error:  # urllib's errors too
        print(f"{argv[0]} cannot be read: {_reason(error)}", file=sys.stderr)
        return 1
    return 0


def read_secret(address: str) -> str:
    """The value at https://VAULT/secrets/NAME. Raises OSError if it cannot be read."""
    request = urllib.request.Request(
        f"{address}?api-version={_VERSION}", headers={"Authorization": f"Bearer {_token(address)}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


def _token(address: str) -> str:
    """A token of the compute's identity for key vaults. Raises OSError if there is none."""
    try:
        from azure.core.exceptions import AzureError
        from azure.identity import ManagedIdentityCredential
    except ImportError:
        raise OSError("azure-identity is not installed in the job's environment: add it there") from None
    cloud = (urlsplit(address).hostname or "").partition(".")[2]  # vault.azure.net, or another cloud's
    # Azure ML names the identity of the compute in this variable.
    credential = ManagedIdentityCredential(client_id=os.environ.get("DEFAULT_IDENTITY_CLIENT_ID"))
    try:
        return credential.get_token(f"https://{cloud}/.default").token
    except AzureError as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise OSError(f"{lines[0]}: give the compute a managed identity, and the job --identity managed") from None


def _reason(error: OSError) -> str:
    if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
        return f"the compute's identity may not read it ({error.code}): give it the role Key Vault Secrets User"
    if isinstance(error, urllib.error.HTTPError) and error.code == 404:
        return "there is no such secret (404)"
    return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
