"""Where everything lies and which ports are used: decided once, from the environment."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outrider_local.ports import FIRST, LAST
from outrider_local.report import EXIT_USAGE, ProblemError

DEFAULT_NAME = "outrider"
DEFAULT_API_PORT = 16443
DEFAULT_PORT = 8000

KNOBS = {
    "OUTRIDER_NAME": f"name of the node; several may run side by side (default {DEFAULT_NAME})",
    "OUTRIDER_PORT": f"loopback port of the served model (default {DEFAULT_PORT})",
    "OUTRIDER_API_PORT": f"loopback port of the Kubernetes API server (default {DEFAULT_API_PORT})",
    "XDG_CACHE_HOME": "builds and images are kept in its folder outrider/ (default ~/.cache)",
    "XDG_STATE_HOME": "a running node keeps its files in outrider/NAME/ (default ~/.local/state)",
}

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_UNFIT = re.compile(r"[\s,:'\"\\]")
_RESERVED = ("/var", "/run", "/proc", "/sys")


@dataclass(frozen=True)
class Settings:
    """The choices of one run; paths are absolute."""

    checkout: Path
    cache: Path
    state_home: Path
    name: str = DEFAULT_NAME
    port: int = DEFAULT_PORT
    api_port: int = DEFAULT_API_PORT
    #: The variables that were set, to be repeated where a command is suggested.
    given: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def state(self) -> Path:
        """The folder of this node: removed as a whole by `down`."""
        return self.state_home / self.name

    @property
    def kubeconfig(self) -> Path:
        """How kubectl and helm on the host reach the node."""
        return self.state / "kubeconfig"

    @property
    def venv(self) -> Path:
        """The project's own Python environment."""
        return self.checkout / ".venv"

    @property
    def local(self) -> Path:
        """The folder that holds this package, for PYTHONPATH."""
        return self.checkout / "local"

    def command(
        self, targets: str, changes: Mapping[str, int] | None = None, knobs: Iterable[str] = KNOBS
    ) -> str:
        """A make command for this very node: ``changes``, and those of ``knobs`` that were given."""
        given = {knob: self.given[knob] for knob in knobs if knob in self.given}
        words = [f"{knob}={shlex.quote(str(value))}" for knob, value in {**given, **(changes or {})}.items()]
        return " ".join(("make", targets, *words))

    def variables(self) -> dict[str, str]:
        """The environment variables that make another process arrive at the same settings."""
        return {
            "OUTRIDER_NAME": self.name,
            "OUTRIDER_PORT": str(self.port),
            "OUTRIDER_API_PORT": str(self.api_port),
            "XDG_CACHE_HOME": str(self.cache.parent),
            "XDG_STATE_HOME": str(self.state_home.parent),
            "PYTHONPATH": str(self.local),
        }


def from_environment(environment: Mapping[str, str], name: str | None = None) -> Settings:
    """Settings from environment variables; ``name`` (a command line option) wins over OUTRIDER_NAME."""
    home = Path(environment.get("HOME") or Path.home())
    given = {knob: environment[knob] for knob in KNOBS if environment.get(knob)}
    settings = Settings(
        checkout=Path(__file__).resolve().parents[2],
        cache=_folder(environment, "XDG_CACHE_HOME", home / ".cache") / "outrider",
        state_home=_folder(environment, "XDG_STATE_HOME", home / ".local" / "state") / "outrider",
        name=_checked_name(name or environment.get("OUTRIDER_NAME") or DEFAULT_NAME),
        port=_port(environment, "OUTRIDER_PORT", DEFAULT_PORT),
        api_port=_port(environment, "OUTRIDER_API_PORT", DEFAULT_API_PORT),
        given={**given, "OUTRIDER_NAME": name} if name else given,
    )
    if settings.port == settings.api_port:
        raise ProblemError(
            f"OUTRIDER_PORT and OUTRIDER_API_PORT are both {settings.port}",
            "give them different ports",
            EXIT_USAGE,
        )
    check_state_folder(settings.state)
    return settings


def check_state_folder(state: Path) -> None:
    """Refuse a state folder that the node's own mounts would hide from it, or that they cannot name."""
    if _UNFIT.search(str(state)):
        raise ProblemError(
            f"the node's state would lie in {str(state)!r}, and mounts cannot name that",
            "set XDG_STATE_HOME to a folder without spaces, commas, colons, quotes and backslashes",
            EXIT_USAGE,
        )
    for reserved in _RESERVED:
        if state.is_relative_to(reserved):
            raise ProblemError(
                f"the node's state would lie in {state}, but the node has a {reserved} of its own",
                f"set XDG_STATE_HOME to a folder outside {', '.join(_RESERVED)}",
                EXIT_USAGE,
            )


def _folder(environment: Mapping[str, str], variable: str, default: Path) -> Path:
    # Relative values are to be ignored, says the XDG base directory specification.
    value = environment.get(variable, "")
    return Path(os.path.realpath(value if value.startswith("/") else default))


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ProblemError(
            f"OUTRIDER_NAME is {name!r}",
            "use up to 40 lower-case letters, digits and dashes, with a letter or digit at both ends",
            EXIT_USAGE,
        )
    return name


def _port(environment: Mapping[str, str], variable: str, default: int) -> int:
    text = environment.get(variable) or str(default)
    if not text.isdecimal() or not FIRST <= int(text) <= LAST:
        raise ProblemError(f"{variable} is {text!r}", f"give a port from {FIRST} to {LAST}", EXIT_USAGE)
    return int(text)
