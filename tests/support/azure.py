"""A workspace of Azure ML on this machine: it answers the SDK over TLS, and notes the requests."""

from __future__ import annotations

import contextlib
import datetime
import http.server
import ipaddress
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMES = {
    "subscription_id": "00000000-0000-0000-0000-000000000000",
    "resource_group": "group",
    "workspace_name": "lab",
}
_ARM = (
    f"/subscriptions/{NAMES['subscription_id']}/resourceGroups/group"
    "/providers/Microsoft.MachineLearningServices/workspaces/lab"
)
_BLOB_HEADERS = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "x-ms-blob-type": "BlockBlob"}


class Workspace:
    """`jobs` are the bodies that were sent, `blobs` the uploads.

    The test sets a job's `status` and `log`. With `refuse` the service answers every job with
    that error. `assets` are data assets, by name: the type of version 1. `secrets` are those of a
    key vault.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.status, self.log, self.refuse = "Running", b"", ""
        self.log_was_read = threading.Event()
        self.assets: dict[str, str] = {}
        self.secrets: dict[str, str] = {}
        self.port = 0

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if path == "/metadata":
            return 200, [self._cloud()]
        if path == "/token":
            return 200, {"access_token": "t", "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"}
        if path.startswith(_ARM):
            return self._resource(method, path.removeprefix(_ARM), body)
        if path.startswith("/secrets/"):
            name = path.removeprefix("/secrets/")
            return (200, {"value": self.secrets[name]}) if name in self.secrets else (404, {"error": {}})
        if path.endswith("/rundata"):
            return 200, {"runMetadata": {"runId": next(iter(self.jobs)), "outputs": {}}}
        if path.startswith("/history/"):
            return 200, {"runId": path.split("/")[-2], "status": self.status, "logFiles": self._log_files()}
        return self._blob(method, path, query, body)

    def _cloud(self) -> dict[str, Any]:
        here = f"https://localhost:{self.port}/"
        return {
            "name": "Loopback",
            "portal": here,
            "resourceManager": here,
            "authentication": {"loginEndpoint": here, "audiences": [here]},
            "suffixes": {"storage": f"localhost:{self.port}"},
        }

    def _resource(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        kind, _, name = path.strip("/").partition("/")
        if path == "":
            addresses = {"discoveryUrl": f"https://localhost:{self.port}/discovery"}
            return 200, {"properties": addresses, "name": "lab"}
        if kind == "jobs" and self.refuse:
            return 400, {"error": {"code": "UserError", "message": self.refuse}}
        if kind == "jobs" and method == "PUT":
            self.jobs[name] = json.loads(body)["properties"]
        if kind == "jobs":
            studio = {"Studio": {"endpoint": f"https://studio/runs/{name}", "jobServiceType": "Studio"}}
            job = {"status": self.status, "services": studio, "properties": {}, "tags": {}}
            return 200, {"id": _ARM + path, "name": name, "type": "job", "properties": {**self.jobs[name], **job}}
        if kind == "data":
            return self._asset(name)
        if path.endswith("startPendingUpload"):
            box = f"https://acct.blob.localhost:{self.port}/box"
            reference = {"blobUri": box, "credential": {"credentialType": "SAS", "sasUri": f"{box}?sig=none"}}
            kinds = {"pendingUploadId": "1", "pendingUploadType": "TemporaryBlobReference"}
            return 200, {**kinds, "blobReferenceForConsumption": reference}
        if path.endswith("listSecrets"):
            return 200, {"secretsType": "Sas", "sasToken": "sig=none"}
        if kind == "datastores":
            store = {"datastoreType": "AzureBlob", "accountName": "acct", "containerName": "box"}
            found = {"name": name or "workspaceblobstore"}
            found["properties"] = {**store, "credentials": {"credentialsType": "Sas"}}
            return 200, found if name else {"value": [found]}
        if method == "PUT":
            return 201, {"id": _ARM + path, "name": name.rpartition("/")[2], **json.loads(body)}
        return (200, {"value": []}) if "/versions" in path else (404, {"error": {"code": "NotFound", "message": path}})

    def _asset(self, name: str) -> tuple[int, Any]:
        asset, _, versions = name.partition("/")
        if asset not in self.assets:
            return 404, {"error": {"code": "UserError", "message": f"{asset} is not found"}}
        known = {
            "dataType": self.assets[asset],
            "dataUri": f"azureml://datastores/x/paths/{asset}",
            "isArchived": False,
        }
        version = {"id": f"{_ARM}/data/{asset}/versions/1", "name": "1", "type": "data", "properties": known}
        if not versions:
            latest = {**known, "latestVersion": "1", "nextVersion": "2"}
            return 200, {"id": f"{_ARM}/data/{asset}", "name": asset, "type": "data", "properties": latest}
        return 200, {"value": [version]} if versions == "versions" else version

    def _blob(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if path == "/discovery":
            return 200, {"api": f"https://localhost:{self.port}", "history": f"https://localhost:{self.port}"}
        if path == "/log":
            self.log_was_read.set()
            return 200, self.log
        if path == "/box" and "comp" in query:
            return 200, self._listed(query["prefix"][0])
        name = path.removeprefix("/box/")
        if method == "GET" and name in self.blobs:
            return 206, self.blobs[name]
        if method != "PUT":
            return 404, b""
        if "comp" in query:  # metadata
            return 200, b""
        self.blobs[name] = body
        return 201, b""

    def _listed(self, prefix: str) -> bytes:
        blobs = "".join(
            f"<Blob><Name>{name}</Name><Properties><Content-Length>{len(blob)}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name, blob in self.blobs.items()
            if name.startswith(prefix)
        )
        head = '<?xml version="1.0" encoding="utf-8"?>'
        return f"{head}<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode()

    def _log_files(self) -> dict[str, str]:
        return {"user_logs/std_log.txt": f"https://localhost:{self.port}/log"}


@contextlib.contextmanager
def loopback(folder: Path, monkeypatch: Any) -> Iterator[Workspace]:
    """The workspace. The environment points to it: a real client with a real login finds it."""
    workspace = Workspace()
    certificate = _certificate(folder / "certificate.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with _serving(workspace, context) as workspace.port, _serving(workspace, None) as plain_port:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        monkeypatch.setenv("ARM_CLOUD_METADATA_URL", f"https://localhost:{workspace.port}/metadata")
        monkeypatch.setenv("AZUREML_CURRENT_CLOUD", "")  # the SDK sets it: afterwards it is taken back
        monkeypatch.delenv("AZUREML_CURRENT_CLOUD")
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"http://127.0.0.1:{plain_port}/token")  # a managed identity's
        monkeypatch.setenv("IDENTITY_HEADER", "any")
        monkeypatch.setattr(socket, "getaddrinfo", _only_here)
        yield workspace


@contextlib.contextmanager
def _serving(workspace: Workspace, context: ssl.SSLContext | None) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, found = workspace.answer(self.command, url.path, parse_qs(url.query), body)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(code)
            length = {"Content-Length": str(len(data))}
            if code == 206:
                length["Content-Range"] = f"bytes 0-{len(data) - 1}/{len(data)}"
            if data.startswith(b"<?xml"):
                length["Content-Type"] = "application/xml"
            for name, value in {**_BLOB_HEADERS, **length}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_PATCH = handle_any

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


_real_getaddrinfo = socket.getaddrinfo


def _only_here(host: Any, *others: Any, **named: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    if name == "127.0.0.1" or str(name).endswith("localhost"):
        return _real_getaddrinfo("127.0.0.1", *others, **named)
    raise socket.gaierror(f"{name} is not on this machine")


def _certificate(file: Path) -> Path:
    """A self-signed certificate and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.DNSName("acct.blob.localhost")]
    names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(secret + certificate.public_bytes(pem))
    return file
