"""Names of full pages: equal names mean equal text from the beginning, read on behalf of the same party."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from outrider_serving.engine.types import Request

NAME_BYTES = 16
"""Length of a name: that any two of 2 ** 40 differing pages share one has a probability under 2 ** -48."""


class PageNames:
    """Names pages by a hash chain: of the name of the page before, and of the page's tokens.

    The first page of a text has a salt in place of the page before. Requests of one tenant share a salt; a
    private request shares one with the choices of its own call only. All hashes are keyed by a secret of this
    process, so that nobody can find, elsewhere or in advance, a text that has a given name.
    """

    def __init__(self, page_size: int, secret: bytes | None = None) -> None:
        """Take the number of tokens in a page, and a secret of at most 64 bytes; None draws one."""
        self._page_size = page_size
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def salt(self, request: Request) -> bytes:
        """What stands for "the page before the first" in the texts that may share pages with this one."""
        if not request.private:
            return self._hash(b"tenant", _joined(request.tenant))
        if request.group:
            return self._hash(b"group", _joined(request.tenant, request.group))
        return self._hash(b"request", _joined(request.tenant, request.id))

    def extend(self, names: list[bytes], request: Request, tokens: Sequence[int], pages: int) -> None:
        """Append names to those of a text's leading pages until there are `pages`.

        Args:
            names: what was named before; may be longer than `pages`, and then stays as it is.
            request: whose text it is.
            tokens: the text, at least `pages` full pages.
            pages: how many names are wanted.
        """
        parent = names[-1] if names else self.salt(request)
        for start in range(len(names) * self._page_size, pages * self._page_size, self._page_size):
            page = array("q", tokens[start : start + self._page_size])
            parent = self._hash(b"page", parent + page.tobytes())
            names.append(parent)

    def _hash(self, domain: bytes, content: bytes) -> bytes:
        return blake2b(content, digest_size=NAME_BYTES, key=self._secret, person=domain).digest()


def _joined(*parts: str) -> bytes:
    """An encoding that no other sequence of as many strings has."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)
