"""A workspace of Azure ML on this machine: it answers the SDK over TLS, and notes the requests."""

import contextlib
import http.server
import json
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAMES = {"subscription_id": "00000000-0000-0000-0000-000000000000", "resource_group": "group", "workspace_name": "lab"}
_ARM = (
    f"/subscriptions/{NAMES['subscription_id']}/resourceGroups/group"
    "/providers/Microsoft.MachineLearningServices/workspaces/lab"
)
_BLOB_HEADERS = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "x-ms-blob-type": "BlockBlob"}


class Workspace:
    """`jobs` are the bodies that were sent, `blobs` the uploads.

    The test sets a job's `status` and `log`. With `refuse` the service answers every job with
    that error.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.status, self.log, self.refuse = "Running", b"", ""
        self.log_was_read = threading.Event()
        self.port = 0

    @property
    def address(self) -> str:
        return f"https://localhost:{self.port}"

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        if path.startswith(_ARM):
            return self._resource(method, path.removeprefix(_ARM), body)
        if path.endswith("/rundata"):
            return 200, {"runMetadata": {"runId": next(iter(self.jobs)), "outputs": {}}}
        if path.startswith("/history/"):
            logs = {"user_logs/std_log.txt": f"{self.address}/log"}
            return 200, {"runId": path.split("/")[-2], "status": self.status, "logFiles": logs}
        if path == "/log":
            self.log_was_read.set()
        fixed = {
            "/metadata": [self._cloud()],
            "/token": {"access_token": "t", "expires_on": str(int(time.time()) + 3600), "token_type": "Bearer"},
            "/discovery": {"api": self.address, "history": self.address},
            "/log": self.log,
        }
        return (200, fixed[path]) if path in fixed else self._blob(method, path, query, body)

    def _cloud(self) -> dict[str, Any]:
        names = dict.fromkeys(("portal", "resourceManager"), f"{self.address}/")
        login = {"loginEndpoint": f"{self.address}/", "audiences": [f"{self.address}/"]}
        return {"name": "Loopback", **names, "authentication": login, "suffixes": {"storage": self.address[8:]}}

    def _resource(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        kind, _, name = path.strip("/").partition("/")
        if path == "":
            return 200, {"properties": {"discoveryUrl": f"{self.address}/discovery"}, "name": "lab"}
        if kind == "jobs" and self.refuse:
            return 400, {"error": {"code": "UserError", "message": self.refuse}}
        if kind == "jobs":
            if method == "PUT":
                self.jobs[name] = json.loads(body)["properties"]
            studio = {"Studio": {"endpoint": f"https://studio/runs/{name}", "jobServiceType": "Studio"}}
            job = {"status": self.status, "services": studio, "properties": {}, "tags": {}}
            return 200, {"id": _ARM + path, "name": name, "type": "job", "properties": {**self.jobs[name], **job}}
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

    def _blob(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
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


@contextlib.contextmanager
def serving(workspace: Workspace, certificate: Path, key: Path) -> Iterator[int]:
    """The port at which the workspace answers, over TLS."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, found = workspace.answer(self.command, url.path, parse_qs(url.query), body)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(code)
            headers = {**_BLOB_HEADERS, "Content-Length": str(len(data))}
            if code == 206:
                headers["Content-Range"] = f"bytes 0-{len(data) - 1}/{len(data)}"
            if data.startswith(b"<?xml"):
                headers["Content-Type"] = "application/xml"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_PATCH = handle_any

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
