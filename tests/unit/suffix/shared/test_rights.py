"""What the docs tell of users and prefixes is what pods need and have."""

from __future__ import annotations

import re
from pathlib import Path

from outrider_serving.suffix.shared.log import ADMIN_COMMANDS, SERVING_COMMANDS

ROOT = Path(__file__).parents[4]


def test_the_docs_give_a_user_the_rights_that_it_needs_and_no_other() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (line,) = re.findall(r"^ +user outrider-NAMESPACE .*$", page, re.MULTILINE)
    assert re.findall(r"\+(\S+)", line) == list(SERVING_COMMANDS)
    (more,) = re.findall(r"for `outrider suffix` `(.*?)`", page)
    assert more == " ".join(f"+{command}" for command in ADMIN_COMMANDS[len(SERVING_COMMANDS) :])


def test_whoever_must_delete_text_is_told_the_prefix() -> None:
    for place in ("docs/suffix.md", "charts/outrider/templates/NOTES.txt"):
        (found,) = re.findall(r"suffix purge +.*|where=.*", (ROOT / place).read_text())[:1]
        assert "outrider:NAMESPACE:NAME:" in found, place
