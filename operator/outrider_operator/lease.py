"""Which of several operators works: the one that holds a Lease, as Kubernetes' own controllers do it.

`Election` is the decision, pure of clock and client: it is told what the Lease says and when, on a clock that
only this process reads, since clocks of different machines need not agree. A Lease of another is taken only
after this process itself has seen it unchanged for as long as it lasts. A holder counts from before it asked
for a renewal, stops writing when two thirds have passed without one, and ends: the last third is the margin
between its last write and the first of the next holder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from outrider_operator.observation import Object

_MICRO_TIME: Final = "%Y-%m-%dT%H:%M:%S.%fZ"

SHORTEST_SECONDS: Final = 6.0
"""Of a Lease: a third of it covers connecting to the API server."""

FREE: Final = ""
"""Holder of a Lease that was given back."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of everything, from how long a Lease lasts."""

    lease: float

    @property
    def renew_every(self) -> float:
        """Of the holder."""
        return self.lease / 5

    @property
    def retry_every(self) -> float:
        """Of one who waits, and of a holder whose renewal failed."""
        return self.lease / 10

    @property
    def deadline(self) -> float:
        """After the last renewal: no write and no work from here on."""
        return self.lease * 2 / 3


class Election:
    """The state of one candidate."""

    def __init__(self, identity: str, timing: Timing) -> None:
        self.identity = identity
        self.timing = timing
        self._seen: tuple[object, ...] | None = None
        self._seen_at = 0.0
        self._lasts = -math.inf  # until one is seen
        self._renewed_at: float | None = None

    def may_claim(self, lease: Object | None, now: float) -> bool:
        """Whether to claim the Lease, as it was just read; None where there is none."""
        if lease is None:  # not claimed at once where one was held just now: its holder finds out only later
            return now - self._seen_at > min(self._lasts, self.timing.lease)
        spec = lease.get("spec", {})
        holder = spec.get("holderIdentity") or FREE
        if holder == self.identity:
            return True  # of an earlier process of the same pod: at most one runs at a time
        record = (holder, spec.get("renewTime"), spec.get("acquireTime"))
        if record != self._seen:
            self._seen, self._seen_at = record, now
        self._lasts = 0.0 if holder == FREE else float(spec.get("leaseDurationSeconds") or self.timing.lease)
        return holder == FREE or now - self._seen_at > self._lasts

    def renewed(self, asked_at: float) -> None:
        """The API server accepted a claim or renewal that was sent at that moment."""
        self._renewed_at = asked_at

    def lost(self) -> None:
        """Another has it."""
        self._renewed_at = None

    def holds(self, now: float) -> bool:
        """Whether nobody else can hold the Lease for a while yet."""
        return self.remaining(now) > 0

    def remaining(self, now: float) -> float:
        """Seconds until the deadline; 0 or less once it has passed, or without the Lease."""
        return 0.0 if self._renewed_at is None else self._renewed_at + self.timing.deadline - now


def claim(
    lease: Object | None, name: str, namespace: str, identity: str, duration: float, moment: datetime
) -> Object:
    """The Lease as the one of that identity writes it: new, taken over, or renewed."""
    before = (lease or {}).get("spec", {})
    now = moment.strftime(_MICRO_TIME)
    spec: Object = {
        "holderIdentity": identity,
        "leaseDurationSeconds": round(duration),
        "acquireTime": now,
        "renewTime": now,
        "leaseTransitions": int(before.get("leaseTransitions") or 0),
    }
    if before.get("holderIdentity") == identity:
        spec["acquireTime"] = before.get("acquireTime") or now
    elif lease is not None:
        spec["leaseTransitions"] += 1
    if lease is not None:
        return {**lease, "spec": {**before, **spec}}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def release(lease: Object, moment: datetime) -> Object:
    """The Lease given back: whoever waits takes it at once."""
    now = moment.strftime(_MICRO_TIME)
    return {**lease, "spec": {**lease["spec"], "holderIdentity": FREE, "renewTime": now}}
