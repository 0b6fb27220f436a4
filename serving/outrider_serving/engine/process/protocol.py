"""What the API's process and the engine's process say to each other, and how it is framed on their socket.

A frame is the length of its body, 8 bytes, big-endian, and the body: a pickle of one frozen message. Both
ends are this code of this version and share one machine, so times of time.monotonic() mean the same in both.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.records import GraphCounts, PageCounts, StepRecord
from outrider_serving.engine.types import Delta, EngineError, Request
from outrider_serving.settings import PodSettings
from outrider_serving.suffix.lookup import HistorySize

if TYPE_CHECKING:
    from outrider_serving.models.loading import LoadedModel

BEAT_SECONDS = 1.0
"""The engine's process says something at least this often."""

_LENGTH = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Start:
    """To the engine, first and once: what to be.

    Attributes:
        factory: "module:function" of what builds the core; see `engine.process.main.Factory`.
        log_level: one of `logs.LEVELS`.
    """

    factory: str
    options: EngineOptions
    settings: PodSettings
    log_level: str


@dataclass(frozen=True, slots=True)
class Submit:
    """To the engine: generate this."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the engine: nobody reads this request any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class SetSettings:
    """To the engine: these are in force from the next step on."""

    settings: PodSettings


@dataclass(frozen=True, slots=True)
class Learn:
    """To the engine: requests of a tenant have written this elsewhere.

    Attributes:
        outputs: each an array of int32 in this machine's order, as bytes.
        written: when, in seconds since the epoch.
    """

    tenant: str
    outputs: tuple[bytes, ...]
    written: int


@dataclass(frozen=True, slots=True)
class Purge:
    """To the engine: forget what requests of a tenant have written."""

    tenant: str


@dataclass(frozen=True, slots=True)
class Erase:
    """To the engine: forget what requests had written before, in seconds since the epoch."""

    before: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the API needs to know of a loaded model; fields of the same name are those of `LoadedModel`.

    Attributes:
        tokenizer: a pickle of it. Saving and loading it again would be slower, imports torch, and does not
            give the same tokenizer for every kind.
        pages: pages of keys and values that all requests share, and
        page_size: tokens in one.
        kernels: the compiled code that runs it; empty where transformers' own modules do.
        graphs: its passes in graphs now.
        suffix_compiled: whether the index of the suffix proposer is compiled code.
    """

    tokenizer: bytes
    revision: str
    dtype: str
    context_length: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    pages: int
    page_size: int
    kernels: str = ""
    graphs: GraphCounts = field(default_factory=GraphCounts)
    suffix_compiled: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """To the API: a token was generated, requests are welcome."""

    model: ModelInfo


@dataclass(frozen=True, slots=True)
class Broken:
    """To the API, last: the process ends because of this.

    Attributes:
        reason: what happened, in one line.
        refused: the model cannot be served as asked; starting again as before would not help.
    """

    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """To the API: a request was not taken, because of a ValueError or an EngineError."""

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Stepped:
    """To the API: all that one step did; or, without one, that `proposer_trouble` or `history` has changed.

    Attributes:
        record: None where no request took part.
        failures: requests that have ended with an error, by id.
        running: requests that take part in steps, after this one.
        pages: of keys and values, after this one.
        proposer_trouble: why a proposer that the settings name is not loaded, None where all are.
        graphs: passes of the target in graphs, after this one.
        history: what is remembered of what requests have written, after this one.
    """

    record: StepRecord | None
    deltas: tuple[Delta, ...]
    failures: tuple[tuple[str, EngineError], ...]
    running: int
    pages: PageCounts
    proposer_trouble: str | None = None
    graphs: GraphCounts = field(default_factory=GraphCounts)
    history: HistorySize = field(default_factory=HistorySize)


@dataclass(frozen=True, slots=True)
class Learned:
    """To the API: a `Learn` was taken, which took so many seconds of a processor."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Beat:
    """To the API: there was nothing else to say for BEAT_SECONDS, and the process lives.

    Attributes:
        occupied: the step loop is at work, and not waiting for a message.
    """

    occupied: bool


ToEngine = Start | Submit | Cancel | SetSettings | Learn | Purge | Erase
ToApi = Ready | Broken | Refused | Stepped | Learned | Beat


def describe(
    loaded: LoadedModel, *, pages: int, page_size: int, graphs: GraphCounts, suffix_compiled: bool
) -> ModelInfo:
    """What the API is told of a model; takes about a second where the vocabulary is large."""
    return ModelInfo(
        tokenizer=pickle.dumps(loaded.tokenizer, pickle.HIGHEST_PROTOCOL),
        revision=loaded.revision,
        dtype=loaded.dtype,
        context_length=loaded.context_length,
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        pages=pages,
        page_size=page_size,
        kernels=loaded.compiled.library.name if loaded.compiled is not None else "",
        graphs=graphs,
        suffix_compiled=suffix_compiled,
    )


def encode(message: ToEngine | ToApi) -> bytes:
    """The frame of a message."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> ToEngine:
    """Block for the next message to the engine.

    Raises:
        EOFError: the other end is closed, between two frames or within one.
        OSError: the connection is broken.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    message: ToEngine = pickle.loads(_exactly(connection, length))
    return message


async def read(stream: asyncio.StreamReader) -> ToApi:
    """Wait for the next message to the API.

    Raises:
        EOFError: the other end is closed, between two frames or within one.
        OSError: the connection is broken.
    """
    (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
    message: ToApi = pickle.loads(await stream.readexactly(length))
    return message


def _exactly(connection: socket.socket, size: int) -> bytearray:
    received = bytearray(size)
    rest = memoryview(received)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return received
