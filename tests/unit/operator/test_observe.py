"""What pods answer on their admin port, and that silence is a fact and not an error."""

from __future__ import annotations

import httpx

from outrider_operator.observation import PodReport
from outrider_operator.observe import pod_reports
from unit.operator.builders import pod, report


async def ask(handler: httpx.MockTransport, *pods: dict[str, object]) -> dict[str, PodReport]:
    async with httpx.AsyncClient(transport=handler) as admin:
        return await pod_reports(admin, pods)


async def test_each_ready_pod_is_asked_at_its_own_address() -> None:
    state = report(7).state
    assert state is not None
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, json=state.model_dump(mode="json", by_alias=True))

    found = await ask(
        httpx.MockTransport(answer),
        pod("a", podIP="10.0.0.1"),
        pod("b", podIP="fd00::1"),
        pod("c", ready=False),
        pod("d", podIP=None),
    )
    assert asked == ["http://10.0.0.1:9464/admin/state", "http://[fd00::1]:9464/admin/state"]
    assert found == {"a": PodReport(state=state), "b": PodReport(state=state)}


async def test_silence_and_nonsense_are_told() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        match request.url.host:
            case "10.0.0.1":
                raise httpx.ConnectTimeout("no answer")
            case "10.0.0.2":
                return httpx.Response(503)
            case "10.0.0.3":
                return httpx.Response(200, text="hello")
            case _:
                return httpx.Response(200, json={"ready": True})

    pods = [pod(f"p{number}", podIP=f"10.0.0.{number}") for number in range(1, 5)]
    found = await ask(httpx.MockTransport(answer), *pods)
    assert {name: report.error for name, report in found.items()} == {
        "p1": "its admin port does not answer: ConnectTimeout",
        "p2": "its admin port does not answer: HTTPStatusError",
        "p3": "its admin port answers what this operator does not understand",
        "p4": "its admin port answers what this operator does not understand",
    }
    assert all(report.state is None for report in found.values())
