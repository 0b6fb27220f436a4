"""Fairness between tenants that wait for the same thing: whose turn it is, and how many places one may have.

Tenants that wait at the same time get equal service: the virtual token counter of Sheng et al. 2024,
"Fairness in Serving Large Language Models" (arXiv 2401.00588), Algorithm 2. A counter for each tenant holds
what it was served, weighted; of the tenants that wait, the one with the least goes next. One that comes back
after a pause is lifted to the least counter of those that are there, so that nobody saves up.
"""

from __future__ import annotations

from collections.abc import Set

from outrider_serving.engine.types import QueueFullError

ANONYMOUS = ""
"""The tenant of requests without one: where there are no keys, it is everybody."""


def share_of(tenant: str, room: int, waiting: int, *, others: bool) -> int:
    """How many places of a room a tenant may have: as many as are free, so no more than it leaves to others.

    So it has at most half of the room, and no number of flooding tenants keeps another one out. The anonymous
    tenant may have all while there are no others.
    """
    return room if tenant == ANONYMOUS and not others else room - waiting


def check_room(tenant: str, room: int, *, own: int, waiting: int, others: bool) -> None:
    """Whether one more of a tenant may wait, by `share_of`.

    Args:
        tenant: whose it is.
        room: how many may wait.
        own: how many of the tenant wait already.
        waiting: how many wait already.
        others: another tenant is active.

    Raises:
        QueueFullError: too many wait, altogether or of this tenant.
    """
    if waiting >= room:
        raise QueueFullError(waiting, room)
    share = share_of(tenant, room, waiting, others=others)
    if own >= share:
        raise QueueFullError(own, share)


def most_at_once(tenant: str, places: int, waiting: int) -> int:
    """How many requests of a tenant an idle engine takes at once, by `share_of`.

    Args:
        tenant: whose they are.
        places: how many requests can run.
        waiting: how many can wait beside them.
    """
    room = places + waiting
    return room if tenant == ANONYMOUS else max(places, -(-room // 2))


class Served:
    """What each tenant was served. A tenant is active while something of it waits or is served."""

    def __init__(self) -> None:
        """Nobody was served anything."""
        self._served: dict[str, int] = {}
        self._floor = 0  # the counter of the tenant that was active last

    def __getitem__(self, tenant: str) -> int:
        """The counter of an active tenant."""
        return self._served[tenant]

    def begin(self, tenant: str, active: Set[str]) -> None:
        """Let a tenant that becomes active begin where the others are; forget those that this would lift.

        Args:
            tenant: which has something to be served now.
            active: the tenants that had already; it may be among them.
        """
        if tenant in active:
            return
        floor = min((self._served[other] for other in active), default=self._floor)
        self._served = {t: served for t, served in self._served.items() if t in active or served > floor}
        self._served.setdefault(tenant, floor)

    def charge(self, tenant: str, cost: int) -> None:
        """Add to what an active tenant was served."""
        self._served[tenant] += cost

    def end(self, tenant: str, active: Set[str]) -> None:
        """Remember where newcomers begin when the last tenant is gone.

        Args:
            tenant: of which something has been served, or left.
            active: the tenants that have something still.
        """
        if not active:
            self._floor = self._served[tenant]
