"""A server that speaks the API's streams as a script says, for what the real one cannot be made to do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}


def text(words: str, **more: Any) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": words, "finish_reason": None, **more}]}


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    """The chunk at the end of a stream."""
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens, **more}}


@dataclass
class Script:
    """What the server answers, and what it was asked.

    Attributes:
        events: of a completion's stream, each a JSON object or, as text, whatever follows `data: `.
        status: of a completion.
        models: of /v1/models.
        seconds: that a completion takes.
        patience: seconds that a connection may be silent; None for any time.
        asked: (path, headers, body) of each request.
    """

    events: Sequence[dict[str, Any] | str]
    status: int = 200
    models: Any = field(default_factory=lambda: MODELS)
    seconds: float = 0.0
    patience: float | None = None
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Of the completions that were asked for."""
        return [body for path, _, body in self.asked if path.endswith("/completions")]


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The address of a server for as long as the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = script.patience

        def do_GET(self) -> None:
            script.asked.append((self.path, dict(self.headers), {}))
            self._answer(200, json.dumps(script.models).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            script.asked.append((self.path, dict(self.headers), body))
            if script.status != 200:
                self._answer(script.status, b'{"error": {"message": "try later"}}')
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            time.sleep(script.seconds)
            for event in script.events:
                data = event if isinstance(event, str) else json.dumps(event)
                self._chunk(f"data: {data}\n\n".encode())
            self._chunk(b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
