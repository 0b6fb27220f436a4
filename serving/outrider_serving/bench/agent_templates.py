"""The templates of what agents ask, and what is filled into them.

They were chosen for what Gemma 3 270M writes after them: much of it recurs from one document to the next. A
base model also says the same line over and over. So a speed measured on them holds for text that recurs as
`coverage` says, within a request and between them, and for no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_ENTITIES = (
    "account order invoice ticket booking parcel vehicle patient course recipe device player contract "
    "member product author flight room camera sensor payment shipment customer project"
)
_FIELDS = (
    "name status price amount owner city color weight level score email phone title state country balance "
    "quantity category address rating length width speed capacity"
)
VERBS = "close open cancel archive refund confirm reserve release update delete approve reject assign lock"
_PEOPLE = (
    "Ana_Souza Peter_Lind Maria_Rossi John_Carter Eva_Novak Omar_Haddad Lucy_Chen Tom_Becker Nina_Petrov "
    "Raj_Mehta"
)
_PLACES = "Lisbon Oslo Turin Leeds Prague Cairo Taipei Bonn Sofia Pune"

POOLS: dict[str, Sequence[str] | range] = {
    "entity": _ENTITIES.split(),
    "other": _ENTITIES.split(),
    "field": _FIELDS.split(),
    "second": _FIELDS.split(),
    "third": _FIELDS.split(),
    "verb": VERBS.split(),
    "person": [name.replace("_", " ") for name in _PEOPLE.split()],
    "place": _PLACES.split(),
    "count": range(2, 100),
    "id": range(100, 10_000),
    "year": range(1900, 2000),
}
"""What each name in a template may be. `$Entity` is `$entity` with a capital."""

_CALLS: Final = {
    "tests": """\
>>> {"tool": "read_file", "arguments": {"path": "src/$entity.py"}}
class $Entity:
    def __init__(self, $field, $second=$count):
        self.$field = $field
>>> {"tool": "write_file", "arguments": {"path": "tests/test_$entity.py"}}
import unittest

from src.$entity import $Entity


class Test$Entity(unittest.TestCase):
""",
    "traceback": """\
>>> {"tool": "run", "arguments": {"command": "python -m pytest tests/$entity", "timeout": $count}}
Traceback (most recent call last):
  File "/srv/$entity/main.py", line $id, in <module>
    $verb($field)
""",
    "email": """\
{"tool": "get_order", "arguments": {"id": $id}}
{"output": {"customer": "$person", "item": "$entity", "days": $count, "city": "$place"}}
{"tool": "send_email", "arguments": {"subject": "Your $entity", "body": "Dear $person,""",
    "lookup": """\
>>> {"tool": "get_$entity", "arguments": {"id": $id, "fields": ["$field", "$second"]}}
{"id": $id, "$field": $count, "$second": "$place", "created_at": "2024-""",
    "readme": """\
>>> {"tool": "write_file", "arguments": {"path": "$entity-$field/README.md", "limit": $id}}
# $entity-$field

A small service that ${verb}s ${entity}s.

## Installation

""",
    "settings": """\
>>> {"tool": "read_file", "arguments": {"path": "$entity.json"}}
{"name": "$entity", "$field": $count, "$second": "$place", "owner": "$person", "id": $id, "enabled": true}
>>> {"tool": "write_file", "arguments": {"path": "$entity.json", "content": {"name": "$entity", "$field":""",
}

_EDITS: Final = {
    "rewrite": """\
# src/$entity.py, before
class $Entity:
    def __init__(self, $field):
        self.$field = $field
        self.limit = $count

    def $verb(self):
        self.$field = self.limit

# src/$entity.py, $field is now $second
class $Entity:
    def __init__(self, $second):
        self.$second = $second
        self.limit = $count

    def $verb(self):
        self.$second = self.limit

# src/$entity.py, $second is now $third
class $Entity:
    def __init__(self, $third):
""",
    "table": """\
from sqlalchemy import Column, Integer, String
from sqlalchemy.ext.declarative import declarative_base

Base = declarative_base()
LIMIT = $count

${added}class $Entity(Base):
    __tablename__ = "${entity}s"

    id = Column(Integer, primary_key=True)
    $field = Column(String(64))
""",
    "migration": """\
-- migration $id
CREATE TABLE ${entity}s (
  id SERIAL PRIMARY KEY,
  $field TEXT NOT NULL,
  $second INTEGER NOT NULL DEFAULT $count
);

CREATE TABLE ${other}s (
""",
}

_RETRIES: Final = {
    "workflow": """\
# attempt $count: the last answer was no valid YAML (line $id)
name: $entity
on:
  push:
    branches: [$verb]
jobs:
""",
    "store": """\
# attempt $count: sqlite3.OperationalError in line $id
""\"Stores ${entity}s.""\"
import sqlite3


class ${Entity}Store:
    def __init__(self, path):
""",
    "logs": """\
# attempt $count: the last answer failed after $id ms
# $entity/logs.py
import logging
import logging.handlers

LEVEL = "INFO"


def setup_logging(path="/var/log/$entity.log"):
""",
}

_FACTS: Final = {
    "company": """\
Answer from the context.

Context: $person founded $Entity Systems in $place in $year. The company makes ${field}s and employs $id \
people.

Q: Who founded the company?
A: $person founded $Entity Systems.
Q: Where is the company?
A:""",
    "reply": """\
Ticket $id: the $field of the $entity is wrong. Customer: $person, $place.
Reply politely; say that it takes $count days.

Subject: Your ticket $id

Dear""",
    "policy": """\
You answer from the documents and cite them.

[1] A $entity may be returned within $count days. Contact: $person, $place.
[2] The $field of a $entity must not be changed.

Question: What must not be changed?
Answer: The $field of a $entity must not be changed [2].
Question: Whom can I ask?
Answer:""",
    "record": """\
Answer from the context only, as JSON.

Context:
$Entity $id was opened in $year and has $count ${field}s. Its owner is $person, who lives in $place.

Question: Who owns $entity $id, and where do they live?
Answer: {"owner": \"""",
}

FUNCTIONS: Final = {
    "table": """\
def $verb(row):
    row.$field = None


""",
}

UNLIKE: Final = (
    "Obituary. Margaret Hale, who taught",
    "A brief history of the bicycle:",
    "Breaking: parliament voted on Thursday",
    "Il gatto dormiva sulla finestra quando",
    "Лето было жарким, и",
    "Once, three brothers inherited a mill,",
    "Kings of England: William I (1066-1087),",
    "Pirates of the Caribbean sailed",
    "Flight of the bumblebee was",
    "The jury heard that",
    "Symptoms of vitamin D deficiency include",
    "Advice for first-time gardeners:",
)
"""Begun texts with nothing in common, after which the model hardly repeats itself."""

KINDS: Final = {"call": _CALLS, "edit": _EDITS, "retry": _RETRIES, "facts": _FACTS}

FAMILIES: Final = tuple(name for texts in KINDS.values() for name in texts)
"""Names of the templates."""
