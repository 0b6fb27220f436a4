"""The life of a serving process: listen, load, answer, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from typing import NoReturn

from outrider_serving import logs
from outrider_serving.api import reload
from outrider_serving.api.app import create_admin_app, create_app
from outrider_serving.api.connections import Connection, PublicConnection, raise_descriptor_limit
from outrider_serving.api.listeners import Listener, listen, report
from outrider_serving.api.loading import load
from outrider_serving.api.options import ServeOptions, StartError
from outrider_serving.api.sharing import Sharing
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.engine.process.child import Patience
from outrider_serving.engine.process.client import EngineClient
from outrider_serving.settings import PodSettings

logger = logging.getLogger(__name__)

MARGIN_SECONDS = 2.0
"""How long before the end of the grace period the last requests are ended: exit comes before the kill.

At most half of the period. Half of the margin is for their last words, an eighth for sharing what was
written last, a quarter for closing, and the rest is spare.
"""


def run(options: ServeOptions, settings: PodSettings) -> NoReturn:
    """Serve until told to stop; then the process ends with status 0.

    Raises:
        StartError: an address cannot be had, or the model cannot be loaded as asked.
        EngineError: the engine's process failed while it loaded the model.
    """
    raise_descriptor_limit()
    asyncio.run(_run_and_exit(options, settings))


async def _run_and_exit(options: ServeOptions, settings: PodSettings) -> NoReturn:
    await Process(options, settings).run()
    # Nothing is left to do. Leaving by way of asyncio.run would wait for every task and every thread that is
    # left, however long.
    _exit(0)


class Process:
    """One serving process on one event loop."""

    def __init__(self, options: ServeOptions, settings: PodSettings) -> None:
        self._options = options
        self._settings = settings
        self._margin = min(MARGIN_SECONDS, options.grace_period / 2)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal; see `run` of this module."""
        options = self._options
        sockets = {"--port": options.port} | (
            {"--admin-port": options.admin_port} if options.admin_port else {}
        )
        public_socket, *admin_socket = [_listen(options.host, port, flag) for flag, port in sockets.items()]
        port = public_socket.getsockname()[1]
        sharing = Sharing(options.shared_cache, options.retention, options.tenancy.known)
        serving = Serving(
            served_name=options.served_name,
            settings=self._settings,
            tenancy=options.tenancy,
            shared=sharing,
            address=options.host,
            port=port,
        )
        if options.keys_directory is not None:
            reload.load_keys(serving, options.keys_directory)
        engine = EngineClient(
            options.engine,
            self._settings,
            patience=Patience(step=options.step_timeout),
            on_step=serving.record_step,
            on_end=serving.record_ending,
            on_history=sharing.tell_again,
            outputs=sharing,
        )
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(report)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        public = Listener(create_app(serving), public_socket, PublicConnection)
        admin = [Listener(create_admin_app(serving), listening, Connection) for listening in admin_socket]
        logs.event(logger, "listening", host=options.host, port=port, admin_port=options.admin_port)
        files = reload.watchers(
            serving, settings_file=options.settings_file, keys_directory=options.keys_directory
        )
        watchers = [asyncio.create_task(following) for following in files]
        try:
            if await self._load(serving, engine, sharing):
                await self._stop.wait()
                await self._drain(serving, public)
                await sharing.close(self._margin / 8)
        finally:
            for watcher in watchers:
                watcher.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._margin / 4):
                    await _close(serving, engine, [public, *admin])

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            logs.event(logger, "second signal: ending at once", logging.WARNING, signal=number)
            _exit(128 + number)
        logs.event(logger, "signal: draining", signal=number)
        self._stop.set()

    async def _load(self, serving: Serving, engine: EngineClient, sharing: Sharing) -> bool:
        """Load the model, and what others have shared; False if a signal came first."""
        loading = asyncio.create_task(self._load_and_warm(engine, sharing))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            return False
        serving.serve(loading.result())
        return True

    async def _load_and_warm(self, engine: EngineClient, sharing: Sharing) -> ServedModel:
        model = await load(self._options, engine)
        await sharing.start(engine, model.identity, model.encoder.vocab_size, self._options.warm_seconds)
        return model

    async def _drain(self, serving: Serving, public: Listener) -> None:
        """Readiness off; for the drain delay accept, keep no connection; let the rest end within grace."""
        loop, options = asyncio.get_running_loop(), self._options
        deadline = loop.time() + options.grace_period - self._margin
        serving.drain()
        public.retire()
        await asyncio.sleep(min(options.drain_delay, deadline - loop.time()))
        public.stop()
        if not await public.ended(deadline - loop.time()):
            logs.event(logger, "grace period over: ending the requests in flight", logging.WARNING)
            serving.expired.set()
            await public.ended(self._margin / 2)
        logs.event(logger, "drained")


async def _close(serving: Serving, engine: EngineClient, listeners: Sequence[Listener]) -> None:
    """Cut what is left of the connections, then end the engine."""
    await asyncio.gather(*(listener.abandon() for listener in listeners))
    await engine.close()
    serving.close()


def _exit(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)


def _listen(host: str, port: int, flag: str) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise StartError(f"{flag} {port}: cannot listen on {host}: {error.strerror or error}") from error
