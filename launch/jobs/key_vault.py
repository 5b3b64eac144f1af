"""Prints a secret of an Azure key vault: `HF_TOKEN="$(python3 launch/jobs/key_vault.py ADDRESS)"`.

A job on Azure ML runs it, with the managed identity of its compute: the job's YAML holds the
secret's address, and the value goes through a pipe into the environment of the training. Tried
against a vault imitated on one machine, not yet on Azure.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from urllib.parse import urlsplit

_VERSION = "7.4"  # of Key Vault's REST interface


def read_secret(address: str) -> str:
    """The value at https://VAULT/secrets/NAME."""
    from azure.identity import ManagedIdentityCredential

    cloud = (urlsplit(address).hostname or "").partition(".")[2]  # vault.azure.net, or another cloud's
    # Azure ML names the identity of the compute in this variable.
    credential = ManagedIdentityCredential(client_id=os.environ.get("DEFAULT_IDENTITY_CLIENT_ID"))
    token = credential.get_token(f"https://{cloud}/.default").token
    request = urllib.request.Request(f"{address}?api-version={_VERSION}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose azure.py Python would take for the package of azure-identity
    try:
        print(read_secret(sys.argv[1]))
    except Exception as error:  # of azure-identity, or of urllib
        needs = "azure-identity in the job's environment, --identity managed, and the role Key Vault Secrets User"
        sys.exit(f"{sys.argv[1]} cannot be read: {error}\nIt needs a managed identity of the compute, {needs}")
