"""Tenants that a trusted gateway names, at real servers that share through a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider_serving.settings import Method, Proposer, default_settings
from serving.api.process import ServerProcess, eventually
from serving.suffix.redis_server import servers

GATEWAY = "127.0.0.1"
ELSEWHERE = "127.0.0.2"
"""Addresses that requests come from; only the first is trusted."""

HEADER = "X-Outrider-Tenant"
FORGED = "X-Forwarded-For"
TOKENS = 40
ENDPOINTS = {
    "completions": {"prompt": "the quick brown fox"},
    "chat/completions": {"messages": [{"role": "user", "content": "the quick brown fox"}]},
}

Headers = list[tuple[str, str]]
Pods = tuple[ServerProcess, ServerProcess]


@pytest.fixture(scope="module")
def pods(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    """Two servers behind the same gateway."""
    folder = tmp_path_factory.mktemp("gateways")
    settings = folder / "settings.json"
    made = default_settings(Proposer(method=Method.SUFFIX, max_depth=8))
    settings.write_text(made.model_dump_json(by_alias=True))
    with servers(folder / "redis") as some:
        arguments = [
            "--settings",
            str(settings),
            "--shared-cache",
            some.redis().url,
            "--tenant-mode",
            "header",
        ]
        arguments += ["--trusted-gateways", "10.0.0.0/8", "--trusted-gateways", GATEWAY]
        first, second = (ServerProcess(str(tiny), *arguments) for _ in range(2))
        try:
            yield first.ready(), second.ready()
        finally:
            first.end()
            second.end()


def post(
    pod: ServerProcess, *headers: tuple[str, str], peer: str = GATEWAY, to: str = "completions", **more: Any
) -> httpx.Response:
    """A completion, asked for from an address."""
    body = {
        "model": "tiny",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **ENDPOINTS[to],
        **more,
    }
    with httpx.Client(transport=httpx.HTTPTransport(local_address=peer), timeout=30) as client:
        return client.post(f"{pod.url}/v1/{to}", json=body, headers=list(headers))


def ask(pod: ServerProcess, *headers: tuple[str, str], **more: Any) -> None:
    assert post(pod, *headers, **more).status_code == 200


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, code and message of an error that is about the header."""
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == ("x-outrider-tenant", "invalid_request_error")
    return answer.status_code, error["code"], error["message"]


def found(pod: ServerProcess) -> float:
    """Proposals that came from what other requests have written."""
    return pod.metric("outrider_suffix_proposals_total", scope="history")


def finds(pod: ServerProcess, *headers: tuple[str, str]) -> bool:
    """Whether a request that leaves nothing is proposed what others have written."""
    before = found(pod)
    ask(pod, *headers, store=False)
    return found(pod) > before


def left(pod: ServerProcess) -> tuple[float, float]:
    """Tokens that its requests have shared, and that it remembers."""
    return pod.metric("outrider_shared_published_total"), pod.metric("outrider_history_tokens")


def test_tenants_share_between_servers_but_not_with_each_other(pods: Pods) -> None:
    red, blue = (HEADER, "red"), (HEADER, "blue")
    ask(pods[0], red)
    ask(pods[1], red, store=False)  # follows red from here
    eventually(lambda: pods[1].metric("outrider_shared_received_total") == TOKENS)
    for pod in pods:
        eventually(lambda pod=pod: finds(pod, red))
        before = left(pod)
        for headers in ([blue], [], [(FORGED, "red")]):
            assert not any(finds(pod, *headers) for _ in range(3))
        ask(pod)
        assert not finds(pod)
        eventually(lambda pod=pod: finds(pod, (HEADER.lower(), "red"), (FORGED, "192.0.2.1")))
        assert left(pod) == before


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_header_that_names_no_tenant_is_refused(pods: Pods, endpoint: str) -> None:
    twice = post(pods[0], (HEADER, "red"), (HEADER, "red"), to=endpoint)
    assert refusal(twice) == (400, "invalid_value", "x-outrider-tenant: it came 2 times.")
    for name in ("", "red,blue", "a/b", "a" * 254):
        status, code, message = refusal(post(pods[0], (HEADER, name), to=endpoint))
        assert (status, code) == (400, "invalid_value")
        assert message.startswith(f"x-outrider-tenant: {name[:80]!r} was given, but the name of a tenant has")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("more", [[], [(FORGED, GATEWAY)], [(FORGED, "10.1.2.3"), ("X-Real-IP", GATEWAY)]])
def test_only_a_trusted_gateway_may_name_a_tenant(pods: Pods, endpoint: str, more: Headers) -> None:
    """Whatever else a request says of where it comes from."""
    answer = post(pods[0], (HEADER, "red"), *more, peer=ELSEWHERE, to=endpoint)
    assert refusal(answer) == (
        403,
        "untrusted_gateway",
        "x-outrider-tenant: only a trusted gateway may name the tenant, and this came from "
        f"{ELSEWHERE} (sharedCache.trustedGateways, --trusted-gateways).",
    )
    assert post(pods[0], *more, peer=ELSEWHERE, to=endpoint, max_tokens=1).status_code == 200
