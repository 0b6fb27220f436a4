"""The shared cache in a pod: its flags and the Secrets it mounts; and what helps one that is not connected.

A pod without it is made as if there were no such thing.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from outrider_operator import names
from outrider_operator.cachespec import Retention, SharedCache
from outrider_operator.podspec import amount
from outrider_serving.settings import PodState

Object = dict[str, Any]

_AUTH: Final = "shared-cache-auth"
_CA: Final = "shared-cache-ca"
"""Names of volumes."""


def cache_arguments(cache: SharedCache | None, namespace: str, model: str) -> list[str]:
    """Flags of the serving command. Only what is set is said, but for the prefix: no pod can know it."""
    if cache is None:
        return []
    retention = cache.retention or Retention()
    given = {
        "shared-cache": cache.url,
        "shared-cache-auth": cache.auth_secret_ref and names.CACHE_AUTH_DIRECTORY,
        "shared-cache-ca": cache.ca_secret_ref and f"{names.CACHE_CA_DIRECTORY}/{names.CACHE_CA_FILE}",
        "shared-cache-prefix": cache.url and (cache.key_prefix or names.cache_prefix(namespace, model)),
        "tenant-mode": cache.tenant_mode,
        "retention": retention.seconds,
        "retention-size": None if retention.size is None else math.ceil(amount(retention.size)),
        "warm-seconds": cache.warm_seconds,
    }
    gateways = [f"--trusted-gateways={network}" for network in cache.trusted_gateways or []]
    return [f"--{flag}={value}" for flag, value in given.items() if value is not None] + gateways


def cache_volumes(cache: SharedCache | None) -> list[Object]:
    """Volumes of the Secrets.

    Optional, so that a Secret that is missing keeps no pod from serving: it serves without the cache, says
    so, and is connected once the Secret is there.
    """
    volumes = []
    if cache is not None and cache.auth_secret_ref is not None:
        volumes.append(_volume(_AUTH, {"secretName": cache.auth_secret_ref.name}))
    if cache is not None and cache.ca_secret_ref is not None:
        items = [{"key": cache.ca_secret_ref.key, "path": names.CACHE_CA_FILE}]
        volumes.append(_volume(_CA, {"secretName": cache.ca_secret_ref.name, "items": items}))
    return volumes


def _volume(name: str, secret: Object) -> Object:
    return {"name": name, "secret": {**secret, "defaultMode": 0o440, "optional": True}}


def cache_mounts(cache: SharedCache | None) -> list[Object]:
    """Where they are: directories, never a subPath, so that what is in them can be rotated."""
    mounts = []
    if cache is not None and cache.auth_secret_ref is not None:
        mounts.append({"name": _AUTH, "mountPath": names.CACHE_AUTH_DIRECTORY, "readOnly": True})
    if cache is not None and cache.ca_secret_ref is not None:
        mounts.append({"name": _CA, "mountPath": names.CACHE_CA_DIRECTORY, "readOnly": True})
    return mounts


_HELP: Final = (
    ("^(no)?auth|^wrongpass", "spec.sharedCache.authSecretRef names the Secret with user and password"),
    ("^noperm", "docs/operations.md has the rights that its user needs"),
    ("^oom", "Redis is full: give it more memory, or lower spec.sharedCache.retention"),
    (r"certificate|\[SSL|no such file", "spec.sharedCache.caSecretRef names the Secret with the CA of Redis"),
)
"""What an error holds, which may begin with a word for its kind, and what is worth knowing then."""


def cache_trouble(state: PodState) -> str | None:
    """Why a pod shares nothing, and what of the spec or of Redis it comes from."""
    error = state.shared_cache_error
    if error is None:
        return None
    told = (help_ for words, help_ in _HELP if re.search(words, error, re.IGNORECASE))
    return f"{error}; {next(told, 'Redis is named by spec.sharedCache.url')}"
