"""Builds the CPU kernels into the package, where there is a C++ compiler."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NATIVE = Path("serving/outrider_serving/native")


class CustomBuildHook(BuildHookInterface):
    """Runs `native/build.py` before a wheel, or an installation for development, is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; without a compiler the package is whole but for the kernels, and says so when it runs."""
        build = _load(Path(self.root) / _NATIVE / "build.py")
        try:
            libraries = build.build()
        except (build.NoCompilerError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"the CPU kernels are not built, so models run slower on CPUs: {error}")
            return
        if libraries and version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"] += [f"{_NATIVE}/*.so"]


def _load(path: Path) -> ModuleType:
    """The module by its path: where packages are built, what the package imports is not installed."""
    spec = importlib.util.spec_from_file_location("outrider_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
