"""A side that is a server with OpenAI's API: streams of /v1/completions, measured from here. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from queue import SimpleQueue
from typing import Any
from urllib.parse import SplitResult, urlsplit

from outrider_serving.bench.coverage import Written
from outrider_serving.bench.results import BenchError, Run, Stream
from outrider_serving.bench.sides import check_lengths
from outrider_serving.bench.workloads import Job, Workload

_PREPARED_AT_ONCE = 16

TIMEOUT_SECONDS = 600.0
"""Longest silence of a server."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server.

    Attributes:
        address: scheme, host, port and perhaps the path that comes before /v1.
        key: sent as a bearer token; None for none.
    """

    address: SplitResult
    key: str | None = None

    def __str__(self) -> str:
        return self.address.geturl()


def parse_address(text: str) -> SplitResult:
    """The address of a server, with or without the /v1 that clients are given.

    Raises:
        ValueError: it is none; the message says what is allowed.
    """
    address = urlsplit(text.removesuffix("/").removesuffix("/v1"))
    try:
        usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:  # the port is not a number in range
        usable = False
    if not usable or address.query or address.fragment or address.username:
        raise ValueError(f"{text!r} is not an address as http://HOST:PORT")
    return address


@dataclass(slots=True)
class _Answer:
    """What of a response has come so far."""

    began: float
    texts: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None

    def add(self, chunk: dict[str, Any], seconds: float) -> None:
        """Take note of a chunk that came so long after the start."""
        text = "".join(choice["text"] for choice in chunk.get("choices", ()))
        if text:
            self.texts.append(text)
            self.arrivals.append(seconds)
        self.usage = chunk.get("usage") or self.usage

    def stream(self) -> Stream:
        """All of it; ValueError where the usage or all text is missing."""
        if self.usage is None or not self.arrivals:
            raise ValueError("the stream has no usage" if self.arrivals else "the stream has no text")
        speculation = self.usage.get("speculation") or {}
        return Stream(
            "".join(self.texts),
            int(self.usage["completion_tokens"]),
            tuple(self.arrivals),
            speculation.get("proposed_tokens"),
            speculation.get("accepted_tokens"),
            self.began,
        )


class HttpSide:
    """A server; the model is the first one that it names."""

    def __init__(self, name: str, endpoint: Endpoint) -> None:
        """Ask the server for its model.

        Raises:
            BenchError: it cannot be reached, or names none.
        """
        self.name = name
        self._endpoint = endpoint
        self.model = self._first_model()

    def prepare(self, job: Job) -> tuple[Written, ...]:
        """See `Side.prepare`; what a server remembers already, it cannot be told to forget."""
        stored = job.workload.stored
        if stored:
            answered = replace(job, workload=Workload(job.workload.name, stored))
            self._generate(answered, min(_PREPARED_AT_ONCE, len(stored)), store=True)
        return ()

    def run(self, job: Job) -> Run:
        """See `Side.run`: connections are made before the first request, and used again for those that wait.

        One that waited without a request would be closed by a server that guards against idle clients.
        """
        return self._generate(job, job.workload.streams, store=False)

    def _generate(self, job: Job, at_once: int, *, store: bool) -> Run:
        where = f"{self.name}, workload {job.workload.name}"
        try:
            with ExitStack() as open_ones, ThreadPoolExecutor(max_workers=at_once) as pool:
                free = SimpleQueue[HTTPConnection]()
                for _ in range(at_once):
                    free.put(open_ones.enter_context(closing(self._connect())))
                ask = partial(self._ask, job, time.perf_counter(), store, free)
                streams = tuple(pool.map(ask, range(len(job.workload.prompts))))
        except (OSError, HTTPException) as error:
            raise BenchError(f"{where}: {self._endpoint}: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BenchError(f"{where}: {self._endpoint} is not understood: {error}") from error
        return check_lengths(Run(streams), job, self.name)

    def close(self) -> None:
        """See `Side.close`: there is nothing to give back."""

    def _ask(
        self, job: Job, start: float, store: bool, free: SimpleQueue[HTTPConnection], number: int
    ) -> Stream:
        """One request, to the end of its stream, on a connection that is free."""
        connection = free.get_nowait()
        answer = _Answer(time.perf_counter() - start)
        body = json.dumps(_body(self.model, job, number, store=store)).encode()
        response = self._response(connection, "POST", "/v1/completions", body)
        for event in _events(response):
            seconds = time.perf_counter() - start
            chunk = json.loads(event)
            if "error" in chunk:
                raise BenchError(f"{self.name} ({self._endpoint}): {json.dumps(chunk['error'])[:400]}")
            answer.add(chunk, seconds)
        response.read()  # its end; where the server closes after it, the next request opens it again
        free.put(connection)
        return answer.stream()

    def _first_model(self) -> str:
        try:
            with closing(self._connect()) as connection:
                listed = json.loads(self._response(connection, "GET", "/v1/models").read())
            return str(listed["data"][0]["id"])
        except (OSError, HTTPException) as error:
            raise BenchError(f"{self.name}: {self._endpoint} cannot be reached: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{self.name}: {self._endpoint} names no model in /v1/models") from error

    def _connect(self) -> HTTPConnection:
        address = self._endpoint.address
        kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=TIMEOUT_SECONDS)
        connection.connect()
        return connection

    def _response(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None = None
    ) -> HTTPResponse:
        """The response to a request; BenchError where its status is not 200."""
        headers = {"Content-Type": "application/json"}
        if self._endpoint.key is not None:
            headers["Authorization"] = f"Bearer {self._endpoint.key}"
        connection.request(method, self._endpoint.address.path + path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            said = response.read(400).decode(errors="replace")
            raise BenchError(f"{self.name}: {self._endpoint}{path} answered {response.status}: {said}")
        return response


def _body(model: str, job: Job, number: int, *, store: bool) -> dict[str, Any]:
    """The request of this index. Where it is not to be stored, our server reads its prompt anew."""
    sampling = job.sampling
    body: dict[str, Any] = {
        "model": model,
        "prompt": job.workload.prompts[number],
        "max_tokens": job.tokens,
        "temperature": sampling.temperature,
        "ignore_eos": True,
        **({} if store else {"store": False}),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.temperature > 0:
        body["top_p"] = sampling.top_p
    if (seed := sampling.seed_of(number)) is not None:
        body["seed"] = seed
    return body


def _events(response: HTTPResponse) -> Iterator[str]:
    """The data of each event of a stream; ValueError where it ends before its last one."""
    for line in response:
        if line.startswith(b"data:"):
            data = line.removeprefix(b"data:").strip().decode()
            if data == "[DONE]":
                return
            yield data
    raise ValueError("the stream has ended without [DONE]")
