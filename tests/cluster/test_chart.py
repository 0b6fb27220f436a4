"""The life of the chart by the real helm: upgrade from an older one, rollback, uninstall, listed namespaces.

Each test starts without a release and without the CustomResourceDefinition, and leaves the cluster so: the
definition belongs to one release, and the next test module installs its own. SpeculativeModels have no
replicas: all their children, and no pods.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import audit, trialredis
from cluster.operated import PACKAGE, Object, eventually
from cluster_fixture import LocalCluster
from outrider_local import release
from outrider_local.report import ProblemError

CRD = "speculativemodels.outrider.dev"
OLDER = Path(__file__).parent / "charts" / "outrider-0.1.0.tgz"
VALUES = Path(__file__).parents[1] / "unit" / "chart" / "values"
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
#: A takeover of a Lease whose holder could not release it takes its 15 seconds.
TAKEOVER = 60


class Helm:
    """A release in a namespace of its own, which admits only pods of the restricted standard."""

    def __init__(self, cluster: LocalCluster, namespace: str, name: str = "outrider") -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        make_namespace(cluster, namespace)

    @property
    def operator(self) -> str:
        """The name of the Deployment, the Lease and the service account."""
        return f"{self.name}-operator"

    def run(self, verb: str, *words: str | Path) -> str:
        """A helm command on the release; what it said, which is shown by pytest -s."""
        command = (*verb.split(), self.name, *words, f"--namespace={self.namespace}")
        print(f"\n$ helm {' '.join(map(str, command))}")
        said = self.cluster.helm(*command)
        print(said)
        return said

    @property
    def chart(self) -> Path:
        """The chart of the checkout."""
        return self.cluster.settings.checkout / release.CHART

    def upgrade(
        self, *sets: str, chart: Path | None = None, wait: bool = True, flags: tuple[str, ...] = ()
    ) -> str:
        """Install or upgrade to a chart (that of the checkout), on local images; what helm said."""
        values = [f"{key}={value}" for key, value in release.chart_values(self.cluster.images).items()]
        return self.run(
            *("upgrade", chart or self.chart, "--install", *flags),
            *(f"--set-string={value}" for value in values),
            *(f"--set={value}" for value in sets),
            *(("--wait", "--timeout=120s") if wait else ()),
        )

    def uninstall(self) -> str:
        return self.run("uninstall", "--wait", "--timeout=120s")

    def notes(self) -> str:
        return self.run("get notes")

    def history(self) -> list[tuple[str, str]]:
        """(chart, status) of each revision, the oldest first."""
        return [(each["chart"], each["status"]) for each in json.loads(self.run("history", "--output=json"))]

    def get(self, kind: str, name: str = "", selector: str = "") -> Object:
        return self.cluster.get(kind, name, self.namespace, selector)

    def pods(self) -> list[Object]:
        return list(self.get("pod", selector=f"app.kubernetes.io/instance={self.name}").get("items", []))

    def argument(self, flag: str) -> str:
        """A flag of the operator that is asked for."""
        (container,) = self.get("deployment", self.operator)["spec"]["template"]["spec"]["containers"]
        (value,) = (word.partition("=")[2] for word in container["args"] if word.startswith(f"--{flag}="))
        return str(value)

    def leader(self) -> str | None:
        """The pod that holds the Lease, if it is there."""
        holder = self.get("lease", self.operator).get("spec", {}).get("holderIdentity")
        return holder if holder in [pod["metadata"]["name"] for pod in self.pods()] else None

    def assert_it_lacked_no_right(self) -> None:
        """By the audit log; before its rights are taken away."""
        asked = audit.of_operator(audit.records(self.cluster.settings), self.namespace)
        assert asked
        assert [(record.verb, record.uri) for record in asked if record.forbidden] == []


class Model:
    """A SpeculativeModel without replicas."""

    def __init__(self, cluster: LocalCluster, namespace: str, name: str = "kept", **spec: Any) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name
        self.apply(**spec)

    def apply(self, **spec: Any) -> None:
        resource = {
            "apiVersion": "outrider.dev/v1alpha1",
            "kind": "SpeculativeModel",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {"model": PACKAGE, "replicas": 0, **spec},
        }
        self.cluster.kubectl("apply", "--validate=strict", "-f", "-", stdin=json.dumps(resource))

    def get(self) -> Object:
        return self.cluster.get("specm", self.name, self.namespace)

    @property
    def uid(self) -> str:
        return str(self.get()["metadata"]["uid"])

    def read_children(self) -> dict[str, Object]:
        """The children by kind and name."""
        kinds = "deployment,service,configmap,serviceaccount,networkpolicy,poddisruptionbudget"
        found = self.cluster.get(kinds, "", self.namespace, f"outrider.dev/model={self.name}")
        return {f"{each['kind']}/{each['metadata']['name']}": each for each in found.get("items", [])}

    def children(self) -> dict[str, str]:
        """UIDs of the children by kind and name."""
        return {child: each["metadata"]["uid"] for child, each in self.read_children().items()}

    def await_ready_reason(self, reason: str) -> Object:
        """Wait until Ready has that reason; the condition."""

        def reached() -> Object | None:
            conditions = self.get().get("status", {}).get("conditions", [])
            return next((c for c in conditions if (c["type"], c["reason"]) == ("Ready", reason)), None)

        return eventually(reached, TAKEOVER, lambda: json.dumps(self.get(), indent=1))

    def await_operated(self, seconds: float = TAKEOVER) -> None:
        """Wait until an operator has looked at this very generation and made the children."""

        def operated() -> bool:
            found = self.get()
            status = found.get("status", {})
            reasons = {each["type"]: each["reason"] for each in status.get("conditions", [])}
            return (
                status.get("observedGeneration") == found["metadata"]["generation"]
                and reasons.get("Ready") == "ScaledToZero"
            )

        eventually(operated, seconds, lambda: json.dumps(self.get(), indent=1))
        assert {key.partition("/")[0] for key in self.children()} >= {"ConfigMap", "Deployment", "Service"}

    def assert_a_change_is_seen(self, port: int) -> None:
        """Change the Service's port and wait for an operator to do it."""
        self.apply(api={"port": port})

        def changed() -> bool:
            service = self.cluster.get("service", self.name, self.namespace)
            return bool(service["spec"]["ports"][0]["port"] == port)

        eventually(changed, TAKEOVER, lambda: json.dumps(self.get(), indent=1))

    def assert_foreign_owners_go(self) -> None:
        """Give every child one owner more, and wait until it has gone: only an update takes it out."""
        theirs = self.cluster.get("configmap", "kube-root-ca.crt", self.namespace)["metadata"]
        owner = {"apiVersion": "v1", "kind": "ConfigMap", **{key: theirs[key] for key in ("name", "uid")}}
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        before = self.children()
        for child in before:
            self.cluster.kubectl("patch", child, f"--patch={patch}", f"--namespace={self.namespace}")

        def owners() -> set[str]:
            found = self.read_children().values()
            return {each["uid"] for child in found for each in child["metadata"]["ownerReferences"]}

        eventually(lambda: owners() == {self.uid}, TAKEOVER, lambda: str(self.read_children()))
        assert self.children() == before


def make_namespace(cluster: LocalCluster, name: str) -> str:
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    return name


def delete_namespaces(cluster: LocalCluster, *names: str) -> None:
    cluster.kubectl("delete", "namespace", *names, "--timeout=60s")


def properties(crd: Object) -> Object:
    """Properties of spec."""
    (version,) = crd["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def withdraw(cluster: LocalCluster) -> None:
    """Uninstall every release of the chart, and delete the definition with what is left of its kind."""
    for each in json.loads(cluster.helm("list", "--all-namespaces", "--all", "--output=json")):
        namespace = f"--namespace={each['namespace']}"
        if each["namespace"] == release.NAMESPACE:  # its operator ends with its rights: test_rights.py looks
            cluster.kubectl("scale", f"deployment/{release.NAME}-operator", "--replicas=0", namespace)
            selector = "--selector=app.kubernetes.io/name=outrider-operator"
            cluster.kubectl("wait", "--for=delete", "pod", selector, namespace, "--timeout=60s")
        cluster.helm("uninstall", each["name"], namespace, "--wait", "--timeout=120s")
    cluster.kubectl("delete", "crd", CRD, "--ignore-not-found", "--timeout=60s")


@pytest.fixture
def bare(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """A cluster with neither a release of the chart nor the definition."""
    if cluster.get("crd", CRD):
        left = json.loads(cluster.kubectl("get", "specm", "--all-namespaces", "--output=json"))["items"]
        assert [each["metadata"]["name"] for each in left] == []
    withdraw(cluster)
    yield cluster
    withdraw(cluster)
    namespaces = [each["metadata"]["name"] for each in cluster.get("namespace")["items"]]
    ours = [name for name in namespaces if name.startswith("chart-")]
    if ours:
        delete_namespaces(cluster, *ours)


class TestUpgrade:
    def test_from_the_older_chart_with_other_values_and_back(self, bare: LocalCluster) -> None:
        helm = Helm(bare, "chart-upgrade")
        # Of the older operator there is no image any more: what counts is its definition, rights and objects.
        helm.upgrade("operator.image=none/older:1", "operator.imagePullPolicy=Never", chart=OLDER, wait=False)
        model = Model(bare, "chart-upgrade")
        with pytest.raises(ProblemError, match=r'unknown field "spec\.replacement"'):
            model.apply(replacement="inPlace")
        uid, definition = model.uid, bare.get("crd", CRD)["metadata"]["uid"]
        variables = [{"name": f"V{number}", "value": "x" * 4096} for number in range(17)]
        stored = Model(bare, "chart-upgrade", "stored", engine={"env": variables})
        # The older chart's values lack those that are new since.
        with pytest.raises(ProblemError, match=r"missing properties .*'monitoring'"):
            helm.run("upgrade", helm.chart, "--reuse-values")

        helm.upgrade(flags=("--reset-then-reuse-values",))
        assert helm.history() == [("outrider-0.1.0", "superseded"), ("outrider-0.2.0", "deployed")]
        crd = bare.get("crd", CRD)
        assert crd["metadata"]["uid"] == definition
        assert "replacement" in properties(crd)
        assert "loadSeconds" in properties(crd)["engine"]["properties"]
        model.await_operated()
        model.apply(replacement="inPlace")
        assert model.uid == uid
        found = stored.await_ready_reason("InvalidSpec")  # what an older definition took, the newer would not
        assert found["message"].startswith(
            "spec.engine: the values of engine.env must not be longer than 65536"
        )
        assert stored.children() == {}
        stored.apply(engine={"env": variables[:1]})
        stored.await_operated()
        notes = helm.notes()
        assert "The operator outrider-operator runs in namespace chart-upgrade and operates" in notes
        assert "SpeculativeModels of the whole cluster." in notes
        assert "http://outrider-operator-metrics.chart-upgrade:8080/metrics" in notes
        assert "only pods of these namespaces reach it: monitoring." in notes
        assert "leaves the CustomResourceDefinition, all SpeculativeModels and their pods" in notes
        children = model.children()
        service = (
            f"/api/v1/namespaces/{helm.namespace}/services/{helm.operator}-metrics:metrics/proxy/metrics"
        )
        assert "# TYPE" in bare.kubectl("get", "--raw", service)

        helm.upgrade("operator.resyncSeconds=7", "operator.replicas=2", "serving.networkPolicy.enabled=false")
        assert helm.argument("resync-seconds") == "7"
        assert len(helm.pods()) == 2
        eventually(helm.leader, TAKEOVER)
        model.assert_a_change_is_seen(8001)
        policy = f"NetworkPolicy/{model.name}"
        del children[policy]
        eventually(lambda: model.children() == children, 30)

        helm.run("rollback", "2", "--wait", "--timeout=120s")
        assert helm.history()[-1] == ("outrider-0.2.0", "deployed")
        assert helm.argument("resync-seconds") == "30"
        eventually(lambda: len(helm.pods()) == 1, 30)
        model.assert_a_change_is_seen(8002)
        assert model.uid == uid
        eventually(lambda: policy in model.children(), 30)
        assert model.children() == children | {policy: model.children()[policy]}  # no other was made anew
        helm.assert_it_lacked_no_right()


class TestRefused:
    def test_nothing_of_what_it_renders(self, bare: LocalCluster) -> None:
        """The API server takes every object of the golden files' values, field by field."""
        for name in ("chart-dry", "team-a", "team-b", "team-c"):
            make_namespace(bare, name)
        try:
            for values in sorted(VALUES.glob("*.yaml")):
                text = bare.helm(
                    *(
                        "template",
                        "outrider",
                        bare.settings.checkout / release.CHART,
                        "--namespace=chart-dry",
                    ),
                    *(f"--values={values}", "--set=metrics.serviceMonitor.enabled=false"),
                )
                created = bare.kubectl(
                    "create", "--dry-run=server", "--validate=strict", "-f", "-", "-oname", stdin=text
                )
                assert f"deployment.apps/{release.NAME}-operator" in created.split()
        finally:
            delete_namespaces(bare, "team-a", "team-b", "team-c")

    def test_a_service_monitor_that_the_cluster_does_not_know(self, bare: LocalCluster) -> None:
        helm = Helm(bare, "chart-monitored")
        with pytest.raises(ProblemError, match='no matches for kind "ServiceMonitor"'):
            helm.upgrade("metrics.serviceMonitor.enabled=true", wait=False)
        assert helm.pods() == []


class TestUninstall:
    def test_models_and_what_serves_them_stay(self, bare: LocalCluster) -> None:
        helm, models = Helm(bare, "chart-uninstall"), make_namespace(bare, "chart-models")
        trial = ("redis.enabled=true", f"redis.image={trialredis.redis_image(bare)}")
        helm.upgrade(*trial)
        model, other = Model(bare, models), Model(bare, models, "other")
        password = trialredis.take_password(bare, helm.notes(), models)
        trialredis.assert_it_serves(bare, helm.namespace, password)
        helm.upgrade(*trial)
        assert trialredis.password(bare, helm.namespace) == password
        for each in (model, other):
            each.await_operated()
        uid, children = model.uid, model.children()
        helm.assert_it_lacked_no_right()

        said = helm.uninstall()
        assert f"[CustomResourceDefinition] {CRD}" in said
        assert helm.get("deployment,service,networkpolicy,role,rolebinding").get("items", []) == []
        assert bare.get("clusterrole", f"{helm.namespace}-{helm.operator}") == {}
        assert (model.uid, model.children()) == (uid, children)
        bare.kubectl("delete", "specm", other.name, f"--namespace={models}", "--timeout=10s")
        eventually(lambda: not other.children(), 30)

        helm.upgrade()  # the same release once more takes all over
        model.assert_a_change_is_seen(8001)
        assert (model.uid, model.children()) == (uid, children)
        helm.uninstall()
        delete_namespaces(bare, models)  # with a SpeculativeModel in it

    def test_all_goes_when_asked_for(self, bare: LocalCluster) -> None:
        helm, models = Helm(bare, "chart-uninstall"), make_namespace(bare, "chart-models")
        helm.upgrade()
        model, other = Model(bare, models), Model(bare, models, "other")
        for each in (model, other):
            each.await_operated()
        told = [
            line.split() for line in helm.notes().partition("To remove them too:")[2].splitlines() if line
        ]
        for tool, *words in told:
            (bare.kubectl if tool == "kubectl" else bare.helm)(*words)
        assert bare.get("crd", CRD) == {}
        assert helm.get("deployment").get("items", []) == []
        eventually(lambda: not model.children() and not other.children(), 10)


class TestListedNamespaces:
    def test_two_releases_share_a_cluster(self, bare: LocalCluster) -> None:
        first, second = (
            Helm(bare, "chart-listed"),
            Helm(bare, "chart-listed", "outrider-b"),
        )
        here, there = make_namespace(bare, "chart-team-a"), make_namespace(bare, "chart-team-b")
        first.upgrade(f"watchNamespaces={{{here}}}", "operator.resyncSeconds=2")
        roles = json.loads(bare.kubectl("get", "role,clusterrole", "--all-namespaces", "-ojson"))["items"]
        assert sorted(
            (each["metadata"]["namespace"], each["metadata"]["name"])
            for each in roles
            if first.operator in each["metadata"]["name"]
        ) == [("chart-listed", "outrider-operator-lease"), (here, "outrider-operator")]

        mine, theirs = Model(bare, here), Model(bare, there)
        mine.await_operated()
        mine.assert_foreign_owners_go()
        time.sleep(5)  # two of its intervals
        assert "status" not in theirs.get()
        assert theirs.children() == {}
        asked = audit.of_operator(audit.records(bare.settings), "chart-listed")
        assert {record.namespace for record in asked if record.resource} == {here, "chart-listed"}

        with pytest.raises(ProblemError, match="invalid ownership metadata"):
            second.upgrade(f"watchNamespaces={{{there}}}")
        second.upgrade(f"watchNamespaces={{{there}}}", "crds.install=false")
        theirs.await_operated()
        assert first.leader() != second.leader()
        mine.assert_a_change_is_seen(8001)
        for each in (first, second):
            each.assert_it_lacked_no_right()
