"""The interface between the step loop and whatever proposes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider_serving.engine.target.kv import KVShape
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.noise import NoiseKey
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.sampling.randomness import Randomness


@dataclass(frozen=True, slots=True)
class Needs:
    """What a proposer wants of the target.

    Attributes:
        hidden_layers: indices into what transformers calls `hidden_states`: 0 is the embeddings, n the output
            of the n-th layer, the last one after the final norm.
        kv_layers: attention layers of its own, kept in the target's pages: token i of a text lies in the same
            page and place as in the target's layers. What `Advanced` says was run must be there when
            `observe` returns: pages are shared between requests from then on.
        width: a proposal of depth d has at most width * d nodes; 1, the least, for chains.
    """

    hidden_layers: tuple[int, ...] = ()
    kv_layers: tuple[KVShape, ...] = ()
    width: int = 1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a proposer is loaded into.

    Attributes:
        target: the model, to share its embeddings or its output layer; never to be run or changed.
        vocab_size: number of token ids that the target knows.
        device, dtype: of the target's weights and hidden states.
        page_size: tokens in a page of keys and values.
        kv: one pair for each of `needs.kv_layers`: keys [slots, heads, key_size] and values
            [slots, heads, value_size], dtype as above. Slot s is place s % page_size of page s // page_size.
    """

    target: PreTrainedModel
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    page_size: int
    kv: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class Began:
    """A request has begun, or begins anew after it was preempted; what was known of it is void.

    Attributes:
        tokens: its whole text, prompt and output.
        missing: how many leading tokens will have no row in `Advanced` and have nothing in the proposer's own
            layers of keys and values. 0 where everything is or will be there: a proposer with such layers
            is asked for a proposal only then.
        reused: how many leading tokens will have no row in `Advanced`, because their keys and values, also
            those of the proposer's own layers but for the `missing` ones, lie in pages already.
        history: as in `engine.types.Request`.
    """

    request_id: str
    tokens: tuple[int, ...]
    missing: int = 0
    reused: int = 0
    history: str | None = None


@dataclass(frozen=True, slots=True)
class Advanced:
    """What one step did for a request: tokens that the target has run, and tokens that joined the text.

    Attributes:
        start: position in the text of the first token of `ran`; rows come without gaps and in order.
        ran: tokens that were run and belong to the text: a part of the prompt, or the token that was
            committed last and the accepted path of the proposal.
        hidden: for each of `needs.hidden_layers` of any loaded proposer, [len(ran), hidden size].
        pages: the request's pages; token i of the text lies in slot pages[i // page_size] * page_size +
            i % page_size.
        committed: tokens that joined the text in this step, in order: accepted ones, then the target's own,
            which has not been run. Empty within a prompt.
    """

    request_id: str
    start: int
    ran: tuple[int, ...]
    hidden: Mapping[int, Tensor]
    pages: tuple[int, ...]
    committed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request has lost its pages, and waits; `Began` tells when it goes on."""

    request_id: str


Event = Began | Advanced | Preempted


@dataclass(frozen=True, slots=True)
class Row:
    """A request that wants a proposal in this step. Set by the step loop.

    Attributes:
        request_id: the request; its whole text has been observed.
        min_depth: a proposal of less depth will not be verified.
        max_depth: a proposal will be cut to this depth; at least `min_depth`.
        max_nodes: and to so many nodes, the first ones; at least `max_depth`.
        length: tokens of its text; the first proposed token is at this position of the text.
        ran: how many of them, the leading ones, have been run: all but the last one, or fewer where the rest
            of a prompt is run in this step.
        pages: as in `Advanced`, with room for the text and `max_nodes` more tokens.
        law: turns logits of a proposer's own into a distribution over the same tokens as the target's
            (temperature, masks, penalties along the path, ...).
        noise: key of the first proposed token where the request is verified by coupling, None otherwise; a
            sampled proposer that takes the same noise (`coupling.coupled_token`) is accepted far more
            often. The key of depth d is that of `noise.position + d - 1`.
        randomness: for drawn tokens; disjoint from what verification draws from.
    """

    request_id: str
    min_depth: int
    max_depth: int
    max_nodes: int
    length: int
    ran: int
    pages: tuple[int, ...]
    law: TokenLaw
    noise: NoiseKey | None
    randomness: Randomness


class Proposer(Protocol):
    """Proposes continuations for a whole batch at once.

    Made from its settings by the registry: other settings, but for the depths, make another one. Everything
    but `load` is called by the thread of the steps only, `close` also by that of a load that came too late.

    `needs` and `memory_bytes` are read once, before `load`, and hold for as long as it is loaded. Numbers
    that are not of type int, or out of range, are a failure, as if it had raised.

    Any method may raise: steps go on without it, the failure is counted, and no request fails. After a raise
    from `propose`, or a proposal that is not a tree of distinct siblings of known tokens, the rest of the
    batch goes without proposals in that step. After one from another method it is closed, and a new one is
    made after a pause, which is told of the requests that run by `Began`. What is no `Exception`, such as
    SystemExit, ends the engine's process.
    """

    @property
    def needs(self) -> Needs:
        """What it wants of the target."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What `load` will take beside `needs.kv_layers`.

        A proposer that takes nothing is loaded between two steps, another one beside them, in a thread of its
        own.
        """
        ...

    def load(self, surroundings: Surroundings) -> None:
        """Get ready; called once, before everything below. Where it raises, it gives back what it took."""
        ...

    def propose(self, rows: Sequence[Row]) -> Sequence[Proposal]:
        """One proposal for each row, in their order; empty ones are welcome.

        There are rows for requests that commit tokens in this step and have room for proposed ones.
        """
        ...

    def observe(self, events: Sequence[Event]) -> None:
        """Take note of what happened; called for every loaded proposer, whether it is in force or not.

        A request's first event is `Began`. Its text is `Began.tokens` and then what is `committed`.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended; one that was never observed is no error."""
        ...

    def close(self) -> None:
        """Give back what `load` took; the last call, and only after a `load` that did not raise."""
        ...


@dataclass(slots=True)
class TextOnly:
    """Base of proposers that look at text alone: they need nothing of the target and take no memory of it."""

    needs: Needs = field(default=Needs(), init=False)
    memory_bytes: int = field(default=0, init=False)

    def load(self, surroundings: Surroundings) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to give back."""
