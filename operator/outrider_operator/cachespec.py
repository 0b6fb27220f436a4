"""What pods share of finished outputs, through which Redis, and with whom, as a SpeculativeModel sets it."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_network
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from outrider_operator.podspec import DataKey, LocalReference, Quantity, amount, cel
from outrider_serving.settings import Contract, TenantMode, check_distinct
from outrider_serving.suffix.shared.options import LONGEST_RETENTION

_PORT = "(:([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))?"
_NAMED = rf"[A-Za-z0-9][-._A-Za-z0-9]*{_PORT}"
_SERVER = rf"(\[[0-9A-Fa-f:.]{{2,45}}\]{_PORT}|{_NAMED})"
_SERVERS = rf"{_NAMED}(,{_NAMED})*"
_URL: Final = (
    rf"^(rediss?://{_SERVER}(/[0-9]{{0,4}})?"
    rf"|rediss?-sentinel://{_SERVERS}/[A-Za-z0-9][-._A-Za-z0-9]*(/[0-9]{{0,4}})?"
    rf"|rediss?-cluster://{_SERVERS}(/0?)?)$"
)
"""Several servers are named, or have IPv4 addresses: parsers of URLs disagree on brackets within a list."""

_SECRET_IN_URL: Final = (
    "a user or a password does not belong in the url, where everyone reads it who may read the resource: "
    "put them into a Secret, as username and password, and name that in authSecretRef"
)
_NO_URL: Final = (
    "the url must be redis://host:port/database, redis-sentinel://host:port,host:port/service/database or "
    "redis-cluster://host:port,host:port, with rediss in place of redis for TLS"
)


def _url(text: str) -> str:
    """A URL that pods understand; another one is repeated only where no part of it may be a secret."""
    if "@" in text:
        raise ValueError(_SECRET_IN_URL)
    came = "" if re.search("[?#%]", text) else f" (it is {text!r})"
    if not re.fullmatch(_URL, text):
        raise ValueError(_NO_URL + came)
    address = re.search(r"\[(.*)\]", text)
    if address is not None:
        try:
            IPv6Address(address[1])
        except ValueError as error:
            raise ValueError(f"{_NO_URL}{came}: {error}") from error
    return text


Url = Annotated[
    str,
    StringConstraints(min_length=1, max_length=512),
    AfterValidator(_url),
    Field(
        json_schema_extra=cel(
            ("!self.contains('@')", _SECRET_IN_URL),
            (f"self.contains('@') || self.matches(r'{_URL}')", _NO_URL),
        )
    ),
]

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NETWORK: Final = (
    rf"^({_BYTE}(\.{_BYTE}){{3}}(/(3[0-2]|[12]?[0-9]))?"
    "|[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{1,44}(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?)$"
)
"""The form of a network; whether its address ends where its length says is for a validator alone."""

_NO_NETWORK: Final = "trustedGateways must be networks, such as 10.1.0.0/16, or addresses"


def _network(text: str) -> str:
    try:
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise ValueError(f"{_NO_NETWORK}: {error}") from error
    if not re.fullmatch(_NETWORK, text):
        raise ValueError(f"{_NO_NETWORK} (it is {text})")
    if network.network_address != ip_network(text.partition("/")[0]).network_address:
        raise ValueError(f"{_NO_NETWORK}: {text} is an address in one, which is {network}")
    return text


Network = Annotated[
    str,
    StringConstraints(min_length=2, max_length=64),
    AfterValidator(_network),
    Field(json_schema_extra=cel((f"self.matches(r'{_NETWORK}')", _NO_NETWORK))),
]

KeyPrefix = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[-._:A-Za-z0-9]+$")]

LEAST_SIZE: Final = "16Ki"
"""Of one record."""

MOST_SIZE: Final = "1Ti"

_SIZE_BOUND: Final = (
    "isQuantity(string(self)) && !string(self).endsWith('m')"
    f" && quantity(string(self)).compareTo(quantity('{LEAST_SIZE}')) >= 0"
    f" && quantity(string(self)).compareTo(quantity('{MOST_SIZE}')) <= 0",
    f"size must be an amount of bytes from {LEAST_SIZE} to {MOST_SIZE}, such as 64Mi",
)
"""A rule of CEL; Retention checks the same."""


class CaReference(LocalReference):
    """The certificate of a CA in a Secret of the same namespace."""

    key: DataKey = Field(default="ca.crt", description="Key within the Secret.")


class Retention(Contract):
    """How long and how much of finished outputs is kept."""

    seconds: int | None = Field(
        default=None,
        ge=60,
        le=LONGEST_RETENTION,
        description="How long a finished output is kept, by pods and in Redis; by default 604800, a week.",
    )
    size: Quantity | None = Field(
        default=None,
        description="The most that is kept of each tenant in Redis, compressed: as many entries of 16 KiB "
        "as it has room for, so less where they are smaller; by default 64Mi.",
        json_schema_extra=cel(_SIZE_BOUND),
    )

    @model_validator(mode="after")
    def _bounded_size(self) -> Self:
        text = self.size
        if text is not None and (
            text.endswith("m") or not amount(LEAST_SIZE) <= amount(text) <= amount(MOST_SIZE)
        ):
            raise ValueError(f"{_SIZE_BOUND[1]} (it is {text})")
        return self


def _needs_url(field: str) -> str:
    return f"{field} is for a url: without one, pods share nothing"


_CA_WITHOUT_TLS: Final = "caSecretRef is for a url of TLS: rediss://, rediss-sentinel:// or rediss-cluster://"
_HEADER_WITHOUT_GATEWAYS: Final = "tenantMode header needs trustedGateways, whose word is taken"
_GATEWAYS_WITHOUT_HEADER: Final = "trustedGateways is for tenantMode header"

CACHE_RULES: Final = (
    *(
        (f"has(self.url) || !has(self.{field})", _needs_url(field))
        for field in ("authSecretRef", "caSecretRef", "keyPrefix", "warmSeconds")
    ),
    (
        "has(self.url) || !has(self.retention) || !has(self.retention.size)",
        _needs_url("retention.size"),
    ),
    ("!has(self.caSecretRef) || !has(self.url) || self.url.startsWith('rediss')", _CA_WITHOUT_TLS),
    (
        "!has(self.tenantMode) || self.tenantMode != 'header' || has(self.trustedGateways)",
        _HEADER_WITHOUT_GATEWAYS,
    ),
    (
        "!has(self.trustedGateways) || (has(self.tenantMode) && self.tenantMode == 'header')",
        _GATEWAYS_WITHOUT_HEADER,
    ),
)
"""CEL of rules that span several fields; SharedCache checks the same."""


class SharedCache(Contract):
    """Finished outputs that may be proposed to later requests: whose they are, and where pods share them."""

    url: Url | None = Field(
        default=None,
        description="The Redis through which pods share what they have learned: redis://host:port/database, "
        "redis-sentinel://host:port,host:port/service/database or redis-cluster://host:port,host:port, with "
        "rediss in place of redis for TLS. Without it each pod learns alone.",
    )
    auth_secret_ref: LocalReference | None = Field(
        default=None,
        description="Secret with Redis' `password` and, but for its default user, `username`; for Sentinels "
        "that ask for them, `sentinel-password` and `sentinel-username`. It is read at each connection.",
    )
    ca_secret_ref: CaReference | None = Field(
        default=None,
        description="Secret with the certificate (PEM) of the CA that signed those of Redis, where the "
        "image does not trust it anyway.",
    )
    tenant_mode: TenantMode | None = Field(
        default=None,
        description="Whose finished outputs may be proposed to a request. key: those of its key's tenant; "
        "single: everybody's; header: those of the tenant that a trusted gateway names in X-Outrider-Tenant; "
        "request: nobody's, only its own text. By default key with api.keysSecretRef, else request.",
    )
    trusted_gateways: list[Network] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Networks, such as 10.1.0.0/16, from where X-Outrider-Tenant is believed.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    key_prefix: KeyPrefix | None = Field(
        default=None,
        description="What keys in Redis begin with; by default `outrider:NAMESPACE:NAME:`, of the resource. "
        "Resources with the same prefix and model share what their tenants of the same name wrote.",
    )
    retention: Retention | None = Field(
        default=None, description="How long and how much of finished outputs is kept."
    )
    warm_seconds: int | None = Field(
        default=None,
        ge=0,
        le=600,
        description="How long a pod that starts waits at most, in seconds, for what others have shared, "
        "before it is ready; by default 5.",
    )

    @model_validator(mode="after")
    def _only_with_url(self) -> Self:
        of_url = {
            "authSecretRef": self.auth_secret_ref,
            "caSecretRef": self.ca_secret_ref,
            "keyPrefix": self.key_prefix,
            "warmSeconds": self.warm_seconds,
            "retention.size": self.retention and self.retention.size,
        }
        if self.url is None:
            for field, value in of_url.items():
                if value is not None:
                    raise ValueError(_needs_url(field))
        elif self.ca_secret_ref is not None and not self.url.startswith("rediss"):
            raise ValueError(f"{_CA_WITHOUT_TLS} (it is {self.url.partition(':')[0]}://)")
        return self

    @model_validator(mode="after")
    def _gateways(self) -> Self:
        gateways = self.trusted_gateways or []
        check_distinct("trustedGateways", gateways)
        if self.tenant_mode is TenantMode.HEADER and not gateways:
            raise ValueError(_HEADER_WITHOUT_GATEWAYS)
        if self.tenant_mode is not TenantMode.HEADER and gateways:
            raise ValueError(_GATEWAYS_WITHOUT_HEADER)
        return self
