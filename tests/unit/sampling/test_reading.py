"""Rows that look at numbers together: each gets its own, and fails alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider_serving.sampling import reading
from outrider_serving.sampling.reading import Reading, together
from outrider_serving.sampling.transfer import fetched, sent
from unit.sampling.afar import Device


def adds_up(tensors: Sequence[Tensor], rounds: int) -> Reading[float]:
    """Looks at the tensors, doubled each time, and adds up all that it sees."""
    total = 0.0
    for n in range(rounds):
        found = yield [tensor * 2**n for tensor in tensors]
        total += sum(float(tensor.sum()) for tensor in found)
    return total


def breaks(tensor: Tensor, error: Exception) -> Reading[float]:
    """Raises after its first look."""
    yield [tensor]
    raise error


def test_each_sees_its_own_numbers_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    here = torch.arange(4)
    rows = [
        [device.put(here), device.put(torch.full((2, 2), 0.5, dtype=torch.float64))],
        [here],
        [],
        [here.double(), device.put(here[:1])],
    ]
    with device:
        answers = together([adds_up(tensors, rounds) for rounds, tensors in enumerate(rows, 1)])
    assert answers == [8.0, 18.0, 0.0, 90.0]
    assert len(device.waits) == 4


def test_what_lies_on_the_cpu_is_sent_back_at_once() -> None:
    """So one row after the other runs to its end, and its numbers stay in the caches."""
    order = list[str]()

    def looks(name: str) -> Reading[None]:
        for _ in range(2):
            order.append(name)
            yield [torch.ones(1).double()]

    together([looks("one"), looks("other")])
    assert order == ["one", "one", "other", "other"]


def test_what_one_raises_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, error = Device(monkeypatch), ValueError("broken")
    for where in (torch.ones(1).double(), device.put(torch.ones(1).double())):
        with device:
            assert together([adds_up([where], 2), breaks(where, error), adds_up([where], 1)]) == [3, error, 1]


def test_what_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of another kind of number is none that can be packed with others."""
    device = Device(monkeypatch)
    good, bad = device.put(torch.ones(1).double()), device.put(torch.ones(3, dtype=torch.float32))
    with device:
        first, failed, last = together([adds_up([good], 1), adds_up([bad], 1), adds_up([good], 2)])
    assert (first, last) == (1, 3)
    assert isinstance(failed, RuntimeError)


@pytest.mark.parametrize("reads", [True, False])
def test_a_broken_device_is_nobodys_own(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.AcceleratorError("it is gone")

    def gone(tensors: Sequence[Tensor]) -> list[Tensor]:
        raise broken

    device = Device(monkeypatch)
    good = device.put(torch.ones(1).double())
    if reads:
        monkeypatch.setattr(reading, "fetched", gone)
    with device, pytest.raises(torch.AcceleratorError):
        together([adds_up([good], 1), breaks(good, broken)])


def test_numbers_keep_their_bits_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    numbers = [
        torch.tensor([[2**62 + 1, -1]]),
        torch.tensor([0.1, float("nan"), -0.0], dtype=torch.float64),
        torch.ones(0, 3, dtype=torch.float64),
    ]
    with device:
        there = sent([tensor.numpy() for tensor in numbers], device.put(torch.ones(1)).device)
        assert device.waits == []
        back = fetched(there)
        assert len(device.waits) == 1
    for one, other in zip(numbers, back, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert one.numpy().tobytes() == other.numpy().tobytes()
