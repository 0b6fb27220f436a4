"""`make up`'s own path: the same command, on the run's own node."""

from __future__ import annotations

import json
import re
import subprocess
import time

import pytest

from cluster_fixture import Demo
from outrider_local import hello, release
from outrider_local.ports import is_free

NAME = "gemma-3-270m"
KINDS = ("speculativemodel", "deployment", "service", "configmap", "serviceaccount")


def versions(demo: Demo) -> dict[str, str]:
    """``{kind/name: uid and resourceVersion}`` of the resource and its children."""
    found = {}
    for kind in KINDS:
        for item in demo.cluster.get(kind)["items"]:
            owners = [owner["name"] for owner in item["metadata"].get("ownerReferences", [])]
            if item["metadata"]["name"] == NAME or NAME in owners:
                meta = item["metadata"]
                found[f"{kind}/{meta['name']}"] = f"{meta['uid']} {meta['resourceVersion']}"
    return found


def test_up_prints_what_a_newcomer_wants_to_see(demo: Demo) -> None:
    output = demo.output
    figures = re.search(
        r"(\d+) tokens in (\d+) verification steps: ([\d.]+) tokens per verification step", output
    )
    assert figures, output
    assert float(figures[3]) > 1.5
    assert "Wednesday, Thursday" in output.partition("completion:")[2]
    assert re.search(rf"^\s*(\S+\s+)?{NAME}\s+True\s", output, re.MULTILINE), output
    for expected in (
        demo.url,
        "what to try next",
        "export KUBECONFIG=",
        "kubectl edit",
        "kubectl patch",
        "make down",
    ):
        assert expected in output


def test_the_stock_client_gets_accepted_tokens(demo: Demo) -> None:
    answer = hello.ask(hello.client(demo.url))
    assert answer.tokens == hello.MAX_TOKENS
    assert answer.accepted > 0
    assert answer.accepted <= answer.proposed
    assert answer.tokens_per_step > 1.5


def test_speculation_changes_no_text_in_float32(demo: Demo) -> None:
    dtype = demo.cluster.get("speculativemodel", NAME)["spec"]["model"].get("dtype")
    if dtype != "float32":
        pytest.fail(f"the example serves {dtype}: the comparison is exact in float32 only")
    api = hello.client(demo.url)
    plain, speculative = hello.ask(api, proposer="none"), hello.ask(api, proposer="ngram")
    assert speculative.text == plain.text
    assert (plain.proposed, plain.accepted) == (0, 0)
    assert speculative.steps < plain.steps


def test_a_second_up_is_quick_and_changes_nothing(demo: Demo) -> None:
    before = versions(demo)
    assert {key.partition("/")[0] for key in before} == set(KINDS)
    began = time.monotonic()
    output = demo.cluster.local("up")
    seconds = time.monotonic() - began
    assert "given to the node" not in output, "the code changed while the tests ran"
    assert seconds < 60
    assert "already runs" in output
    assert "what was edited since is kept" in output
    assert "up to date" in output
    assert versions(demo) == before


def test_a_taken_port_is_named_before_anything_is_done(demo: Demo) -> None:
    """A second node that wants the first one's port: the forwarder of the first one holds it."""
    taken = demo.cluster.settings.port
    environment = demo.cluster.environment | {"OUTRIDER_NAME": "outrider-never"}
    done = demo.cluster.attempt("up", environment=environment)
    assert done.returncode == 2
    assert f"port {taken} on 127.0.0.1, meant for the model's API, is taken by" in done.stderr
    command = re.search(r"choose another: make up OUTRIDER_NAME=outrider-never .*", done.stderr)
    assert command, done.stderr
    suggested = [int(port) for port in re.findall(r"OUTRIDER(?:_API)?_PORT=(\d+)", command[0])]
    assert len(set(suggested)) == 2
    assert all(is_free(port) for port in suggested)
    assert not (demo.cluster.settings.state_home / "outrider-never").exists()


def test_up_goes_on_after_a_helm_that_was_killed(demo: Demo) -> None:
    helm = [str(demo.cluster.programs.path("helm")), f"--namespace={release.NAMESPACE}"]
    chart = demo.cluster.settings.checkout / release.CHART
    broken = ["upgrade", release.NAME, str(chart), "--reuse-values", "--wait", "--set=operator.image=never:1"]
    with subprocess.Popen([*helm, *broken], env=demo.cluster.environment) as process:
        while release_status(demo) != "pending-upgrade":
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    assert "was left pending-upgrade: going back to its revision" in demo.cluster.local("up")
    assert release_status(demo) == "deployed"


def release_status(demo: Demo) -> str:
    said = demo.cluster.helm("status", release.NAME, f"--namespace={release.NAMESPACE}", "--output=json")
    return str(json.loads(said)["info"]["status"])


def test_the_patch_that_up_prints_changes_the_proposer_and_back(demo: Demo) -> None:
    """The last test, since it changes the resource: the printed lines, as a person pastes them."""
    export, patch = (
        next(line for line in demo.output.splitlines() if line.strip().startswith(word))
        for word in ("export KUBECONFIG=", f"kubectl patch specm {NAME}")
    )
    assert '"none"' in patch
    assert patch.endswith("# and back: ngram")
    before = demo.cluster.get("speculativemodel", NAME)["spec"]
    try:
        paste(export, patch)
        wait_for_proposer(demo, "none")
    finally:
        paste(export, patch.replace('"none"', '"ngram"'))
    wait_for_proposer(demo, "ngram")
    assert demo.cluster.get("speculativemodel", NAME)["spec"] == before


def paste(*lines: str) -> None:
    """Run lines in a shell."""
    done = subprocess.run(["bash", "-ec", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def wait_for_proposer(demo: Demo, method: str) -> None:
    """Wait until the pods have it in force."""
    waiting = f"--for=jsonpath={{.status.proposer}}={method}"
    demo.cluster.kubectl("wait", waiting, f"speculativemodel/{NAME}", "--timeout=60s")
