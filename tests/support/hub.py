"""A double of the Hugging Face hub: the part of its HTTP interface by which its library fetches models.

In a test: `with HubDouble({"org/name": files}) as hub`, and the library's endpoint is `hub.url`. As a program, for
folders: `python tests/support/hub.py org/name=path/to/folder`, which prints what to set HF_ENDPOINT to.

As at the hub, large files are answered by a redirect to a store elsewhere, which sends parts of files on request, and
a refusal has its reason in a header.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest

__all__ = ["COMMIT", "HubDouble", "use_hub"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_LARGE = (".onnx", ".onnx_data", ".safetensors")  # stored apart, as git LFS has it
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, in memory or on this machine."""

    path: str
    content: bytes | Path

    @property
    def size(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    @property
    def is_large(self) -> bool:
        return self.path.endswith(_LARGE)

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.read(0):
            digest.update(chunk)
        return digest.hexdigest()

    @property
    def blob_id(self) -> str:
        """Of 40 digits, as git's are."""
        return self.digest[:40]

    def read(self, start: int) -> Iterator[bytes]:
        if isinstance(self.content, bytes):
            yield self.content[start:]
            return
        with self.content.open("rb") as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk

    def describe(self) -> dict[str, Any]:
        """An entry of a repository's tree."""
        entry = {"type": "file", "path": self.path, "size": self.size, "oid": self.blob_id}
        lfs = {"size": self.size, "oid": self.digest, "pointerSize": 134}
        return entry | ({"lfs": lfs} if self.is_large else {})


class HubDouble:
    """Serves repositories, each a mapping of paths to contents, until `with` ends.

    `gated`: repositories whose terms nobody has accepted; their lists are open, as the hub's are. `tokens`: those that
    it knows. `num_breaks`: so many of the next answers with a large file break off in the middle. `sent`: bytes of
    bodies, by path.
    """

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes | Path]], *, port: int = 0) -> None:
        self.files = {
            name: {path: HubFile(path, content) for path, content in contents.items()}
            for name, contents in repositories.items()
        }
        self.gated = set[str]()
        self.num_breaks = 0
        self.tokens = set[str]()
        self.sent = dict[str, int]()
        double = self

        class Handler(_Handler):
            hub = double

        self._servers = [ThreadingHTTPServer(("127.0.0.1", number), Handler) for number in (port, 0)]
        self.url, self.store_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in self._servers
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; also twice."""
        for server, thread in zip(self._servers, self._threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def find_stored(self, digest: str) -> HubFile | None:
        large = [file for files in self.files.values() for file in files.values() if file.is_large]
        return next((file for file in large if file.digest == digest), None)


class _Handler(BaseHTTPRequestHandler):
    hub: HubDouble
    protocol_version = "HTTP/1.1"
    timeout = 30

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its base's own name
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return
        match unquote(urlsplit(self.path).path).strip("/").split("/"):
            case ["api", "models", org, name, "revision", _] | ["api", "models", org, name]:
                self._send_repository(f"{org}/{name}")
            case ["api", "models", org, name, "tree", *_]:
                self._send_tree(f"{org}/{name}")
            case ["stored", digest]:
                self._send_stored(digest)
            case [org, name, "resolve", _, *path]:
                self._send_file(f"{org}/{name}", "/".join(path))
            case _:
                self._refuse(404, "NotFound")

    def _send_repository(self, name: str) -> None:
        if name not in self.hub.files:
            self._refuse(401, "RepoNotFound")
            return
        siblings = [{"rfilename": path} for path in self.hub.files[name]]
        self._send_json({"_id": "1", "id": name, "sha": COMMIT, "siblings": siblings})

    def _send_tree(self, name: str) -> None:
        files = self.hub.files.get(name, {})
        folders = {path.rpartition("/")[0] for path in files if "/" in path}
        self._send_json(
            [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)]
            + [file.describe() for file in files.values()]
        )

    def _send_file(self, name: str, path: str) -> None:
        file = self.hub.files.get(name, {}).get(path)
        if name in self.hub.gated:
            self._refuse(401, "GatedRepo")
        elif file is None:
            self._refuse(404, "EntryNotFound")
        elif file.is_large:
            self._send_headers(
                302,
                {
                    "X-Repo-Commit": COMMIT,
                    "X-Linked-Etag": f'"{file.digest}"',
                    "X-Linked-Size": str(file.size),
                    "Location": f"{self.hub.store_url}/stored/{file.digest}",
                    "Content-Length": "0",
                },
            )
        else:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{file.blob_id}"', "Content-Length": str(file.size)}
            self._send_headers(200, headers)
            self._send_body(file, 0, file.size)

    def _send_stored(self, digest: str) -> None:
        file = self.hub.find_stored(digest)
        if file is None:
            self._refuse(404, "NotFound")
            return
        wanted = self.headers.get("Range")
        start = 0 if wanted is None else int(wanted.removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{file.digest}"', "Content-Length": str(file.size - start)}
        if wanted is None:
            self._send_headers(200, headers)
        else:
            self._send_headers(206, headers | {"Content-Range": f"bytes {start}-{file.size - 1}/{file.size}"})
        is_broken = self.command == "GET" and self.hub.num_breaks > 0
        self.hub.num_breaks -= is_broken
        self._send_body(file, start, (file.size - start) // 2 if is_broken else file.size - start)
        self.close_connection = self.close_connection or is_broken

    def _send_body(self, file: HubFile, start: int, num_bytes: int) -> None:
        if self.command == "HEAD":
            return
        # counted before the last byte goes, because the client may look as soon as it has it
        self.hub.sent[file.path] = self.hub.sent.get(file.path, 0) + num_bytes
        num_left = num_bytes
        for chunk in file.read(start):
            self.wfile.write(chunk[:num_left])
            num_left -= len(chunk[:num_left])

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self._send_headers(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message or code, "Content-Length": "0"}
        self._send_headers(status, {name: value for name, value in headers.items() if value})

    def _send_headers(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def use_hub(hub: HubDouble, cache: Path) -> Iterator[pytest.MonkeyPatch]:
    """The hub's library in this process uses the double and a cache of its own, as by HF_ENDPOINT and HF_HUB_CACHE."""
    import huggingface_hub
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patched.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patched.setattr(constants, "HF_HUB_CACHE", str(cache))
        patched.setattr(constants, "HF_HUB_OFFLINE", False)
        try:
            yield patched
        finally:
            huggingface_hub.close_session()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve folders as repositories of a hub, until interrupted.")
    parser.add_argument("repositories", nargs="+", metavar="ORG/NAME=FOLDER")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    options = parser.parse_args()
    repositories = dict[str, dict[str, bytes | Path]]()
    for text in options.repositories:
        name, _, folder = text.partition("=")
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        repositories[name] = {path.relative_to(folder).as_posix(): path for path in paths}
    with HubDouble(repositories, port=options.port) as hub:
        for file in [file for files in hub.files.values() for file in files.values()]:
            _ = file.digest  # now, and not while somebody waits
        print(f"HF_ENDPOINT={hub.url}", flush=True)  # noqa: T201 - a program, too
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        print(json.dumps(hub.sent), flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    main()
