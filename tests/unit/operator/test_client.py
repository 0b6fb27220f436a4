"""How documents and names are put on the wire."""

from __future__ import annotations

import pytest
import yaml

from outrider_operator.client import Client, as_yaml

DOCUMENT = {
    "emoji": "\U0001f99c says \\U0001f99c",
    "umlaut": "für \u0416",
    "control": "a\tb\n\x7f\x85\u2028\ufeff\uffff",
    "quotes": "\"\\u0041'",
}


def test_any_text_survives_a_yaml_decoder() -> None:
    body = as_yaml(DOCUMENT)
    assert yaml.safe_load(body) == DOCUMENT
    assert "\U0001f99c" in body.decode()


async def test_an_object_without_a_name_is_not_the_list_of_all() -> None:
    with pytest.raises(ValueError, match="without a name"):
        await Client(None).get("Pod", "ns", "")  # type: ignore[arg-type]
