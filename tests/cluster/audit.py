"""Reads the API server's audit log of the test cluster: who asked for what, when, and how it was decided.

The policy (`outrider_local.configs.audit_policy`) logs service accounts outside kube-system, and Leases.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from outrider_local.layout import Layout
from outrider_local.settings import Settings

#: (API group, resource with its subresource, verb)
Rule = tuple[str, str, str]

_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True)
class Record:
    """One request, as its last entry in the log tells it: a watch that still runs has only begun."""

    audit_id: str
    user: str
    #: The pod whose token it was, where it was one's.
    pod: str
    verb: str
    #: As RBAC names them; all empty for a path that is no resource, such as /version.
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    uri: str
    #: HTTP status; 0 where none was sent.
    code: int
    #: Why it was refused, if it was.
    message: str
    #: ``allow`` or ``forbid``: the annotation of authorization.
    decision: str
    received: datetime
    #: When the last entry was written: at the end, or for a watch that runs at its start.
    staged: datetime
    #: ``ResponseStarted``, ``ResponseComplete`` or ``Panic``.
    stage: str
    user_agent: str

    @property
    def rules(self) -> frozenset[Rule]:
        """What RBAC had to grant for it; empty for a path that is no resource.

        A server-side apply that makes its object needs the right to create it too; the log says patch.
        """
        if not self.resource:
            return frozenset()
        verbs = {self.verb, "create"} if self.verb == "patch" and self.code == 201 else {self.verb}
        what = "/".join(filter(None, (self.resource, self.subresource)))
        return frozenset((self.group, what, verb) for verb in verbs)

    @property
    def forbidden(self) -> bool:
        """Whether a right was missing. A quota, say, answers 403 too, to what authorization has allowed.

        The second half is that of an apply which may patch, but not create.
        """
        return self.decision == "forbid" or (
            self.code == 403 and f'User "{self.user}" cannot ' in self.message
        )

    @property
    def writes(self) -> bool:
        """Whether it asked to change something."""
        return self.verb not in ("get", "list", "watch")

    @property
    def account(self) -> tuple[str, str]:
        """(namespace, name) of the service account; both empty for other users."""
        if not self.user.startswith(_ACCOUNT):
            return "", ""
        namespace, _, name = self.user.removeprefix(_ACCOUNT).partition(":")
        return namespace, name


def records(settings: Settings) -> list[Record]:
    """Every request in the log, those received first at the front. An unfinished last line is left out."""
    log = Layout(settings.state).audit_log
    # Lumberjack names older parts audit-TIME.log.
    parts = [*sorted(log.parent.glob(f"{log.stem}-*{log.suffix}")), log]
    return parse(line for part in parts for line in _lines(part))


def parse(lines: Iterable[str]) -> list[Record]:
    """One record a request from the log's lines, in the order in which the requests were received."""
    last: dict[str, Record] = {}
    for line in lines:
        record = _record(json.loads(line))
        last[record.audit_id] = record
    return sorted(last.values(), key=lambda record: record.received)


def of_operator(found: Iterable[Record], namespace: str | None = None) -> list[Record]:
    """Requests of operators' service accounts: those that the chart makes, in one namespace or in all."""
    return [
        record
        for record in found
        if record.account[1].endswith("-operator") and namespace in (None, record.account[0])
    ]


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def _record(entry: dict[str, Any]) -> Record:
    target, answer = entry.get("objectRef", {}), entry.get("responseStatus", {})
    return Record(
        audit_id=entry["auditID"],
        user=entry["user"].get("username", ""),
        pod=next(iter(entry["user"].get("extra", {}).get("authentication.kubernetes.io/pod-name", [])), ""),
        verb=entry["verb"],
        group=target.get("apiGroup", ""),
        resource=target.get("resource", ""),
        subresource=target.get("subresource", ""),
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        uri=entry["requestURI"],
        code=answer.get("code", 0),
        message=answer.get("message", ""),
        decision=entry.get("annotations", {}).get("authorization.k8s.io/decision", ""),
        received=datetime.fromisoformat(entry["requestReceivedTimestamp"]),
        staged=datetime.fromisoformat(entry["stageTimestamp"]),
        stage=entry["stage"],
        user_agent=entry.get("userAgent", ""),
    )
