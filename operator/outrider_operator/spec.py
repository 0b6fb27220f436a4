"""What a user asks for: the single source of the custom resource's schema and of its validation.

`generate.py` writes the CRD from these models. A rule that the schema cannot say stands twice: as CEL, so
that the API server refuses it at admission, and as a validator, so that a resource which was stored before
the rule existed is named in a condition.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from outrider_operator.cachespec import CACHE_RULES, SharedCache
from outrider_operator.enginespec import ENGINE_RULES, Engine
from outrider_operator.podspec import AbsolutePath, LocalReference, SecretKeyReference, cel, keyed
from outrider_serving.settings import (
    OTHER_WORKLOAD,
    Contract,
    Objective,
    Proposer,
    RequestLimits,
    TenantMode,
    Workload,
)
from outrider_serving.suffix.shared.options import WARM_SECONDS

HubId = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=192, pattern=r"^[A-Za-z0-9][-._A-Za-z0-9]*/[A-Za-z0-9][-._A-Za-z0-9]*$"
    ),
]
PackageName = Annotated[
    str,
    StringConstraints(
        min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
    ),
]
Revision = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][-._/A-Za-z0-9]*$")
]
ServedName = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][-._:/A-Za-z0-9]*$")
]


class Dtype(StrEnum):
    """Dtype of the weights in memory."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class HubSource(Contract):
    """A model of a hub that speaks the Hugging Face API."""

    id: HubId = Field(description="Owner and name of the model, as in `google/gemma-3-270m`.")
    token_secret_ref: SecretKeyReference | None = Field(
        default=None, description="Secret with the access token of a gated or private model."
    )


class ModelSource(Contract):
    """Where config, tokenizer and weights come from: exactly one of these."""

    hub: HubSource | None = Field(default=None, description="A model of the hub, fetched by the pod.")
    path: AbsolutePath | None = Field(
        default=None,
        description="A directory on one of engine.volumes, as the container sees it, without `.` and `..`.",
    )
    package: PackageName | None = Field(
        default=None, description="A Python package of the image that carries the weights."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(source is not None for source in (self.hub, self.path, self.package)) != 1:
            raise ValueError("set exactly one of hub, path and package")
        return self


class Model(Contract):
    """The target model."""

    source: ModelSource = Field(
        description="Where the model comes from: exactly one of hub, path and package.",
        json_schema_extra=cel(
            (
                "[has(self.hub), has(self.path), has(self.package)].filter(x, x).size() == 1",
                "set exactly one of hub, path and package",
            )
        ),
    )
    revision: Revision | None = Field(
        default=None,
        description="Branch, tag or commit of a hub model, `main` by default; status.model shows the commit.",
    )
    dtype: Dtype = Field(
        default=Dtype.AUTO,
        description="Dtype of the weights in memory; auto takes what the model's config says.",
    )
    context_length: int | None = Field(
        default=None,
        ge=16,
        le=16_777_216,
        description="Most tokens of prompt and output together; by default, and at most, the model's own.",
    )
    served_name: ServedName | None = Field(
        default=None, description="Name by which requests address the model; by default that of the resource."
    )
    chat_template: Annotated[str, StringConstraints(min_length=1, max_length=32_000)] | None = Field(
        default=None, description="Jinja template of chat messages, in place of the model's own."
    )

    @model_validator(mode="after")
    def _revision_of_hub(self) -> Self:
        if self.revision is not None and self.source.hub is None:
            raise ValueError("revision is for a hub source; a path or package is what its digest says")
        return self


class Api(Contract):
    """The OpenAI-compatible API."""

    port: int = Field(default=8000, ge=1, le=65_535, description="Port of the Service.")
    keys_secret_ref: LocalReference | None = Field(
        default=None,
        description="Secret with one entry a tenant: its name is the tenant's, its lines are that tenant's "
        "API keys. It is re-read while pods run; without it the API asks for no key.",
    )


class Replacement(StrEnum):
    """How new pods take over from old ones."""

    SURGE = "surge"
    IN_PLACE = "inPlace"


_MODE_KEY = "sharedCache.tenantMode key needs api.keysSecretRef: without keys nobody is told apart"
_NOTHING_KEPT = (
    "sharedCache.url and sharedCache.retention do nothing where each request sees only its own text: "
    "set api.keysSecretRef, or sharedCache.tenantMode to key, single or header"
)


class SpeculativeModelSpec(Contract):
    """What is wanted."""

    model: Model = Field(
        description="The target model.",
        json_schema_extra=cel(
            (
                "!has(self.revision) || has(self.source.hub)",
                "revision is for a hub source; a path or package is what its digest says",
            )
        ),
    )
    engine: Engine = Field(
        default=Engine(),
        description="The pods that serve the model.",
        json_schema_extra=cel(*ENGINE_RULES),
    )
    replicas: int = Field(default=1, ge=0, le=1000, description="Number of pods; 0 stops serving.")
    replacement: Replacement = Field(
        default=Replacement.SURGE,
        description="How new pods take over where a change needs new ones. surge: they start beside the old "
        "ones, which serve until then; it needs room for both. inPlace, where no GPU is spare: one old pod "
        "ends, a new one takes its room, and only when that one serves does the next old one end. So with 2 "
        "or more replicas a bad change costs one pod; with 1 nothing serves while the new pod starts.",
    )
    proposer: Proposer = Field(
        default=Proposer(),
        description="What proposes tokens for the target to verify. A change reaches running pods.",
        json_schema_extra=cel(
            ("self.minDepth <= self.maxDepth", "minDepth must not exceed maxDepth"),
            (
                "!has(self.ngram) || self.ngram.minMatch <= self.ngram.maxMatch",
                "ngram.minMatch must not exceed ngram.maxMatch",
            ),
        ),
    )
    workloads: list[Workload] | None = Field(
        default=None,
        max_length=64,
        description="Kinds of traffic that are counted apart, each with its own objective if it has one.",
        json_schema_extra=keyed("name")
        | cel(
            (
                f"self.all(w, w.name != '{OTHER_WORKLOAD}')",
                f"the name {OTHER_WORKLOAD} is reserved for traffic that names no declared workload",
            )
        ),
    )
    objective: Objective | None = Field(
        default=None, description="Latency limits of requests whose workload has no objective of its own."
    )
    requests: RequestLimits = Field(
        default=RequestLimits(),
        description="Limits of what a request may ask for. A change reaches running pods.",
    )
    api: Api = Field(default=Api(), description="The OpenAI-compatible API.")
    shared_cache: SharedCache | None = Field(
        default=None,
        description="Finished outputs that may be proposed to later requests: whose they are, and the Redis "
        "through which pods share them. Without it pods share nothing.",
        json_schema_extra=cel(*CACHE_RULES),
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        path = self.model.source.path
        mounts = [volume.mount_path for volume in self.engine.volumes or []]
        if path is not None and not any(path == mount or path.startswith(mount + "/") for mount in mounts):
            raise ValueError(f"model.source.path {path} lies on none of engine.volumes")
        names = [variable.name for variable in self.engine.env or []]
        if "OUTRIDER_CHAT_TEMPLATE" in names:
            raise ValueError("engine.env must not set OUTRIDER_CHAT_TEMPLATE: use model.chatTemplate")
        if self.model.source.hub and self.model.source.hub.token_secret_ref and "HF_TOKEN" in names:
            raise ValueError("engine.env must not set HF_TOKEN beside model.source.hub.tokenSecretRef")
        workloads = [workload.name for workload in self.workloads or []]
        if len(workloads) != len(set(workloads)):
            raise ValueError("workloads must have distinct names")
        return self

    @property
    def start_seconds(self) -> int:
        """How long a pod may take until it serves: to load, and to wait for what others have shared."""
        cache = self.shared_cache
        if cache is None or cache.url is None:
            return self.engine.load_seconds
        warm = WARM_SECONDS if cache.warm_seconds is None else cache.warm_seconds
        return self.engine.load_seconds + math.ceil(warm)

    @model_validator(mode="after")
    def _kept_for_someone(self) -> Self:
        cache, keys = self.shared_cache, self.api.keys_secret_ref is not None
        if cache is None:
            return self
        if cache.tenant_mode is TenantMode.KEY and not keys:
            raise ValueError(_MODE_KEY)
        apart = not keys if cache.tenant_mode is None else cache.tenant_mode is TenantMode.REQUEST
        if apart and not (cache.url is None and cache.retention is None):
            raise ValueError(_NOTHING_KEPT)
        return self


SPEC_RULES: tuple[tuple[str, str], ...] = (
    (
        "!has(self.model.source.path) || (has(self.engine.volumes) && self.engine.volumes.exists(v,"
        " self.model.source.path == v.mountPath || self.model.source.path.startsWith(v.mountPath + '/')))",
        "model.source.path must lie on one of engine.volumes",
    ),
    (
        "!has(self.engine.env) || !self.engine.env.exists(e, e.name == 'OUTRIDER_CHAT_TEMPLATE')",
        "engine.env must not set OUTRIDER_CHAT_TEMPLATE: use model.chatTemplate",
    ),
    (
        "!has(self.model.source.hub) || !has(self.model.source.hub.tokenSecretRef) || !has(self.engine.env)"
        " || !self.engine.env.exists(e, e.name == 'HF_TOKEN')",
        "engine.env must not set HF_TOKEN beside model.source.hub.tokenSecretRef",
    ),
    (
        "!has(self.sharedCache) || !has(self.sharedCache.tenantMode) || self.sharedCache.tenantMode != 'key'"
        " || has(self.api.keysSecretRef)",
        _MODE_KEY,
    ),
    (
        "!has(self.sharedCache) || !(has(self.sharedCache.url) || has(self.sharedCache.retention))"
        " || (has(self.sharedCache.tenantMode) ? self.sharedCache.tenantMode != 'request'"
        " : has(self.api.keysSecretRef))",
        _NOTHING_KEPT,
    ),
)
"""CEL of rules that span several fields; SpeculativeModelSpec checks the same."""
