"""What is generated: prompts by name, alone or several at once. No torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from outrider_serving.bench.agent import agent_workload
from outrider_serving.bench.agent_templates import FAMILIES

MOST_STREAMS = 1024

_LIST = "apple pear plum cherry grape mango kiwi lemon lime melon"
_CODE_CHARACTERS, _AGAIN_CHARACTERS = 1800, 200

ALLOWED = (
    "open, repeat or code, agent, agent-cold, agent-again or agent-unlike, several at once as open:8, or "
    f"batch8 for open and repeat in turn (at most {MOST_STREAMS} at once)"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests: one for each prompt.

    Attributes:
        at_once: so many of them at any time, the next one as soon as one has ended; 0 for all.
        stored: prompts that were answered before: what was written then may be proposed now.
    """

    name: str
    prompts: tuple[str, ...]
    at_once: int = 0
    stored: tuple[str, ...] = ()

    @property
    def streams(self) -> int:
        """How many run at once."""
        return min(self.at_once or len(self.prompts), len(self.prompts))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: see `SamplingParams`.
        seed: of the first stream, the next one has the next; None draws anew each time.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def repeats(self) -> bool:
        """The same request gives the same output each time, but for near ties."""
        return self.temperature == 0 or self.seed is not None

    def seed_of(self, stream: int) -> int | None:
        """The seed of a request by its index."""
        return None if self.seed is None else self.seed + stream


@dataclass(frozen=True, slots=True)
class Job:
    """A workload and what is asked of it.

    Attributes:
        tokens: that each request generates, whatever ends of sequence come.
    """

    workload: Workload
    tokens: int
    sampling: Sampling = Sampling()


def parse_workload(text: str) -> Workload:
    """A workload by its name: PROMPT, PROMPT:STREAMS or batchSTREAMS; of `agent` also what was stored.

    Raises:
        ValueError: there is none; the message says what is allowed.
    """
    single = re.fullmatch(r"(open|repeat|code)(?::([1-9]\d{0,3}))?", text, re.ASCII)
    mixed = re.fullmatch(r"batch([1-9]\d{0,3})", text, re.ASCII)
    agent = re.fullmatch(r"agent(-cold|-again|-unlike)?(?::([1-9]\d{0,3}))?", text, re.ASCII)
    if agent is not None:
        return _agent(text, agent[1] or "", int(agent[2] or 1))
    if single is not None:
        names, streams = [single[1]], int(single[2] or 1)
    elif mixed is not None:
        names, streams = ["open", "repeat"], int(mixed[1])
    else:
        raise ValueError(f"{text!r} is not a workload: {ALLOWED}")
    if streams > MOST_STREAMS:
        raise ValueError(f"{text!r} has {streams} streams: at most {MOST_STREAMS}")
    prompts = [prompt(name) for name in names]
    return Workload(text, tuple(islice(cycle(prompts), streams)))


def _agent(name: str, kind: str, streams: int) -> Workload:
    """What agents ask, one after the other.

    * *agent*: later revisions of documents whose earlier ones were answered before;
    * *agent-cold*: the same, and nothing was;
    * *agent-again*: the earlier ones once more, word for word;
    * *agent-unlike*: texts with nothing in common with what was answered before.

    Raises:
        ValueError: more streams than prompts.
    """
    sets = agent_workload()
    # One document of each family; of all of them a run would take minutes.
    one_each = slice(len(FAMILIES), 2 * len(FAMILIES))
    revisions = (sets.retried if kind == "-again" else sets.measured)[one_each]
    prompts = sets.unlike if kind == "-unlike" else tuple(one.text for one in revisions)
    if streams > len(prompts):
        raise ValueError(f"{name!r} has {streams} streams, but there are {len(prompts)} prompts")
    stored = () if kind == "-cold" else tuple(one.text for one in sets.stored)
    return Workload(name, prompts, streams, stored)


def prompt(name: str) -> str:
    """The text of a prompt.

    * *open*: nothing to copy, so hardly a proposal of an n-gram is accepted.
    * *repeat*: a list given twice and begun again; what follows has been there.
    * *code*: 2,000 characters of source, the last 200 of which are its beginning again.
    """
    match name:
        case "open":
            return "The history of the Roman Empire begins with"
        case "repeat":
            return f"Rewrite the list in the same order.\nList: {_LIST}\nList: {_LIST}\nList:"
        case "code":
            # Of the standard library, so that it need not be shipped: it depends on the version of Python.
            source = Path(os.__file__).read_text(encoding="utf-8")[:_CODE_CHARACTERS]
            return f"{source}\n\n# The same code again:\n{source[:_AGAIN_CHARACTERS]}"
        case _:
            raise ValueError(f"{name!r} is not a prompt: open, repeat or code")
