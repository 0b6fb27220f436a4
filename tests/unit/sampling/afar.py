"""Stands for a device: its tensors lie behind a wall, and whatever makes the CPU wait for it is counted.

PyTorch takes these tensors for those of its device "meta", which computes nothing; what is asked of them is
done on the CPU, with numbers that only `Device` gets at. So code runs as it would on a GPU: it cannot read a
number, or compute with tensors of the CPU, but by what waits on a GPU too. Making a tensor there from
numbers of Python, as an index by a list does, waits as well: it is refused, as the numbers would be lost.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
AFAR = torch.device("meta")
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
"""What reads numbers, or has a result whose size depends on them."""


class Afar(Tensor):
    """A tensor of the device."""

    behind: Tensor

    @staticmethod
    def __new__(cls, behind: Tensor) -> Afar:
        wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            behind.shape,
            strides=behind.stride(),
            storage_offset=behind.storage_offset(),
            dtype=behind.dtype,
            device=AFAR,
        )
        wrapper.behind = behind
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the device")

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """Runs what is asked of its tensors, within a `with` block.

    Attributes:
        waits: what the CPU has waited for.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._pinned = list[Tensor]()
        patch.setattr(Tensor, "pin_memory", lambda tensor: self._pin(tensor))

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.append(tensor.clone())
        return self._pinned[-1]

    def put(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU as one of the device: nothing is counted."""
        return Afar(tensor.clone())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = [leaf for leaf in leaves if isinstance(leaf, Afar)]
        others = [leaf for leaf in leaves if not isinstance(leaf, Afar)]
        assert all(other.is_cpu for other in others), f"{func} of what was made there from numbers of the CPU"
        target = kwargs.get("device")
        there = bool(ours) if target is None else torch.device(target).type == AFAR.type
        copies = func in (aten._to_copy.default, aten.copy_.default)
        if copies and ours and (others or not there):
            self.waits.append(f"{func}: read")
        elif copies and others and there:
            pinned = any(other is pinned for other in others for pinned in self._pinned)
            if not (pinned and kwargs.get("non_blocking")):
                self.waits.append(f"{func}: sent, and waited for")
        elif ours and func in WAITS:
            self.waits.append(str(func))
        elif ours and func in (aten.index.Tensor, aten.index_put_.default):
            if any(index is not None and (index.is_cpu or index.dtype is torch.bool) for index in args[1]):
                self.waits.append(f"{func}: by an index on the CPU, or as many as are true")
        else:
            assert not ours or not any(other.dim() for other in others), f"{func} of tensors on two devices"
        if target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        outcome = func(*tree_map(_behind, args), **tree_map(_behind, kwargs))
        return tree_map(_before, outcome) if there else outcome


def _behind(value: Any) -> Any:
    return value.behind if isinstance(value, Afar) else value


def _before(value: Any) -> Any:
    return Afar(value) if isinstance(value, Tensor) else value
