"""The operator's own port: that it lives, and its metrics. It answers on a standby, too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from outrider_operator.instruments import CONTENT_TYPE, Instruments


@asynccontextmanager
async def serve(host: str, port: int, instruments: Instruments) -> AsyncIterator[int]:
    """Answer while the context lasts; the port it listens on."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")  # by the event loop that also does the work

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=instruments.exposition(), headers={"Content-Type": CONTENT_TYPE})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
