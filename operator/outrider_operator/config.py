"""How this operator was told to behave, as a value that the pure parts take as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_operator.podspec import PullPolicy


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """Settings of the operator itself; `__main__` reads them from flags and the environment."""

    serving_image: str
    """Image of pods whose SpeculativeModel names none."""

    image_pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    """Pull policy of pods whose SpeculativeModel names none."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; none means all of the cluster."""

    resync_seconds: float = 30.0
    """How soon a settled resource is looked at again though nothing was heard of it."""

    progress_seconds: float = 2.5
    """The same at the soonest, while its pods or settings are on their way."""

    pod_namespace: str = "default"
    """Where this operator runs: the one namespace from which it may reach the admin ports of pods."""

    network_policies: bool = True
    """Whether serving pods get a NetworkPolicy."""

    monitoring_namespaces: tuple[str, ...] = ()
    """Namespaces whose pods may reach the admin ports of serving pods too, to scrape metrics."""
