"""What is worked out of raw readings: percentiles, differences of metrics, counts of requests. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]
"""Values by name (as the text has it, ``_bucket`` and ``_count`` included) and labels."""

READS: Final = ("get", "list", "watch")
_MADE_BY_WATCHER: Final = "kopf"


@dataclass(frozen=True, slots=True)
class Request:
    """What the audit log tells of one request of the operator."""

    verb: str
    resource: str
    """As RBAC names it, with its subresource; empty for a path that is none, such as /version."""
    code: int
    received: datetime
    by_watcher: bool
    """Whether the library that watches has sent it: the operator's own metrics do not count these."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share (0 to 1) of all does not exceed.

    Raises:
        ValueError: there are no values, or the share is no share.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(
            f"the percentile {share} of {len(values)} values: give 0 to 1, of one value at least"
        )
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Count, median, 99th percentile and the largest."""
    return {
        "count": len(values),
        "p50": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values),
    }


def parse(exposition: str) -> Samples:
    """The samples of a text that Prometheus reads."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def difference(before: Samples, after: Samples) -> Samples:
    """What counters have grown by; one that is lower than before was started again, and counts in full."""
    return {
        key: value - before[key] if key in before and before[key] <= value else value
        for key, value in after.items()
    }


def sums(samples: Samples, name: str, *by: str) -> dict[tuple[str, ...], float]:
    """The sum of a metric by the values of some of its labels; what is zero is left out."""
    found: dict[tuple[str, ...], float] = {}
    for (own, labels), value in samples.items():
        if own == name and value:
            key = tuple(dict(labels).get(label, "") for label in by)
            found[key] = found.get(key, 0.0) + value
    return found


def value(samples: Samples, name: str) -> float:
    """The sum of a metric over all its labels; 0 where there is none."""
    return sums(samples, name).get((), 0.0)


def bucket_of(samples: Samples, histogram: str, share: float) -> float | None:
    """The upper bound of the bucket in which the percentile lies, in the histogram's unit; None if empty.

    It may be infinite.
    """
    buckets = sorted(
        (float(bound), count) for (bound,), count in sums(samples, f"{histogram}_bucket", "le").items()
    )
    if not buckets:
        return None
    wanted = share * buckets[-1][1]
    return next(bound for bound, count in buckets if count >= wanted)


def requests(lines: Iterable[str], account: str, begin: datetime, end: datetime) -> list[Request]:
    """The requests of a service account (``namespace:name``) received in [begin, end), from an audit log.

    A request has several lines; the last counts. Lines of others are skipped unread: most are not ours.
    """
    user = f"system:serviceaccount:{account}"
    found: dict[str, Request] = {}
    for line in lines:
        if f'"{user}"' not in line or not line.endswith("\n"):
            continue
        entry = json.loads(line)
        received = datetime.fromisoformat(entry["requestReceivedTimestamp"])
        if entry["user"]["username"] == user and begin <= received < end:
            found[entry["auditID"]] = _request(entry, received)
    return list(found.values())


def _request(entry: dict[str, object], received: datetime) -> Request:
    target, answer = entry.get("objectRef"), entry.get("responseStatus")
    resource = code = None
    if isinstance(target, dict):
        resource = "/".join(filter(None, (target.get("resource"), target.get("subresource"))))
    if isinstance(answer, dict):
        code = answer.get("code")
    return Request(
        verb=str(entry["verb"]),
        resource=resource or "",
        code=int(code or 0),
        received=received,
        by_watcher=str(entry.get("userAgent", "")).lower().startswith(_MADE_BY_WATCHER),
    )


def counts(found: Iterable[Request]) -> dict[str, int]:
    """How many requests there are by ``VERB RESOURCE``, the most frequent first."""
    counter = Counter(f"{request.verb} {request.resource or '(no resource)'}" for request in found)
    return dict(counter.most_common())


def refusals(found: Iterable[Request]) -> dict[str, int]:
    """How many were answered with an error, by ``CODE VERB RESOURCE``."""
    counter = Counter(
        f"{request.code} {request.verb} {request.resource}" for request in found if request.code > 399
    )
    return dict(counter.most_common())


def by_verb(calls: Mapping[str, int]) -> dict[str, int]:
    """The same by verb alone."""
    counter: Counter[str] = Counter()
    for call, count in calls.items():
        counter[call.split(" ")[0]] += count
    return dict(counter.most_common())


def needless(calls: Mapping[str, int]) -> dict[str, int]:
    """Writes that an operator with nothing to do must not make: all but those of its Lease."""
    found = {}
    for call, count in calls.items():
        verb, resource = call.split(" ", 1)
        if verb not in READS and resource != "leases":
            found[call] = count
    return found
