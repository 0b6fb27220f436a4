"""Which proposers there are: a new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable

from outrider_serving.proposers.base import Proposer
from outrider_serving.proposers.ngram import NgramProposer
from outrider_serving.settings import Method, NgramSettings
from outrider_serving.settings import Proposer as ProposerSettings

_PROPOSERS: dict[Method, Callable[[ProposerSettings], Proposer | None]] = {
    Method.NONE: lambda _: None,
    Method.NGRAM: lambda settings: NgramProposer(settings.ngram or NgramSettings()),
}


def build_proposer(settings: ProposerSettings) -> Proposer | None:
    """The proposer of `settings.method`, None where that is to propose nothing."""
    return _PROPOSERS[settings.method](settings)
