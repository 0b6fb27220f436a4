"""Brings in the fixtures `cluster` and `demo`, of which a run has one each, and puts `test_rights` last."""

from __future__ import annotations

from pathlib import Path

import pytest

import cluster_fixture

HERE = Path(__file__).parent
LAST = HERE / "test_rights.py"
_PARTIAL = pytest.StashKey[str | None]()


def pytest_configure(config: pytest.Config) -> None:
    """Register once, whichever folder comes first."""
    if not config.pluginmanager.has_plugin("cluster_fixture"):
        config.pluginmanager.register(cluster_fixture, "cluster_fixture")


@pytest.hookimpl(trylast=True)  # after what selects and shuffles
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What judges the operator's requests comes after all the tests here that cause some."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    rights = [item for item in ours if item.path == LAST]
    config.stash[_PARTIAL] = _partial(config, ours)
    if not rights:
        return
    others = [item for item in items if item not in rights]
    end = max((index for index, item in enumerate(others, 1) if item in ours), default=len(others))
    items[:] = [*others[:end], *rights, *others[end:]]


def _partial(config: pytest.Config, ours: list[pytest.Item]) -> str | None:
    missing = set(HERE.glob("test_*.py")) - {item.path for item in ours}
    if missing:
        return f"without {', '.join(sorted(path.name for path in missing))}"
    options = ("keyword", "markexpr", "deselect", "lf")
    if any("::" in argument for argument in config.args) or any(
        config.getoption(option, None) for option in options
    ):
        return "of a selection of tests"
    return None


@pytest.fixture(scope="session")
def partial_run(request: pytest.FixtureRequest) -> str | None:
    """Why the run cannot tell that a right is unused; None when it has every test of this folder."""
    return request.config.stash[_PARTIAL]
