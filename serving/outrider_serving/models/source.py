"""What a user calls a model: a Python package, a directory, or a repository of the hub.

Nothing here imports anything heavy, so a mistake in the name is answered at once.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from outrider_serving.models.errors import ModelError
from outrider_serving.models.selection import directory_files

_PACKAGE = "package:"
_HUB = "hub:"
_PACKAGE_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

ALLOWED = (
    "package:NAME (an installed Python package with a GGUF), a directory, or ORGANISATION/NAME on the hub "
    "(hub:ORGANISATION/NAME where a directory has that name too)"
)


@dataclass(frozen=True, slots=True)
class PackageSource:
    """An importable Python package whose `assemble(path)` writes a GGUF file."""

    name: str

    def __str__(self) -> str:
        return _PACKAGE + self.name


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A directory with config, tokenizer and weights."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository of the model hub."""

    repository: str

    def __str__(self) -> str:
        return self.repository


Source = PackageSource | DirectorySource | HubSource


def parse_source(text: str) -> Source:
    """Tell which kind of model is meant; an existing directory goes before a hub id of the same spelling.

    Raises:
        ModelError: it is none of the kinds, or a path that is not a directory.
    """
    if text.startswith(_PACKAGE):
        name = text.removeprefix(_PACKAGE)
        if not _PACKAGE_NAME.fullmatch(name):
            raise ModelError(f"model {text!r}: {name!r} is not a Python package's name; allowed: {ALLOWED}")
        return PackageSource(name)
    if text.startswith(_HUB):
        return _hub(text.removeprefix(_HUB), text)
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ModelError(f"model {text!r}: {error}") from error
    if text and path.is_dir():
        return DirectorySource(path)
    if text.startswith(("/", ".", "~")) or path.exists():
        raise ModelError(f"model {text!r}: there is no such directory; allowed: {ALLOWED}")
    return _hub(text, text)


def _hub(repository: str, text: str) -> HubSource:
    if not _HUB_ID.fullmatch(repository):
        raise ModelError(f"model {text!r} is not understood; allowed: {ALLOWED}")
    return HubSource(repository)


def check_source(source: Source) -> None:
    """Refuse at once what is plainly not there; nothing is imported and no file is opened.

    A package is looked for by the first part of its name, a directory by its files' names; a repository of
    the hub is not asked for.

    Raises:
        ModelError: there is no such package or directory, or a model's files are not in it.
    """
    match source:
        case PackageSource(name):
            top = name.partition(".")[0]
            try:
                found = importlib.util.find_spec(top) is not None
            except ValueError:  # it is in sys.modules without saying where it is from
                found = False
            if not found:
                raise ModelError(f"model {source}: there is no Python package {top!r}: is it installed?")
        case DirectorySource(path):
            directory_files(path, source)
        case HubSource():
            pass
