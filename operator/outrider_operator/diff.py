"""Whether an object that exists is as wanted, where the API server has filled in what was left open."""

from __future__ import annotations

from decimal import ROUND_UP, Context, Decimal
from typing import Any, Final

from kubernetes.utils.quantity import parse_quantity

_FINEST: Final = Decimal("0.001")
_EXACT: Final = Context(prec=80)
"""An amount is at most 32 characters long, of which the last may stand for 18 digits."""

_AMOUNTS = frozenset({"limits", "requests"})

_WHOLE = frozenset({"namespaceSelector", "nodeSelector", "podSelector", "selector"})
"""Fields that the API server fills nothing into, where an entry more selects something else."""


def covers(live: Any, desired: Any, field: str = "") -> bool:
    """True when every field that is wanted is there with that value.

    Fields of `live` that `desired` does not mention are the API server's or someone else's and do not count;
    but a list must be the wanted one (a container, variable or volume more is a difference), so must a
    selector, and what is wanted empty must be empty or absent.
    """
    if desired in ({}, []):
        return not live
    if field in _WHOLE:
        return bool(live == desired)
    if isinstance(desired, dict):
        if field in _AMOUNTS:
            return isinstance(live, dict) and _amounts(live) == _amounts(desired)
        return isinstance(live, dict) and all(
            covers(live.get(key), value, key) for key, value in desired.items()
        )
    if isinstance(desired, list):
        return (
            isinstance(live, list)
            and len(live) == len(desired)
            and all(covers(one, other) for one, other in zip(live, desired, strict=True))
        )
    return bool(live == desired)


def overlay(live: Any, desired: Any, field: str = "") -> Any:
    """The live object with every wanted field set, lists and selectors replaced whole: no foreign entries."""
    if field not in _WHOLE and desired and isinstance(desired, dict) and isinstance(live, dict):
        return live | {key: overlay(live.get(key), value, key) for key, value in desired.items()}
    return desired


def _amounts(amounts: dict[str, Any]) -> dict[str, Decimal]:
    """As they are stored: the API server rounds what is finer than a thousandth up."""
    return {
        name: Decimal(parse_quantity(amount)).quantize(_FINEST, ROUND_UP, _EXACT)  # type: ignore[no-untyped-call]
        for name, amount in amounts.items()
    }
