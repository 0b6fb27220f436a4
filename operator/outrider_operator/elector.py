"""Holding the Lease: waiting for it, renewing it in time, giving it back."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Final

from outrider_operator.client import ApiError, Client
from outrider_operator.lease import FREE, Election, claim, release
from outrider_operator.observation import Object

logger = logging.getLogger(__name__)

_KIND: Final = "Lease"


class LeaseLostError(Exception):
    """The Lease could not be renewed in time, or another took it: this process must write nothing more."""


def monotonic() -> float:
    """Seconds that also pass while this process is stopped and while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Elector:
    """One Lease of the API server, for one candidate."""

    def __init__(self, client: Client, election: Election, namespace: str, name: str) -> None:
        self._client = client  # unfenced: whether to write the Lease is decided here
        self._election = election
        self._namespace = namespace
        self._name = name

    def may_write(self) -> bool:
        """Whether this process holds the Lease, with time to spare."""
        return self._election.holds(monotonic())

    async def acquire(self) -> None:
        """Wait until the Lease is held; an API server that is away is waited for too."""
        waiting = ""
        while True:
            try:
                lease = await self._read()
                if self._election.may_claim(lease, monotonic()):
                    await self._claim(lease)
                    logger.info("holding Lease %s/%s as %s", self._namespace, self._name, self._identity)
                    return
                holder = (lease or {}).get("spec", {}).get("holderIdentity") or FREE
                if holder != waiting:
                    waiting = holder
                    by = holder or "nobody any more"
                    logger.info("waiting for Lease %s/%s, held by %s", self._namespace, self._name, by)
            except ApiError as error:
                if error.status in (401, 403):
                    raise  # a right is missing: say so and end, rather than wait for ever
                logger.warning("Lease %s/%s: %s", self._namespace, self._name, error)
            await asyncio.sleep(self._election.timing.retry_every)

    async def keep(self) -> None:
        """Renew until cancelled.

        Raises:
            LeaseLostError: the deadline has passed, or another holds the Lease.
        """
        timing = self._election.timing
        while True:
            pause = timing.renew_every
            try:
                # Not longer than the deadline: an API server may also accept a request and be silent.
                await asyncio.wait_for(self._renew(), max(0.1, self._remaining()))
            except TimeoutError:
                pause = 0
            except ApiError as error:
                logger.warning("renewing Lease %s/%s: %s", self._namespace, self._name, error)
                pause = min(timing.retry_every, max(0.0, self._remaining()))
            if not self.may_write():
                raise LeaseLostError(
                    f"Lease {self._namespace}/{self._name} was not renewed within {timing.deadline:.0f} s"
                )
            await asyncio.sleep(pause)

    async def give_back(self) -> None:
        """Leave the Lease to whoever waits, if it is still held; the caller writes nothing afterwards."""
        if not self.may_write():
            return
        self._election.lost()
        try:
            for last_try in (False, True):
                lease = await self._read()
                if lease is None or lease.get("spec", {}).get("holderIdentity") != self._identity:
                    return
                try:
                    await self._client.replace(release(lease, datetime.now(UTC)))
                except ApiError as error:
                    if error.status != 409 or last_try:
                        raise
                    continue  # our own last renewal came in between
                logger.info("gave back Lease %s/%s", self._namespace, self._name)
                return
        except ApiError as error:
            logger.warning("Lease %s/%s was not given back: %s", self._namespace, self._name, error)

    @property
    def _identity(self) -> str:
        return self._election.identity

    def _remaining(self) -> float:
        return self._election.remaining(monotonic())

    async def _read(self) -> Object | None:
        return await self._client.get(_KIND, self._namespace, self._name)

    async def _renew(self) -> None:
        lease = await self._read()
        holder = (lease or {}).get("spec", {}).get("holderIdentity")
        if lease is not None and holder != self._identity:
            self._election.lost()
            raise LeaseLostError(
                f"Lease {self._namespace}/{self._name} is held by {holder or 'nobody'}, "
                f"not by {self._identity}"
            )
        await self._claim(lease)

    async def _claim(self, lease: Object | None) -> None:
        asked_at = monotonic()
        wanted = claim(
            lease,
            self._name,
            self._namespace,
            self._identity,
            self._election.timing.lease,
            datetime.now(UTC),
        )
        if lease is None:
            await self._client.create(wanted)
        else:
            await self._client.replace(wanted)
        self._election.renewed(asked_at)
