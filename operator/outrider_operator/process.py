"""The operator's life: its port, then the Lease, and only with that watches, sweeps and workers."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx
import kopf
from kubernetes.dynamic import DynamicClient

from outrider_operator import health, names
from outrider_operator.cache import Cache
from outrider_operator.client import ApiError, Client, load_client
from outrider_operator.config import OperatorConfig
from outrider_operator.elector import Elector, LeaseLostError
from outrider_operator.handlers import registry
from outrider_operator.instruments import Instruments
from outrider_operator.lease import Election, Timing
from outrider_operator.observation import Object
from outrider_operator.reconcile import Reconciler
from outrider_operator.sweep import HistoryLostError, Sweeper
from outrider_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

WORKERS: Final = 32
"""More than there are threads for requests: most of a pass may be waiting for a pod that does not answer."""

_AGAIN_SECONDS: Final = 2.0
_LAST_WRITES_SECONDS: Final = 5.0
_GIVE_BACK_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Who this process is among several operators, and where it answers."""

    identity: str
    lease_name: str
    lease_seconds: float
    listen: tuple[str, int] | None


class Process:
    """One operator process.

    `abandon` is called when the Lease is lost. It must end the process without waiting for anything: a thread
    may hang in a request for longer than the Lease lasts.
    """

    def __init__(
        self, config: OperatorConfig, standing: Standing, abandon: Callable[[LeaseLostError], None]
    ) -> None:
        self._config = config
        self._standing = standing
        self._abandon = abandon
        self._instruments = Instruments()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT."""
        self._heed_signals()
        async with AsyncExitStack() as stack:
            if self._standing.listen is not None:
                await stack.enter_async_context(health.serve(*self._standing.listen, self._instruments))
            dynamic = await asyncio.to_thread(load_client)
            client = Client(dynamic, report=self._instruments.called)
            elector = self._elector(client)
            self._instruments.watch_lease(elector.may_write)
            if await self._unless_stopped(self._wait_for_turn(client, elector)):
                await self._lead(dynamic, elector)

    def _elector(self, client: Client) -> Elector:
        election = Election(self._standing.identity, Timing(self._standing.lease_seconds))
        return Elector(client, election, self._config.pod_namespace, self._standing.lease_name)

    async def _wait_for_turn(self, client: Client, elector: Elector) -> None:
        while True:
            try:
                if await client.serves(names.KIND):
                    break
                raise SystemExit(
                    f"the API server does not know {names.KIND}: install the chart's CRD (crds.install)"
                )
            except ApiError as error:
                logger.warning("the API server does not answer: %s", error)
                await asyncio.sleep(_AGAIN_SECONDS)
        await elector.acquire()

    async def _lead(self, dynamic: DynamicClient, elector: Elector) -> None:
        """Work, while the Lease is held; then leave it to the next."""
        keeping = asyncio.create_task(self._keep(elector))
        client = Client(dynamic, may_write=elector.may_write, report=self._instruments.called)
        try:
            await self._unless_stopped(self._work(client))
        finally:
            keeping.cancel()  # else a renewal in between would take the Lease again, or end us as if lost
            await asyncio.wait((keeping,), timeout=_GIVE_BACK_SECONDS)
            if await client.drain(_LAST_WRITES_SECONDS):
                with suppress(TimeoutError):
                    await asyncio.wait_for(elector.give_back(), _GIVE_BACK_SECONDS)

    async def _keep(self, elector: Elector) -> None:
        try:
            await elector.keep()
        except LeaseLostError as error:
            self._abandon(error)
        except Exception as error:  # whatever it is: without renewals this process must not go on
            logger.exception("the Lease is not kept any more")
            self._abandon(LeaseLostError(f"{type(error).__name__}: {error}"))

    async def _work(self, client: Client) -> None:
        cache, config = Cache(), self._config
        sweeper = Sweeper(client, cache, config.namespaces)
        # Of many pods each is asked seldom: a connection that is kept costs every request a look at it.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(trust_env=False, follow_redirects=False, limits=limits) as admin:
            reconciler = Reconciler(client, admin, cache, config, lambda *key: queue.add(*key))
            queue = WorkQueue(reconciler.reconcile, report=self._instruments.passed)
            self._instruments.watch_work(depth=lambda: queue.depth, models=lambda: list(cache.models()))

            def hear(found: Object, deleted: bool) -> None:
                for key in cache.remove(found) if deleted else cache.put(found):
                    queue.add(*key)

            await self._first_sweep(sweeper, queue)
            async with asyncio.TaskGroup() as group:  # one that fails takes the others with it
                tasks = (
                    group.create_task(queue.run(WORKERS)),
                    group.create_task(self._sweep_regularly(sweeper, queue)),
                )
                await self._watch(registry(hear))
                for task in tasks:
                    task.cancel()

    async def _watch(self, handlers: kopf.OperatorRegistry) -> None:
        ours = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=handlers,
            standalone=True,
            clusterwide=not self._config.namespaces,
            namespaces=self._config.namespaces,
        )
        self._heed_signals()  # kopf's own handlers would wait 5 s for each task of this loop, also ours
        await kopf.run_tasks(tasks, ignored=ours)

    def _heed_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    async def _first_sweep(self, sweeper: Sweeper, queue: WorkQueue) -> None:
        while not await self._sweep(sweeper, queue, first=True):  # noqa: ASYNC110  what is waited for is not in this process
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _sweep_regularly(self, sweeper: Sweeper, queue: WorkQueue) -> None:
        while True:
            await asyncio.sleep(self._config.resync_seconds)
            await self._sweep(sweeper, queue)

    async def _sweep(self, sweeper: Sweeper, queue: WorkQueue, *, first: bool = False) -> bool:
        """Whether it came to its end."""
        try:
            touched = await sweeper.sweep()
        except ApiError as error:
            logger.warning("looking at all that is watched: %s", error)
            return False
        except HistoryLostError as error:
            logger.critical("%s: the store was set back; ending, so as to start from what there is", error)
            raise
        if not first:  # nothing was watched before
            self._instruments.missed(len(touched))
        for key in touched:
            queue.add(*key)
        return True

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do it until told to stop; whether it came to its end."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return True
            return False
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)
