"""Writing Events. They are for people: one that is lost must not hold up the work."""

from __future__ import annotations

import logging
import secrets
import socket
import time
from datetime import UTC, datetime
from typing import Final

from outrider_operator import names
from outrider_operator.client import ApiError, Client
from outrider_operator.events import Event, Ledger, document
from outrider_operator.observation import Object

logger = logging.getLogger(__name__)

_INSTANCE: Final = socket.gethostname()


class Recorder:
    """Writes the events of SpeculativeModels, by a ledger of what was told before."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._ledger = Ledger(lambda: secrets.token_hex(8))

    async def record(self, resource: Object, event: Event) -> None:
        """Write an event, or count it up."""
        metadata = resource["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        write = self._ledger.enter(name, uid, event, time.monotonic())
        if write is None:
            return
        logger.info("%s/%s: %s: %s", namespace, name, event.reason, event.message)
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            if write.count == 1:
                await self._client.create(
                    document(
                        resource, event, write, moment=moment, instance=_INSTANCE, manager=names.FIELD_MANAGER
                    )
                )
            else:
                again = {"count": write.count, "lastTimestamp": moment}
                await self._client.merge("Event", namespace, write.name, again)
        except ApiError as error:
            self._ledger.forget(uid, event)
            logger.warning("an event was not written: %s", error)
