"""A Hugging Face hub of one's own on the loopback: just the routes that a download uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories with their files.

    Attributes:
        refused: status and X-Error-Code of repositories that can't be read.
        served: paths of the files that were sent.
    """

    url: str
    repositories: Mapping[str, Mapping[str, bytes]]
    refused: Mapping[str, tuple[int, str]]
    served: list[str] = field(default_factory=list)


@contextmanager
def fake_hub(
    repositories: Mapping[str, Mapping[str, bytes]],
    refused: Mapping[str, tuple[int, str]] | None = None,
) -> Iterator[FakeHub]:
    """Serves until the context ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_port}", repositories, refused or {})
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        owner, name, *rest = parts[2:] if is_api else parts
        repo = f"{owner}/{name}"
        if repo in hub.refused:
            status, code = hub.refused[repo]
            return self._send(status, b"{}", {"X-Error-Code": code})
        files = hub.repositories.get(repo)
        if files is None:
            return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if is_api and rest[:1] == ["tree"]:
            return self._send_json([_entry(path, data) for path, data in files.items()])
        if is_api:
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": _etag(data)}
                for path, data in files.items()
            ]
            return self._send_json(
                {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}
            )
        path = "/".join(rest[2:])  # resolve/<revision>/<path>
        if path not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            hub.served.append(path)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(files[path])}"'}
        return self._send(200, files[path], headers)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
