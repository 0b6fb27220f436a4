"""Both kinds of index, under one name each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from outrider_serving.native.library import library
from outrider_serving.suffix.compiled import CompiledIndex, CompiledLookup, GivenBack
from outrider_serving.suffix.twin import TwinIndex, look_up


@dataclass(frozen=True)
class Kind:
    """How to make an index, and how to look things up in some."""

    make: Callable[[int, int], Any]
    look_up: Callable[..., Any]


def compiled() -> Kind:
    kernels = library()
    assert kernels is not None, "there is no compiled library"
    functions, given_back = kernels.suffix, GivenBack(kernels.suffix)
    return Kind(
        lambda first, most: CompiledIndex(functions, given_back, first, most), CompiledLookup(functions)
    )


def twin() -> Kind:
    return Kind(TwinIndex, look_up)


@pytest.fixture(params=["compiled", "twin"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return compiled() if request.param == "compiled" else twin()
