"""Downloads a model from the hub, at the commit that a branch or tag points to now."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from outrider_serving.models.errors import ModelError

Select = Callable[[Iterable[str], object], list[str]]


def snapshot(repository: str, revision: str | None, token: str | None, select: Select) -> tuple[Path, str]:
    """Download the selected files, unless they are in huggingface_hub's cache; HF_ENDPOINT names another hub.

    Args:
        repository: ORGANISATION/NAME.
        revision: branch, tag or commit; the main branch when None.
        token: see `files.model_files`.
        select: which of the repository's files are wanted; raises ModelError where they cannot make a model.

    Returns:
        The directory, and the commit that the revision stood for.

    Raises:
        ModelError: no such repository or revision, no access, or the hub cannot be reached.
    """
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    api = HfApi(endpoint=endpoint, token=token)
    what = f"model {repository} (hub {endpoint})"
    try:  # clauses from the most special error to the most general
        info = api.model_info(repository, revision=revision)
        names = select([file.rfilename for file in info.siblings or []], repository)
        if info.sha is None:
            raise ModelError(f"{what}: the hub names no commit")
        directory = api.snapshot_download(repository, revision=info.sha, allow_patterns=names)
    except ModelError:
        raise
    except GatedRepoError as error:
        raise ModelError(
            f"{what} is gated: accept its terms there, and give a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{what}: there is no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        hint = "the token may not read it" if token else "it is private and needs a token"
        raise ModelError(f"{what}: there is no such repository, or {hint}") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{what}: {_reason(error)}") from error
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        raise ModelError(f"{what} cannot be downloaded: {error}") from error
    return Path(directory), info.sha


def _reason(error: HfHubHTTPError) -> str:
    status = error.response.status_code if error.response is not None else None
    if status in (401, 403):
        return f"access is refused (HTTP {status}): give a token that may read it"
    return f"the hub answered {error}"
