"""Compute resources of a pod, and which of them are accelerators: of these a pod has one at most."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import Field, StringConstraints, model_validator

from outrider_operator.podspec import Quantity, amount, cel
from outrider_serving.settings import Contract

_ACCELERATORS: Final = (
    "gpu",  # in name or domain: nvidia.com/gpu.shared, gpu.intel.com/xe, volcano.sh/vgpu-number
    "/mig[-.]",  # slices: nvidia.com/mig-1g.10gb
    "/[scdqt]px_nps",  # partitions: amd.com/cpx_nps4
    "(^|[-./])[ntx]pu",  # google.com/tpu, npu.intel.com/accel, kunlunxin.com/xpu; not "input" and "output"
    "/neuron",
    "/ascend",
    "/qaic",
    "/v?(dcu|gcu|mlu|cuda)",
    "^(habana|furiosa|rebellions)[.]ai/",
    "^tenstorrent[.]com/",
)
ACCELERATOR: Final = f"(?i){'|'.join(_ACCELERATORS)}"
"""Matches the names of resources that count accelerators, their slices or their shares.

A list of kinds and vendors, since the form of a name tells nothing: a resource of a vendor's domain may as
well be a network card that a pod with one GPU needs (rdma/hca, nvidia.com/hostdev), a device file
(smarter-devices/fuse) or bytes of an enclave (sgx.intel.com/epc). FPGAs are not in it: no model is split
over them.
"""

_NOT_MORE: Final = "at most one accelerator a pod, written as 0 or 1"
_WHY: Final = "a model split over several is not supported"


def accelerators(amounts: Mapping[str, str]) -> dict[str, str]:
    """Those of the amounts that are accelerators, save what is 0."""
    return {
        key: quantity for key, quantity in amounts.items() if re.search(ACCELERATOR, key) and quantity != "0"
    }


_FOUND: Final = f"self.filter(k, string(self[k]) != '0' && k.matches('{ACCELERATOR}'))"
"""The keys of `accelerators`, in CEL."""

_TOLD: Final = (
    f"[{_FOUND}].map(found, found[0] + ': ' + string(self[found[0]])"
    " + (found.size() > 1 ? ', ' + found[1] + ': ' + string(self[found[1]]) : '')"
    " + (found.size() > 2 ? ' and more' : ''))[0]"
)
"""Two of them in words. All would be a join, whose estimated cost the API server does not allow."""

_AMOUNTS = dict[Annotated[str, StringConstraints(max_length=316)], Quantity]
_AMOUNT_RULES = cel(
    (
        "self.all(k, !string(self[k]).startsWith('-'))",
        "an amount must not be negative",
    ),
    (
        f"{_FOUND}.map(k, string(self[k]) == '1' ? 1 : 2).sum() <= 1",
        f"{_NOT_MORE}: {_WHY}",
        f"'{_NOT_MORE}, but here are ' + {_TOLD} + '; {_WHY}'",
    ),
)
REQUEST_WITHIN_LIMIT: Final = (
    "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits)"
    " || quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
    "a request must not exceed its limit",
)
"""A rule of CEL; Resources checks the same."""


class Resources(Contract):
    """Compute resources of the engine's container."""

    limits: _AMOUNTS | None = Field(
        default=None,
        max_length=16,
        description="Most it may use. At most one accelerator (a GPU, a slice or a share of one) over all "
        "names together: a model split over several is not supported.",
        json_schema_extra=_AMOUNT_RULES,
    )
    requests: _AMOUNTS | None = Field(
        default=None,
        max_length=16,
        description="What it is scheduled by; without one, the limit.",
        json_schema_extra=_AMOUNT_RULES,
    )

    @model_validator(mode="after")
    def _one_accelerator(self) -> Self:
        for field, amounts in (("limits", self.limits), ("requests", self.requests)):
            found = accelerators(amounts or {})
            if list(found.values()) not in ([], ["1"]):
                here = ", ".join(f"{key}: {quantity}" for key, quantity in found.items())
                raise ValueError(f"{field}: {_NOT_MORE}, but here are {here}; {_WHY}")
        return self

    @model_validator(mode="after")
    def _request_within_limit(self) -> Self:
        limits = self.limits or {}
        for key, request in (self.requests or {}).items():
            if key in limits and amount(request) > amount(limits[key]):
                raise ValueError(f"{key}: the request {request} exceeds the limit {limits[key]}")
        return self
