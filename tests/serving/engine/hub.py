"""A stand-in of the model hub: the part of its HTTP API that a download needs.

It is not the hub. It was written from what huggingface_hub asks for and checks: resolving a revision, listing
files, HEAD and GET of a file at a commit, and the error codes by which the client tells refusals apart.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Commits with their files, branches that point to them, and who may read."""

    commits: dict[str, Path]
    branches: dict[str, str]
    token: str | None = None
    gated: bool = False


@dataclass
class Hub:
    """The stand-in's content, and the paths that it was asked for."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


class _RefusalError(Exception):
    def __init__(self, status: HTTPStatus, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """Serve the hub on loopback; gives the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            try:
                content, headers = _respond(hub, path, self.headers.get("Authorization"))
                status = HTTPStatus.OK
            except _RefusalError as refusal:
                content, headers, status = b"{}", {"X-Error-Code": refusal.code}, refusal.status
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _respond(hub: Hub, path: str, authorization: str | None) -> tuple[bytes, dict[str, str]]:
    parts = path.strip("/").split("/")
    api = parts[:2] == ["api", "models"]
    name, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
    repository = hub.repositories.get(name)
    if repository is None or (repository.token and not repository.gated and authorization is None):
        raise _RefusalError(
            HTTPStatus.UNAUTHORIZED if authorization is None else HTTPStatus.NOT_FOUND, "RepoNotFound"
        )
    if repository.token and authorization != f"Bearer {repository.token}" and not (api and repository.gated):
        raise _RefusalError(HTTPStatus.FORBIDDEN, "GatedRepo" if repository.gated else "RepoNotFound")
    if api and rest[:1] in ([], ["revision"]):
        return _describe(name, repository, rest[1] if rest else "main")
    if api and rest[:1] == ["tree"]:
        return _tree(repository, rest[1])
    if rest[:1] == ["resolve"]:
        return _file(repository, rest[1], "/".join(rest[2:]))
    raise _RefusalError(HTTPStatus.NOT_FOUND, "EntryNotFound")


def _commit(repository: Repository, revision: str) -> str:
    commit = repository.branches.get(revision, revision)
    if commit not in repository.commits:
        raise _RefusalError(HTTPStatus.NOT_FOUND, "RevisionNotFound")
    return commit


def _describe(name: str, repository: Repository, revision: str) -> tuple[bytes, dict[str, str]]:
    commit = _commit(repository, revision)
    files = [{"rfilename": file.name} for file in sorted(repository.commits[commit].iterdir())]
    return json.dumps({"id": name, "sha": commit, "siblings": files}).encode(), {
        "Content-Type": "application/json"
    }


def _tree(repository: Repository, revision: str) -> tuple[bytes, dict[str, str]]:
    files = [
        {
            "type": "file",
            "path": file.name,
            "size": file.stat().st_size,
            "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
        }
        for file in sorted(repository.commits[_commit(repository, revision)].iterdir())
    ]
    return json.dumps(files).encode(), {"Content-Type": "application/json"}


def _file(repository: Repository, revision: str, name: str) -> tuple[bytes, dict[str, str]]:
    commit = _commit(repository, revision)
    path = repository.commits[commit] / name
    if not path.is_file():
        raise _RefusalError(HTTPStatus.NOT_FOUND, "EntryNotFound")
    content = path.read_bytes()
    return content, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
