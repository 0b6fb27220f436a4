"""`spec.sharedCache`: what is refused, what pods are told, and that they understand all that is admitted."""

from __future__ import annotations

from argparse import Namespace
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from outrider_operator import names
from outrider_operator.cachespec import _NETWORK, _URL, Network, Url
from outrider_operator.crd import custom_resource_definition
from outrider_operator.podtemplate import arguments
from outrider_operator.spec import SpeculativeModelSpec
from outrider_serving.flags import make_parser
from outrider_serving.settings import TenantMode
from outrider_serving.suffix.shared.keys import is_prefix
from outrider_serving.suffix.shared.options import WARM_SECONDS, LogOptions, parse_url
from outrider_serving.tenancy import tenancy_of
from unit.operator.builders import MINIMAL, REDIS, SHARED, changed

Object = dict[str, Any]

KEYS = {"keysSecretRef": {"name": "tenants"}}
SINGLE = {"tenantMode": "single"}
HEADER = {"tenantMode": "header"}
LOCAL = {"url": "redis://redis:6379", **SINGLE}
NEED_URL = {
    "authSecretRef": {"name": "s"},
    "caSecretRef": {"name": "s"},
    "keyPrefix": "x:",
    "warmSeconds": 5,
}
SECRET_IN_URL = "put them into a Secret, as username and password, and name that in authSecretRef"
FORMS = "the url must be redis://host:port/database, redis-sentinel://host:port,host:port/service/database or"
TLS = "with rediss in place of redis for TLS"
SIZE = "size must be an amount of bytes from 16Ki to 1Ti, such as 64Mi"
NO_NETWORK = "trustedGateways must be networks, such as 10.1.0.0/16, or addresses"
APART = "sharedCache.url and sharedCache.retention do nothing where each request sees only its own text: set"

REFUSED: list[tuple[Object, str]] = [
    *((SINGLE | {field: value}, f"{field} is for a url") for field, value in NEED_URL.items()),
    (SINGLE | {"retention": {"size": "1Mi"}}, "retention.size is for a url"),
    (LOCAL | {"url": "redis://team:hunter2@redis"}, SECRET_IN_URL),
    (LOCAL | {"url": "redis://:hunter2@redis"}, SECRET_IN_URL),
    (LOCAL | {"url": "redis://redis?password=hunter2"}, FORMS),
    (LOCAL | {"url": "redis://redis#hunter2"}, FORMS),
    (LOCAL | {"url": "redis://:hunter2%40redis"}, FORMS),
    (
        LOCAL | {"url": "http://redis"},
        f"{FORMS} redis-cluster://host:port,host:port, {TLS} (it is 'http://redis')",
    ),
    (LOCAL | {"url": "redis:6379"}, FORMS),
    (LOCAL | {"url": "redis://"}, FORMS),
    (LOCAL | {"url": "redis://redis:0"}, FORMS),
    (LOCAL | {"url": "redis://redis:65536"}, FORMS),
    (LOCAL | {"url": "redis://redis/zero"}, FORMS),
    (LOCAL | {"url": "redis://a,b"}, FORMS),
    (LOCAL | {"url": "redis://[1:2]"}, "(it is 'redis://[1:2]'): At least 3 parts expected"),
    (LOCAL | {"url": "redis://redis\n"}, FORMS),
    (LOCAL | {"url": "redis-sentinel://a,b"}, FORMS),
    (LOCAL | {"url": "redis-cluster://a,b/1"}, FORMS),
    (LOCAL | {"url": "redis://" + "a" * 505}, "at most 512 characters"),
    (
        LOCAL | {"caSecretRef": {"name": "s"}},
        "caSecretRef is for a url of TLS: rediss://, rediss-sentinel:// or rediss-cluster:// (it is redis://)",
    ),
    (LOCAL | {"keyPrefix": "a*"}, "should match pattern"),
    (LOCAL | {"keyPrefix": ""}, "at least 1 character"),
    (LOCAL | {"keyPrefix": "a" * 65}, "at most 64 characters"),
    (LOCAL | {"retention": {"size": 16_383}}, f"{SIZE} (it is 16383)"),
    (LOCAL | {"retention": {"size": "1025Gi"}}, f"{SIZE} (it is 1025Gi)"),
    (LOCAL | {"retention": {"size": "64m"}}, f"{SIZE} (it is 64m)"),
    (LOCAL | {"retention": {"size": "64 MB"}}, "should match pattern"),
    (SINGLE | {"retention": {"seconds": 59}}, "greater than or equal to 60"),
    (SINGLE | {"retention": {"seconds": 31_536_001}}, "less than or equal to 31536000"),
    (LOCAL | {"warmSeconds": -1}, "greater than or equal to 0"),
    (LOCAL | {"warmSeconds": 601}, "less than or equal to 600"),
    ({"tenantMode": "team"}, "'key', 'single', 'header' or 'request'"),
    ({"tenantMode": "key"}, "sharedCache.tenantMode key needs api.keysSecretRef"),
    (HEADER, "tenantMode header needs trustedGateways"),
    (HEADER | {"trustedGateways": []}, "at least 1 item"),
    (HEADER | {"trustedGateways": [f"10.0.0.{n}" for n in range(17)]}, "at most 16 items"),
    (
        HEADER | {"trustedGateways": ["10.0.0.2", "10.0.0.1", "10.0.0.1"]},
        "trustedGateways must be distinct (more than once: 10.0.0.1)",
    ),
    (HEADER | {"trustedGateways": ["10.1"]}, NO_NETWORK),
    (HEADER | {"trustedGateways": ["gateway.example"]}, NO_NETWORK),
    (HEADER | {"trustedGateways": ["10.0.0.0/255.0.0.0"]}, f"{NO_NETWORK} (it is 10.0.0.0/255.0.0.0)"),
    (
        HEADER | {"trustedGateways": ["10.1.2.3/16"]},
        f"{NO_NETWORK}: 10.1.2.3/16 is an address in one, which is 10.1.0.0/16",
    ),
    ({"trustedGateways": ["10.0.0.0/8"]}, "trustedGateways is for tenantMode header"),
    (SINGLE | {"trustedGateways": ["10.0.0.0/8"]}, "trustedGateways is for tenantMode header"),
    ({"url": "redis://redis"}, APART),
    ({"url": "redis://redis", "tenantMode": "request"}, APART),
    ({"retention": {"seconds": 60}}, APART),
    ({"urls": ["redis://redis"]}, "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("cache", "message"), REFUSED)
def test_refused(cache: Object, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SpeculativeModelSpec.model_validate(MINIMAL | {"sharedCache": cache})
    assert message in str(caught.value)
    told = [problem["msg"] for problem in caught.value.errors()]
    assert not [words for words in told if "hunter2" in words]  # they become a condition


def test_without_a_mode_that_is_said_it_takes_keys_to_share() -> None:
    spec = MINIMAL | {"sharedCache": {"url": "redis://redis"}}
    assert SpeculativeModelSpec.model_validate(spec | {"api": KEYS})
    asked = changed(spec, "sharedCache.tenantMode", "request")
    with pytest.raises(ValidationError, match=APART):
        SpeculativeModelSpec.model_validate(asked | {"api": KEYS})


@pytest.mark.parametrize(
    "cache",
    [
        {},
        {"tenantMode": "request"},
        SINGLE | {"retention": {"seconds": 60}},
        HEADER | {"trustedGateways": ["10.0.0.1", "::1", "fd00::/8", "0.0.0.0/0"]},
        LOCAL | {"retention": {"size": 16_384}, "warmSeconds": 0},
        LOCAL | {"retention": {"seconds": 31_536_000, "size": "1Ti"}, "warmSeconds": 600},
        LOCAL | {"url": "redis://[fd00::1]:6379/15", "keyPrefix": "A" * 64},
    ],
    ids=str,
)
def test_accepted_at_its_bounds_and_understood(cache: Object) -> None:
    assert understood(MINIMAL | {"sharedCache": cache})


def understood(spec: Object) -> Namespace:
    return make_parser().parse_args(arguments("ns", "m", SpeculativeModelSpec.model_validate(spec)))


def test_pods_are_told_what_was_asked_for() -> None:
    told = understood(SHARED)
    assert told.shared_cache == SHARED["sharedCache"]["url"]
    assert str(told.shared_cache_auth) == "/etc/outrider/shared-cache-auth"
    assert str(told.shared_cache_ca) == "/etc/outrider/shared-cache-ca/ca.crt"
    assert (told.shared_cache_prefix, told.tenant_mode) == ("teams:", TenantMode.HEADER)
    assert told.trusted_gateways == ["10.1.0.0/16", "fd00::/64"]
    assert (told.retention, told.retention_size, told.warm_seconds) == (86_400, 3 << 19, 20)


def test_only_what_is_set_is_said_but_for_the_prefix() -> None:
    plain, shared = (arguments("ns", "m", SpeculativeModelSpec.model_validate(s)) for s in (MINIMAL, REDIS))
    assert shared == [
        *plain,
        "--shared-cache=redis://redis:6379",
        "--shared-cache-prefix=outrider:ns:m:",
        "--tenant-mode=single",
    ]


def test_no_two_resources_have_one_prefix_and_none_begins_with_anothers() -> None:
    found = {
        names.cache_prefix(namespace, model) for namespace in ("a", "a-b") for model in ("b", "b-b", "b")
    }
    assert len(found) == 4
    assert not [(one, other) for one in found for other in found if one != other and one.startswith(other)]


def test_the_longest_prefix_is_one() -> None:
    longest = names.cache_prefix("n" * 63, "m" * names.MAX_NAME_LENGTH)
    assert len(longest) == 111
    assert is_prefix(longest)


@given(st.from_regex(_URL, fullmatch=True))
def test_every_url_that_is_admitted_is_understood(url: str) -> None:
    try:
        TypeAdapter(Url).validate_python(url)
    except ValidationError:
        assume(False)
    assert parse_url(url).tls == url.startswith("rediss")


@given(st.from_regex(_NETWORK, fullmatch=True))
def test_every_network_that_is_admitted_is_understood(network: str) -> None:
    try:
        TypeAdapter(Network).validate_python(network)
    except ValidationError:
        assume(False)
    assert tenancy_of(TenantMode.HEADER, [network], keys=False, host="0.0.0.0")


@given(st.ip_addresses(), st.integers(0, 128))
def test_every_network_is_admitted(address: IPv4Address | IPv6Address, length: int) -> None:
    network = ip_network((address, min(length, address.max_prefixlen)), strict=False)
    assert TypeAdapter(Network).validate_python(str(network)) == str(network)


def test_descriptions_tell_the_defaults_of_pods() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    cache = spec["properties"]["sharedCache"]["properties"]
    kept, told, bare = cache["retention"]["properties"], LogOptions("redis://h"), understood(MINIMAL)
    assert bare.retention == told.retention_seconds
    assert f"by default {told.retention_seconds}, a week" in kept["seconds"]["description"]
    assert f"by default {told.retention_bytes >> 20}Mi" in kept["size"]["description"]
    assert f"by default {WARM_SECONDS:.0f}." in cache["warmSeconds"]["description"]
