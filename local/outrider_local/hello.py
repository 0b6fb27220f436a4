"""One streaming completion through the stock OpenAI client: the first thing that a new cluster is asked.

The only module here that needs the project's environment. ``python -m outrider_local.hello http://127.0.0.1:8000/v1``
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import openai

#: Its continuation repeats what it has said, as much text of working systems does: proposals are accepted.
PROMPT = (
    "The days of the week, again and again:\n"
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.\n"
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.\n"
    "Monday, Tuesday,"
)
MAX_TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """A completion and what speculation did for it."""

    text: str
    tokens: int
    steps: int
    accepted: int
    proposed: int

    @property
    def tokens_per_step(self) -> float:
        """Committed tokens per verification step."""
        return self.tokens / self.steps if self.steps else 0.0


def client(url: str, key: str = "none") -> openai.OpenAI:
    """The stock client, without the machine's proxies: the server is on loopback."""
    return openai.OpenAI(base_url=url, api_key=key, http_client=openai.DefaultHttpxClient(trust_env=False))


def ask(api: openai.OpenAI, *, proposer: str | None = None, show: bool = False) -> Answer:
    """Stream a greedy completion of PROMPT; ``proposer`` overrides the resource's choice for this request."""
    model = api.models.list().data[0].id
    stream = api.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"proposer": proposer}} if proposer else None,
    )
    pieces: list[str] = []
    tokens, speculation = 0, {}
    for chunk in stream:
        for choice in chunk.choices:
            pieces.append(choice.text)
            if show:
                print(_indented(choice.text), end="", flush=True)
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
            speculation = _speculation(chunk.usage)
    return Answer(
        "".join(pieces),
        tokens,
        int(speculation.get("verification_steps", 0)),
        int(speculation.get("accepted_tokens", 0)),
        int(speculation.get("proposed_tokens", 0)),
    )


def _speculation(usage: Any) -> dict[str, Any]:
    """Our extension of ``usage``, which the client keeps as it came."""
    return dict((usage.model_extra or {}).get("speculation") or {})


def _indented(text: str) -> str:
    """Text that goes on below a step of `make up`."""
    return text.replace("\n", "\n      ")


def main(url: str) -> None:
    """Ask, and print the answer as it comes, then its figures."""
    print(f"    prompt:\n      {_indented(PROMPT)}\n    completion:\n     ", end="", flush=True)
    answer = ask(client(url), show=True)
    print(
        f"\n\n    {answer.tokens} tokens in {answer.steps} verification steps: "
        f"{answer.tokens_per_step:.2f} tokens per verification step "
        f"({answer.accepted} of {answer.proposed} proposed tokens accepted)",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
