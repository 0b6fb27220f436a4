"""Numbers between the CPU and a device: many in one copy, and waited for only where they are read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64] | NDArray[np.float64]


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the CPU; those that lie elsewhere by one copy for each device, which is waited for.

    Args:
        tensors: int64 or float64, of any shapes, on any devices.
    """
    found = list(tensors)
    for device in {tensor.device for tensor in tensors} - {torch.device("cpu")}:
        there = [n for n, tensor in enumerate(tensors) if tensor.device == device]
        packed = _packed([tensors[n] for n in there]).cpu()
        for n, tensor in zip(there, _unpacked(packed, [tensors[n] for n in there]), strict=True):
            found[n] = tensor
    return found


def sent(arrays: Sequence[Numbers], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on a device, by one copy that nothing waits for; on the CPU they share memory."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu" or not tensors:
        return tensors
    return _unpacked(put(_packed(tensors), device), tensors)


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; what is sent there from the CPU is not waited for."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu":
        tensor = tensor.pin_memory()  # without it the copy would wait for all that the device has to do
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """The bits of tensors of 8-byte numbers, one after the other."""
    return torch.cat([tensor.reshape(-1).view(torch.int64) for tensor in tensors])


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors whose bits were packed; `like` has their types and shapes."""
    parts = torch.split(packed, [tensor.numel() for tensor in like])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
