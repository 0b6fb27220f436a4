"""Clients that make ill use of a connection, against a real listener with little patience."""

import asyncio
import contextlib
import json
import resource
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider_serving.api import closing, connections, listeners
from outrider_serving.api.app import create_app
from outrider_serving.api.closing import Messages
from outrider_serving.api.connections import PublicConnection
from outrider_serving.api.keys import KeyRing
from outrider_serving.api.listeners import Listener, listen
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.api.text import TextEncoder
from outrider_serving.engine.records import PageCounts
from outrider_serving.engine.types import Delta, FinishReason, Request
from outrider_serving.settings import ModelState, PodSettings, default_settings
from serving.tiny import make_tokenizer

TOKENIZER = make_tokenizer()
TOKENS = tuple(TOKENIZER("some text " * 100).input_ids)
PATIENCE_SECONDS = 0.5
ENDLESS = 10_000
STUCK = 5


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


class Talkative:
    """Generates without end, as fast as it is read, or as many kB at once as there are `max_tokens`.

    After a STUCK text, it is busy until it is freed.
    """

    running = waiting = 0
    failure = unready = proposer_trouble = None
    pages = PageCounts()

    def __init__(self) -> None:
        self.given_up = 0
        self.freed = asyncio.Event()

    def set_settings(self, settings: PodSettings) -> None:
        """Nothing depends on them."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        copies = request.params.max_tokens
        if copies == STUCK:
            yield Delta(request.id, TOKENS * copies, time.monotonic())
            await self.freed.wait()
        if copies < ENDLESS:
            yield Delta(request.id, TOKENS * copies, time.monotonic(), finish_reason=FinishReason.LENGTH)
            return
        try:
            while True:
                yield Delta(request.id, TOKENS, time.monotonic())
                await asyncio.sleep(0)
        finally:
            self.given_up += 1


class Server:
    """A listener of the public port in this process."""

    def __init__(self) -> None:
        self.engine = Talkative()
        self.serving = Serving(served_name="m", settings=default_settings())
        state = ModelState(name="m", revision="r", dtype="float32", context_length=1_000_000)
        encoder = TextEncoder(TOKENIZER, vocab_size=len(TOKENIZER))
        self.serving.serve(ServedModel(state, self.engine, encoder))
        listening = listen("127.0.0.1", 0)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port = listening.getsockname()[1]
        self.listener = Listener(create_app(self.serving), listening, PublicConnection)

    async def connect(self, sent: bytes = b"") -> socket.socket:
        """A client that holds little of what is sent to it, and reads nothing by itself."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", self.port))
        await loop.sock_sendall(client, sent)
        return client

    async def answers(self, client: socket.socket) -> bytes:
        """All that a client is sent until its connection ends, in order; in lower case."""
        loop, found = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(10):
            while part := await loop.sock_recv(client, 65536):
                found += part
        return bytes(found).lower()

    async def settled(self) -> None:
        """Wait until no connection is left, and nothing runs for one."""
        await until(lambda: self.held)
        await until(lambda: not self.held and not self.listener.server_state.tasks)

    @property
    def held(self) -> int:
        return len(self.listener.server_state.connections)

    def outcomes(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in text_string_to_metric_families(self.serving.telemetry.exposition().decode())
            for sample in family.samples
            if sample.name == "outrider_requests_total"
        }


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(connections, "HEADER_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(connections, "WRITE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(closing, "LINGER_SECONDS", PATIENCE_SECONDS)
    made = Server()
    await until(lambda: made.listener.started)
    yield made
    await made.listener.abandon()
    made.serving.close()


def post(**fields: object) -> bytes:
    body = json.dumps({"model": "m", "prompt": "a", "ignore_eos": True} | fields)
    return f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


async def test_small_writes_do_not_wait_for_each_other(server: Server) -> None:
    with contextlib.closing(await server.connect()):
        await until(lambda: server.held)
        (connection,) = server.listener.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"G", b"GET /healthz HTTP/1.1\r\nho"])
async def test_a_header_that_does_not_come_is_not_waited_for(server: Server, sent: bytes) -> None:
    with contextlib.closing(await server.connect(sent)):
        await server.settled()


async def test_a_second_header_that_does_not_come_is_not_waited_for(server: Server) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.closing(await server.connect(HEALTH)) as client:
        assert await loop.sock_recv(client, 1000)
        await loop.sock_sendall(client, b"G")
        await server.settled()


async def test_a_header_that_comes_by_single_bytes_is_not_waited_for(server: Server) -> None:
    began = time.monotonic()
    with contextlib.closing(await server.connect()) as client, contextlib.suppress(OSError):
        for byte in HEALTH * 10:
            await asyncio.get_running_loop().sock_sendall(client, bytes([byte]))
            await asyncio.sleep(0.05)
            if not server.held:
                break
    assert time.monotonic() - began < 10 * PATIENCE_SECONDS


async def test_a_client_that_reads_slowly_is_waited_for(server: Server) -> None:
    """Longer than the patience with one that does not read, and also between two requests."""
    loop = asyncio.get_running_loop()
    with contextlib.closing(await server.connect(HEALTH)) as client:
        assert await loop.sock_recv(client, 1000)
        await asyncio.sleep(3 * PATIENCE_SECONDS)
        await loop.sock_sendall(client, post(max_tokens=ENDLESS, stream=True))
        ends = loop.time() + 6 * PATIENCE_SECONDS
        while loop.time() < ends:
            assert await loop.sock_recv(client, 1_000_000)
            await asyncio.sleep(PATIENCE_SECONDS / 10)
    await server.settled()
    assert server.engine.given_up == 1


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_stream_that_is_not_read_is_cancelled(server: Server, stopped: bool) -> None:
    """Also while the server drains, which does not wait for such a client until the grace period ends."""
    with contextlib.closing(await server.connect(post(max_tokens=ENDLESS, stream=True))):
        await until(lambda: server.listener.server_state.tasks)
        if stopped:
            server.listener.stop()
            assert await server.listener.ended(10)
        else:
            await server.settled()
    assert server.outcomes() == {"cancelled": 1}
    assert server.engine.given_up == 1


async def test_a_client_that_is_behind_is_not_cut_for_an_engine_that_is_busy(server: Server) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.closing(await server.connect(post(max_tokens=40))) as client:
        await asyncio.sleep(PATIENCE_SECONDS / 2)
        await loop.sock_sendall(client, post(max_tokens=STUCK, stream=True))
        await asyncio.sleep(2 * PATIENCE_SECONDS)
        assert server.held == 1
    await server.settled()


@pytest.mark.parametrize("kilobytes", [40, 400], ids=["it waits for the client", "it makes the server wait"])
async def test_a_whole_answer_that_is_not_read_holds_no_connection(server: Server, kilobytes: int) -> None:
    with contextlib.closing(await server.connect(post(max_tokens=kilobytes))):
        await server.settled()


async def test_connections_beyond_their_share_of_descriptors_are_closed_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(connections, "HEADER_SECONDS", 60)
    monkeypatch.setattr(PublicConnection, "share", 10.5 / limit)
    first = [await server.connect() for _ in range(10)]
    later = [await server.connect() for _ in range(50)]
    loop = asyncio.get_running_loop()
    for client in later:
        with contextlib.closing(client), contextlib.suppress(ConnectionResetError):
            assert await loop.sock_recv(client, 100) == b""
    assert server.held == 10
    for client in first:
        await loop.sock_sendall(client, HEALTH)
        assert b"200 OK" in await loop.sock_recv(client, 1000)
        client.close()
    await server.settled()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{server.port}/healthz")).status_code == 200


def head(*fields: str, version: str = "1.1") -> bytes:
    """Of a request with a body."""
    return "\r\n".join((f"POST /v1/completions HTTP/{version}", "host: x", *fields, "", "")).encode()


def chunked(body: bytes, *fields: str) -> bytes:
    """A request whose body comes in chunks of one byte."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return head("transfer-encoding: chunked", *fields) + chunks + b"0\r\n\r\n"


ASKED = json.dumps({"model": "m", "prompt": "a", "max_tokens": 1}).encode()


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a next part of a request was looked for: the last number is for what comes next."""
    found, next_event = [0], Messages.next_event

    def counted(messages: Messages) -> object:
        found[-1] += 1
        return next_event(messages)

    monkeypatch.setattr(Messages, "next_event", counted)
    return found


async def test_a_body_of_tiny_chunks_is_parsed_in_many_turns(server: Server, parsed: list[int]) -> None:
    async def turns() -> None:
        while True:
            await asyncio.sleep(0)
            parsed.append(0)

    turning = asyncio.create_task(turns())
    with contextlib.closing(await server.connect()) as client:
        await asyncio.get_running_loop().sock_sendall(client, chunked(ASKED + b" " * 50_000))
        assert b"200 OK" in await asyncio.get_running_loop().sock_recv(client, 1000)
    turning.cancel()
    assert sum(parsed) > 50_000
    assert max(parsed) < connections.PIECE_BYTES


MEGABYTES = 3_000_000
TOO_LARGE = f"content-length: {MEGABYTES}"
UNREAD = [
    head(TOO_LARGE),
    head(TOO_LARGE, "connection: close"),
    head(TOO_LARGE, version="1.0"),
    head("transfer-encoding: chunked", "content-encoding: gzip"),
    head("transfer-encoding: chunked") + b"no chunk\r\n",
    b"no HTTP\r\n\r\n",
]


@pytest.mark.parametrize("begun", UNREAD)
async def test_an_answer_to_what_is_not_read_to_its_end_arrives(
    server: Server, caplog: pytest.LogCaptureFixture, begun: bytes
) -> None:
    """The client sends on, reads only then, and is not reset."""
    with contextlib.closing(await server.connect(begun)) as client:
        await asyncio.get_running_loop().sock_sendall(client, b"a" * MEGABYTES)
        answer = await server.answers(client)
        assert answer.startswith(b"http/1.1 4")
        assert answer.count(b"http/1.1") == answer.count(b"connection: close") == 1
    await until(lambda: not server.held)
    assert not [record for record in caplog.records if record.exc_info]


async def test_who_never_ends_is_not_listened_to_for_long(server: Server) -> None:
    with contextlib.closing(await server.connect(UNREAD[0])):
        await server.settled()


async def test_little_is_parsed_for_who_has_no_key(server: Server, parsed: list[int]) -> None:
    server.serving.keys = KeyRing({})
    with contextlib.closing(await server.connect()) as client:
        await asyncio.get_running_loop().sock_sendall(client, chunked(b" " * 50_000))
        assert (await server.answers(client)).startswith(b"http/1.1 401")
    assert sum(parsed) < 5_000


@pytest.mark.parametrize("ahead", [b"", b"\r\n", HEALTH, b"x" * 100_000])
async def test_who_hangs_up_is_noticed_whatever_was_sent_ahead(server: Server, ahead: bytes) -> None:
    with contextlib.closing(await server.connect(post(max_tokens=ENDLESS))) as client:
        await until(lambda: server.listener.server_state.tasks)
        await asyncio.get_running_loop().sock_sendall(client, ahead)
    await server.settled()
    assert server.outcomes() == {"cancelled": 1}


async def test_a_little_may_be_sent_ahead(server: Server) -> None:
    with contextlib.closing(await server.connect(HEALTH * 20)) as client:
        found = b""
        while found.count(b"200 OK") < 20:
            found += await asyncio.get_running_loop().sock_recv(client, 65536)
        assert server.held == 1


async def test_who_sends_much_ahead_is_answered_and_left(server: Server) -> None:
    with contextlib.closing(await server.connect(post(max_tokens=STUCK) + HEALTH * 1000)) as client:
        await until(lambda: server.held)
        (connection,) = server.listener.server_state.connections
        await until(lambda: connection.conn.ahead > connections.AHEAD_BYTES)
        server.engine.freed.set()
        assert (await server.answers(client)).count(b"http/1.1 200 ok") == 1


async def test_a_request_of_two_lengths_is_the_last(server: Server) -> None:
    with contextlib.closing(await server.connect(chunked(ASKED, "content-length: 5") + HEALTH)) as client:
        answer = await server.answers(client)
        assert answer.count(b"http/1.1") == answer.count(b"200 ok") == answer.count(b"connection: close") == 1


@pytest.mark.parametrize("sent", [b"", b"GET /HT", HEALTH + b"GET /HT"])
async def test_a_listener_ends_whoever_resets_a_connection_meanwhile(server: Server, sent: bytes) -> None:
    loop = asyncio.get_running_loop()
    stream = await server.connect(post(max_tokens=ENDLESS, stream=True))
    await until(lambda: server.listener.server_state.tasks)
    client = await server.connect(sent)
    await until(lambda: server.held == 2)
    if sent:
        await asyncio.sleep(0.1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    server.listener.stop()
    for connection in list(server.listener.server_state.connections):
        connection.shutdown()  # in the turn of the loop in which the reset came
    assert not await server.listener.ended(0.5)
    assert await loop.sock_recv(stream, 100)
    stream.close()
    assert await server.listener.ended(10)


async def test_the_answers_of_a_retired_listener_are_the_last(server: Server) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.closing(await server.connect(HEALTH)) as client:
        assert b"connection: close" not in await loop.sock_recv(client, 1000)
        server.listener.retire()
        await loop.sock_sendall(client, HEALTH)
        assert (await server.answers(client)).count(b"connection: close") == 1


@pytest.mark.parametrize("path", ["healthz", "readyz"])
async def test_health_may_be_asked_for_without_its_words(server: Server, path: str) -> None:
    sent = f"HEAD /{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    with contextlib.closing(await server.connect(sent)) as client:
        answer = await server.answers(client)
        assert answer.startswith(b"http/1.1 200 ok")
        assert answer.endswith(b"\r\n\r\n")


async def test_accepts_that_fail_are_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(listeners.report)
    for _ in range(1000):
        loop.call_exception_handler({"message": listeners.ACCEPT_FAILED, "exception": OSError("too many")})
    assert [record.message for record in caplog.records] == ["connections cannot be accepted"]
    loop.call_exception_handler({"message": "something else"})
    assert caplog.records[-1].message == "something else"
