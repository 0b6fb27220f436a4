"""Counter-based noise for coupled verification: the same bits for a token wherever they are needed.

Each (seed, choice, position) keys a stream of SplitMix64, the splittable generator of Steele, Lea and Flood
("Fast splittable pseudorandom number generators", OOPSLA 2014) with the finaliser "Mix13" of Stafford: word
number n of a stream is mix(start + n * gamma), where both the start and the odd gamma come from the key. The
word of token id n is word n + 1, so any subset of the vocabulary is computed without the rest, and integers
alone decide the bits: they are equal on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider_serving.sampling.transfer import sent

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31
_MIX_GAMMA = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53))
_MIX_GAMMA_LAST = 33
_HIGHEST = 1 - 2.0**-53


class NoiseKey(NamedTuple):
    """What the noise at one output position depends on.

    Attributes:
        seed: the request's seed, any integer; equal modulo 2 ** 64 means equal.
        choice: index of the completion among those of one request.
        position: index of the token in the output.
    """

    seed: int
    choice: int
    position: int


def exponentials(keys: Sequence[NoiseKey], ids: Tensor) -> Tensor:
    """Independent exponential variates of mean 1 for tokens at several positions.

    They are -log(1 - v), where v is the upper 63 bits of the token's word in units of 2 ** -63, to the
    precision of float64 and with half a unit added. An unlikely token is chosen by a small variate only:
    small v keep all their bits, so that the chance of a variate below e is right to within 2 ** -63 however
    small e is. And no variate is 0 or infinite, with which a token of probability 0 could be chosen.

    Args:
        keys: one for each row.
        ids: int64 [n] or [rows, n], the tokens wanted.

    Returns:
        float64 [rows, n], in (2 ** -65, 37), on the device of `ids`.
    """
    (streams,) = sent([np.array([stream(key) for key in keys], dtype=np.int64)], ids.device)
    starts, gammas = streams.unbind(1)
    words = (ids + 1) * gammas[:, None]  # int64 products wrap modulo 2 ** 64
    words += starts[:, None]
    shifted = torch.empty_like(words)
    for shift, factor in _MIX:
        words ^= _shift_right(words, shift, shifted)
        words *= _signed(factor)
    words ^= _shift_right(words, _LAST_SHIFT, shifted)
    return _variates(_shift_right(words, 1, shifted))


def _variates(words: Tensor) -> Tensor:
    """Exponential variates from 63-bit words; they grow with the words."""
    v = words.to(torch.float64).add_(0.5).mul_(2.0**-63).clamp_(max=_HIGHEST)
    return v.neg_().log1p_().neg_()


def _shift_right(words: Tensor, by: int, out: Tensor) -> Tensor:
    """Logical shift of 64-bit words held in int64, whose own shift keeps the sign."""
    torch.bitwise_right_shift(words, by, out=out)
    out &= (1 << (64 - by)) - 1
    return out


def stream(key: NoiseKey) -> tuple[int, int]:
    """Start and gamma of the stream of a key, as int64; each component is mixed in by a step of its own."""
    state = 0
    for component in key:
        state = _mix(((state ^ (component & _WORD)) + _GOLDEN) & _WORD, _MIX, _LAST_SHIFT)
    return _signed(state), _signed(_gamma((state + _GOLDEN) & _WORD))


def _gamma(state: int) -> int:
    """An odd increment with enough changes between neighbouring bits (section 5 of the paper)."""
    gamma = _mix(state, _MIX_GAMMA, _MIX_GAMMA_LAST) | 1
    return gamma if (gamma ^ (gamma >> 1)).bit_count() >= 24 else gamma ^ 0xAAAAAAAAAAAAAAAA


def _mix(word: int, rounds: tuple[tuple[int, int], ...], last: int) -> int:
    """A bijection of 64-bit words in which every input bit reaches every output bit."""
    for shift, factor in rounds:
        word = ((word ^ (word >> shift)) * factor) & _WORD
    return word ^ (word >> last)


def _signed(word: int) -> int:
    """The int64 with the same bits as a 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
