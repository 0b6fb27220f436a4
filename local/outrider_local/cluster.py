"""kubectl and helm, as they are built here, against the node."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from outrider_local.gobuild import programs
from outrider_local.settings import Settings
from outrider_local.shell import output, without_proxies

#: A Kubernetes object as its JSON.
Object = dict[str, Any]


class Cluster:
    """Commands on the node's cluster, from the host."""

    def __init__(self, settings: Settings) -> None:
        built = programs(settings.checkout, settings.cache)
        self.kubeconfig = settings.kubeconfig
        self._kubectl = built.path("kubectl")
        self._helm = built.path("helm")
        helm_home = settings.state / "helm"
        # helm keeps nothing in the user's own folders.
        self._environment = without_proxies(os.environ) | {
            "KUBECONFIG": str(settings.kubeconfig),
            **{f"HELM_{kind}_HOME": str(helm_home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")},
        }

    def kubectl(self, *words: str | Path, stdin: str | None = None) -> str:
        """Run kubectl; its output."""
        return output(self._kubectl, *words, env=self._environment, stdin=stdin)

    def helm(self, *words: str | Path) -> str:
        """Run helm; its output."""
        return output(self._helm, *words, env=self._environment)

    def get(self, kind: str, name: str = "", namespace: str = "default", selector: str = "") -> Object:
        """An object, or a list of them. A missing object is an empty dictionary."""
        words = ["get", kind, *([name] if name else []), f"--namespace={namespace}", "--ignore-not-found"]
        text = self.kubectl(*words, *([f"--selector={selector}"] if selector else []), "--output=json")
        found: Object = json.loads(text) if text.strip() else {}
        return found
