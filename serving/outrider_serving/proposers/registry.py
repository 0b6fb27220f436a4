"""Which proposers there are: a new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Callable

from outrider_serving.proposers.base import Proposer
from outrider_serving.proposers.ngram import NgramProposer
from outrider_serving.proposers.suffix import SuffixProposer
from outrider_serving.settings import Method, NgramSettings, SuffixSettings
from outrider_serving.settings import Proposer as ProposerSettings
from outrider_serving.suffix.history import History

_PROPOSERS: dict[Method, Callable[[ProposerSettings, History], Proposer | None]] = {
    Method.NONE: lambda _settings, _history: None,
    Method.NGRAM: lambda settings, _: NgramProposer(settings.ngram or NgramSettings()),
    Method.SUFFIX: lambda settings, history: SuffixProposer(settings.suffix or SuffixSettings(), history),
}


def build_proposer(settings: ProposerSettings, history: History) -> Proposer | None:
    """The proposer of `settings.method`, None where that is to propose nothing.

    Args:
        settings: of an arm.
        history: what the engine's requests have written; one for all proposers.
    """
    return _PROPOSERS[settings.method](settings, history)
