"""Prompts as agents send them: made from templates, with a seed. No torch.

An agent sends nearly the same prompt many times: a tool is called with other arguments, a file comes again
with an edit, an answer is asked for once more, a template has other facts. A *document* is a template with
names, numbers and facts filled in; each *revision* edits the one before it. The earlier revisions are stored:
what the model writes after them is what a cache has seen. The later ones are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from string import Template
from typing import Final

from outrider_serving.bench.agent_templates import FUNCTIONS, KINDS, POOLS, UNLIKE, VERBS

SEED: Final = 2

_ADDED: Final = "added"
_MOST_ADDED: Final = 2


@dataclass(frozen=True, slots=True)
class AgentPrompt:
    """A revision of a document.

    Attributes:
        kind: *call* of a tool, *edit* of a file, *retry* with another error, or *facts* in a template.
        family: name of its template.
        document: counted from 0 within the family.
        revision: counted from 0 within the document.
    """

    text: str
    kind: str
    family: str
    document: int
    revision: int


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """Sets of prompts.

    Attributes:
        stored: what the model writes after these is what a cache has seen.
        measured: later revisions of the same documents; no text of `stored` is among them.
        retried: some of `stored`, verbatim: a row of their own.
        unlike: neither they nor what follows them has anything in common with the others.
    """

    stored: tuple[AgentPrompt, ...]
    measured: tuple[AgentPrompt, ...]
    retried: tuple[AgentPrompt, ...]
    unlike: tuple[str, ...]


def agent_workload(
    seed: int = SEED, *, documents: int = 3, stored: int = 3, measured: int = 1
) -> AgentWorkload:
    """The sets; the same for the same arguments.

    In `measured` and `retried`, which have the same size, families take turns: the first len(FAMILIES)
    prompts have each once, and so on.

    Args:
        seed: of all that is drawn.
        documents: of each family.
        stored: revisions of each document.
        measured: later revisions of each document; at most `stored`.

    Raises:
        ValueError: a number is under 1, or more are measured than stored.
    """
    if documents < 1 or not 1 <= measured <= stored:
        raise ValueError(
            f"{documents} documents with {stored} stored and {measured} measured revisions: at least 1 of "
            "each, and no more measured than stored"
        )
    random = Random(seed)
    early: list[AgentPrompt] = []
    late: list[AgentPrompt] = []
    again: list[AgentPrompt] = []
    seen: set[str] = set()
    for document in range(documents):
        made = [
            _revisions(kind, family, document, Random(f"{seed} {family} {document}"), stored + measured, seen)
            for kind, texts in KINDS.items()
            for family in texts
        ]
        early += [prompt for revisions in made for prompt in revisions[:stored]]
        for number in range(measured):
            random.shuffle(made)
            late += [revisions[stored + number] for revisions in made]
            again += [revisions[number] for revisions in made]
    random.shuffle(early)
    return AgentWorkload(tuple(early), tuple(late), tuple(again), UNLIKE)


def _revisions(
    kind: str, family: str, number: int, random: Random, count: int, seen: set[str]
) -> list[AgentPrompt]:
    """So many revisions of a document with texts that are not among those seen, which they join."""
    document = _Document(KINDS[kind][family], FUNCTIONS.get(family, ""), random)
    found: list[AgentPrompt] = []
    while len(found) < count:
        if (text := document.text()) not in seen:
            seen.add(text)
            found.append(AgentPrompt(text, kind, family, number, len(found)))
        document.edit()
    return found


@dataclass(slots=True)
class _Document:
    """A template, filled in.

    Attributes:
        template: with `$added` where functions may be added.
        function: template of such a function; each has a `$verb` of its own.
        values: what each slot says now.
        verbs: of the functions that were added.
    """

    template: str
    function: str
    random: Random
    values: dict[str, str] = field(default_factory=dict)
    verbs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for slot in self._slots():
            if slot != _ADDED:
                self._draw(slot)

    def text(self) -> str:
        """What it says now."""
        added = "".join(_filled(self.function, self.values | {"verb": verb}) for verb in self.verbs)
        return _filled(self.template, self.values | {_ADDED: added})

    def edit(self) -> None:
        """Change two things or three: rename a symbol, add a function, take another number or fact."""
        for slot in self.random.sample(self._slots(), self.random.randint(2, 3)):
            if slot == _ADDED:
                self._add()
            else:
                self._draw(slot)

    def _slots(self) -> list[str]:
        """What an edit may change, in a fixed order."""
        names = {name.lower() for name in Template(self.template).get_identifiers()}
        return sorted(names)

    def _draw(self, slot: str) -> None:
        """Say something else there; no two slots say the same."""
        used = self.values.values()
        self.values[slot] = self.random.choice([one for one in map(str, POOLS[slot]) if one not in used])

    def _add(self) -> None:
        """Add a function; where there are enough, take them all out."""
        if len(self.verbs) == _MOST_ADDED:
            self.verbs.clear()
        else:
            self.verbs.append(self.random.choice([one for one in VERBS.split() if one not in self.verbs]))


def _filled(template: str, values: dict[str, str]) -> str:
    """The template with its values; `$Name` is `$name` with a capital."""
    capitals = {name.capitalize(): value[:1].upper() + value[1:] for name, value in values.items()}
    return Template(template).substitute(values | capitals)
