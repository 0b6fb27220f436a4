"""docs/operations.md has every condition, reason, right, metric, size and limit, and no other right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from outrider_operator import conditions, events, instruments, trouble
from outrider_operator.enginespec import MAX_PROPOSER_MEMORY, Engine
from outrider_operator.report import ConditionType
from outrider_operator.schema import structural_schema
from outrider_serving.engine import options
from outrider_serving.settings import RequestLimits
from unit.chart.test_chart import documents, template
from unit.operator.builders import SIZES

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def section(title: str) -> str:
    """A section's text, up to the next heading of the same or a higher level."""
    (level, begin) = next(
        (len(found[1]), found.end()) for found in re.finditer(r"^(#+) (.*)$", PAGE, re.M) if found[2] == title
    )
    end = re.search(rf"^#{{1,{level}}} ", PAGE[begin:], re.M)
    return PAGE[begin : begin + end.start()] if end else PAGE[begin:]


def rows(title: str) -> Iterator[list[str]]:
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def words(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def reasons(module: object, call: str, position: int) -> set[str]:
    """Literals that the module passes to a call at that position: the reasons that it can give."""
    tree = ast.parse(Path(str(getattr(module, "__file__"))).read_text())  # noqa: B009
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == call:
            for part in ast.walk(node.args[position]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    found.add(part.value)
    return {each for each in found if re.fullmatch(r"[A-Z]\w+", each)}


def test_every_condition() -> None:
    documented = {word for row in rows("Conditions") for word in words(row[0])}
    assert documented == set(ConditionType)


def test_every_reason() -> None:
    documented = {word for row in rows("Reasons of Ready, and what to do") for word in words(row[0])}
    given = reasons(conditions, "Finding", 1) | reasons(trouble, "Trouble", 0)
    assert given
    of_other_conditions = {"NotOurs", "AlsoServed", "BadEntry", "Complete", "LearnsAlone", "WithoutProposals"}
    assert given - of_other_conditions - documented == set()
    assert documented >= events.UNDER_WAY


def test_every_right() -> None:
    def rules(*values: str) -> dict[tuple[str, str], set[str]]:
        found: dict[tuple[str, str], set[str]] = {}
        for document in documents(template(*values)):
            for rule in document.get("rules", ()):
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        found.setdefault((group or "core", resource), set()).update(rule["verbs"])
        return found

    documented: dict[tuple[str, str], set[str]] = {}
    for group, resources, verbs, _ in rows("Rights"):
        known = set(re.findall(r"get|list|watch|create|patch|update|delete", verbs))
        documented |= {(group, resource): known for resource in resources.split(", ")}
    assert documented == rules() == rules("--set=watchNamespaces={a}")


def test_every_metric() -> None:
    source = Path(instruments.__file__).read_text()
    names = {name.replace(".", "_") for name in re.findall(r'"(outrider\.operator\.[a-z.]+)"', source)}
    documented = " ".join(row[0] for row in rows("Metrics"))
    assert names
    assert {name for name in names if name not in documented} == set()


def test_every_size_of_the_engine_with_its_bounds_and_default() -> None:
    documented = {words(field)[0]: cells for field, *cells in rows("Sizes of the engine")}
    assert set(documented) == set(SIZES)
    schema = structural_schema(Engine)["properties"]
    assert documented.pop("proposerMemory")[:3] == ["0", MAX_PROPOSER_MEMORY, "0"]
    for field, (least, most, *_) in documented.items():
        assert (float(least), float(most)) == (schema[field]["minimum"], schema[field]["maximum"])
    assert {field: cells[2] for field, cells in documented.items()} == {
        "maxRunning": str(options.DEFAULT_MAX_RUNNING),
        "maxWaiting": str(options.DEFAULT_MAX_WAITING),
        "stepTokens": f"{options.STEP_TOKENS_GPU} on a GPU, {options.STEP_TOKENS_CPU} on a CPU",
        "memoryShare": f"{options.MEMORY_SHARE_GPU} on a GPU, {options.MEMORY_SHARE_CPU} on a CPU",
    }


def test_every_limit_of_requests() -> None:
    documented = [words(row[0])[0] for row in rows("Limits of requests")]
    assert documented == list(structural_schema(RequestLimits)["properties"])


def anchors(page: str) -> set[str]:
    """What links into a page may lead to."""
    titles = re.findall(r"^#+ (.*)$", page, re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, anchor = target.partition("#")
        path = Path(__file__).parents[2] / "docs" / file
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text() if file else PAGE), target
