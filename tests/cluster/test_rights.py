"""The operator's rights, judged last, by the API server's audit log of every test in this folder.

It lacked none, and the chart grants none that it does not use.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml

from cluster import audit
from cluster_fixture import LocalCluster
from outrider_local import release
from outrider_local.report import ProblemError

#: Namespaces whose operator is uninstalled while it runs. Then it may ask once more without its rights, so
#: that test_chart.py judges each of them just before.
UNINSTALLED = "chart-"


@pytest.fixture(scope="module")
def asked(cluster: LocalCluster) -> list[audit.Record]:
    """What operators asked for during the run."""
    found = audit.of_operator(audit.records(cluster.settings))
    if not found:
        pytest.skip("no operator ran")
    return found


def granted(cluster: LocalCluster) -> list[audit.Rule]:
    """What the chart's roles grant, each once, in their order."""
    chart = cluster.settings.checkout / release.CHART
    text = cluster.helm("template", release.NAME, chart, f"--namespace={release.NAMESPACE}")
    rules = [
        rule
        for document in yaml.safe_load_all(text)
        if document and document["kind"] in ("Role", "ClusterRole")
        for rule in document["rules"]
    ]
    return list(
        dict.fromkeys(
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        )
    )


def table(rules: list[audit.Rule], used: Counter[audit.Rule]) -> str:
    """As Markdown: what is granted, and how often it was used."""
    lines = ["| group | resource | verb | times used |", "| --- | --- | --- | ---: |"]
    lines += [
        f"| {group or 'core'} | {what} | {verb} | {used[group, what, verb]} |" for group, what, verb in rules
    ]
    return "\n".join(lines)


def test_the_log_shows_a_right_that_lacks(cluster: LocalCluster) -> None:
    """The measure itself: a read that is refused, and an apply that may patch, but not create."""
    namespace, account = "rights-control", {"name": "control", "namespace": "rights-control"}
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["patch"]}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "control"}
    rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": account}
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
        {**rbac, "kind": "Role", "rules": rules},
        {**rbac, "kind": "RoleBinding", "roleRef": role, "subjects": [{"kind": "ServiceAccount", **account}]},
    ]
    cluster.kubectl(
        "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    )
    token = cluster.kubectl("create", "token", "control", f"--namespace={namespace}").strip()
    server = f"https://127.0.0.1:{cluster.settings.api_port}"
    as_control = [
        "--kubeconfig=/dev/null",
        "--insecure-skip-tls-verify",
        f"--server={server}",
        f"--token={token}",
    ]
    wanted = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": account}
    with pytest.raises(ProblemError, match="cannot list resource"):
        cluster.kubectl("get", "secrets", f"--namespace={namespace}", *as_control)
    with pytest.raises(ProblemError, match="cannot create resource"):
        cluster.kubectl(
            *("apply", "--server-side", "--validate=false", "-f", "-"), *as_control, stdin=json.dumps(wanted)
        )
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")

    found = [r for r in audit.records(cluster.settings) if r.account == (namespace, "control")]
    refused = [(r.verb, r.resource, r.decision) for r in found if r.forbidden]
    assert refused == [("list", "secrets", "forbid"), ("patch", "configmaps", "allow")]


def test_no_request_lacked_a_right(asked: list[audit.Record]) -> None:
    lasting = [record for record in asked if not record.account[0].startswith(UNINSTALLED)]
    if not lasting:
        pytest.skip("no operator ran but those that are judged elsewhere")
    refused = [record for record in lasting if record.forbidden]
    assert [(record.verb, record.uri, record.user) for record in refused] == []
    print(f"\n{len(lasting)} requests, none of them for want of a right refused")


def test_every_right_was_used(
    cluster: LocalCluster, asked: list[audit.Record], partial_run: str | None
) -> None:
    rules = granted(cluster)
    used = Counter(rule for record in asked if not record.forbidden for rule in record.rules)
    print(f"\n{table(rules, used)}")
    assert set(used) <= set(rules)  # else another role grants more
    if partial_run:
        pytest.skip(f"the run is {partial_run}: some rights may be used by what is left out")
    assert [rule for rule in rules if not used[rule]] == []
