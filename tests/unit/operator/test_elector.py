"""Holding a Lease against an API server that fails, is silent, or tells of another holder."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from outrider_operator.client import ApiError
from outrider_operator.elector import Elector, LeaseLostError, monotonic
from outrider_operator.lease import Election, Timing

Object = dict[str, Any]

SECONDS = 0.3
"""Shorter than an operator accepts, so that the tests need not wait."""


class Api:
    """One Lease, with the faults that a test sets."""

    def __init__(self, lease: Object | None = None) -> None:
        self.lease = lease
        self.fault: Exception | None = None
        self.silent = False
        self.writes = 0

    async def _answer(self) -> None:
        if self.silent:
            await asyncio.sleep(60)
        if self.fault is not None:
            raise self.fault

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        assert (kind, namespace, name) == ("Lease", "ns", "l")
        await self._answer()
        return self.lease

    async def create(self, wanted: Object) -> Object:
        assert self.lease is None
        return await self.replace(wanted)

    async def replace(self, wanted: Object) -> Object:
        await self._answer()
        self.lease = wanted
        self.writes += 1
        return wanted

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return str(self.lease["spec"]["holderIdentity"])


def elector(api: Api, identity: str = "me") -> Elector:
    return Elector(api, Election(identity, Timing(SECONDS)), "ns", "l")  # type: ignore[arg-type]


async def held(api: Api) -> Elector:
    made = elector(api)
    await made.acquire()
    return made


async def test_it_is_claimed_kept_and_given_back() -> None:
    api = Api()
    mine = await held(api)
    assert mine.may_write()
    keeping = asyncio.create_task(mine.keep())
    await asyncio.sleep(SECONDS * 2)
    assert mine.may_write()
    assert api.writes > 5
    keeping.cancel()
    await mine.give_back()
    assert api.holder == ""
    assert not mine.may_write()


async def test_it_is_given_back_though_the_last_renewal_came_in_between() -> None:
    api = Api()
    mine = await held(api)
    replace = api.replace

    async def conflict_once(wanted: Object) -> Object:
        api.replace = replace  # type: ignore[method-assign]
        raise ApiError(409, "the object has been modified")

    api.replace = conflict_once  # type: ignore[method-assign]
    await mine.give_back()
    assert api.holder == ""


async def test_one_waits_for_another_that_died() -> None:
    api = Api()
    await held(api)
    api.lease["spec"]["leaseDurationSeconds"] = SECONDS  # type: ignore[index]  # whole seconds in a real one
    began = time.monotonic()
    other = elector(api, "other")
    await asyncio.wait_for(other.acquire(), 5)
    assert time.monotonic() - began >= SECONDS
    assert api.holder == "other"


async def test_an_api_server_that_is_away_is_waited_for() -> None:
    api = Api()
    api.fault = ApiError(0, "away")
    mine = elector(api)
    acquiring = asyncio.create_task(mine.acquire())
    await asyncio.sleep(SECONDS)
    assert not acquiring.done()
    api.fault = None
    await asyncio.wait_for(acquiring, 5)
    assert mine.may_write()


async def test_a_missing_right_is_not_waited_for() -> None:
    api = Api()
    api.fault = ApiError(403, "leases is forbidden")
    with pytest.raises(ApiError, match="forbidden"):
        await elector(api).acquire()


async def test_a_fault_of_a_moment_costs_nothing() -> None:
    api = Api()
    mine = await held(api)
    keeping = asyncio.create_task(mine.keep())
    api.fault = ApiError(503, "busy")
    await asyncio.sleep(SECONDS / 3)
    api.fault = None
    await asyncio.sleep(SECONDS)
    assert mine.may_write()
    keeping.cancel()


@pytest.mark.parametrize("how", ["away", "silent"])
async def test_one_that_cannot_renew_ends_before_the_lease(how: str) -> None:
    api = Api()
    mine = await held(api)
    began = monotonic()
    if how == "away":
        api.fault = ApiError(0, "away")
    else:
        api.silent = True
    with pytest.raises(LeaseLostError, match="was not renewed"):
        await mine.keep()
    assert monotonic() - began < SECONDS
    assert not mine.may_write()


async def test_one_whose_lease_another_took_ends_at_once() -> None:
    api = Api()
    mine = await held(api)
    api.lease["spec"]["holderIdentity"] = "other"  # type: ignore[index]
    with pytest.raises(LeaseLostError, match="is held by other, not by me"):
        await mine.keep()
    assert not mine.may_write()
    await mine.give_back()
    assert api.holder == "other"
