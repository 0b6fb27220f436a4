"""Whose a request is, and whose history it sees."""

from __future__ import annotations

import pytest

from outrider_serving.settings import TenantMode
from outrider_serving.tenancy import (
    EVERYONE_APART,
    TenancyError,
    TenantNameError,
    UntrustedGatewayError,
    Whose,
    tenancy_of,
)


@pytest.mark.parametrize(
    ("mode", "keys", "host", "expected"),
    [
        (None, True, "0.0.0.0", Whose("red", "red")),
        (None, True, "127.0.0.1", Whose("red", "red")),
        (None, False, "127.0.0.1", Whose("red", "")),
        (None, False, "::1", Whose("red", "")),
        (None, False, "localhost", Whose("red", "")),
        (None, False, "0.0.0.0", Whose("red", None)),
        (None, False, "example.org", Whose("red", None)),
        (TenantMode.SINGLE, True, "0.0.0.0", Whose("red", "")),
        (TenantMode.REQUEST, True, "127.0.0.1", Whose("red", None)),
        (TenantMode.KEY, True, "127.0.0.1", Whose("red", "red")),
    ],
)
def test_whose_a_request_is(mode: TenantMode | None, keys: bool, host: str, expected: Whose) -> None:
    """And a header is refused: whoever sends it takes tenants to be told apart by it."""
    made = tenancy_of(mode, [], keys=keys, host=host)
    assert made.whose("red", "127.0.0.1", None) == expected
    for header in ("blue", "!", ""):
        with pytest.raises(UntrustedGatewayError, match=rf"the tenant mode is {made.mode.value}, not header"):
            made.whose("red", "127.0.0.1", header)


def test_without_a_word_everyone_is_apart() -> None:
    assert EVERYONE_APART.whose("red", "127.0.0.1", None).history is None


class TestGateway:
    made = tenancy_of(TenantMode.HEADER, ["10.1.0.0/16", "fd00::/8"], keys=True, host="0.0.0.0")

    @pytest.mark.parametrize("peer", ["10.1.2.3", "fd12::1", "::ffff:10.1.2.3"])
    def test_a_trusted_one_names_the_tenant(self, peer: str) -> None:
        assert self.made.whose("gateway", peer, "blue") == Whose("blue", "blue")
        assert self.made.whose("gateway", peer, None) == Whose("gateway", None)

    @pytest.mark.parametrize("peer", ["10.2.0.1", "fe80::1", "::ffff:10.2.0.1", None, "testclient"])
    def test_another_may_not(self, peer: str | None) -> None:
        with pytest.raises(UntrustedGatewayError, match="only a trusted gateway"):
            self.made.whose("gateway", peer, "blue")
        assert self.made.whose("gateway", peer, None) == Whose("gateway", None)

    @pytest.mark.parametrize(
        ("peer", "came_from"),
        [("10.2.0.1", "10.2.0.1"), ("fe80::1", "fe80::1"), (None, "an unknown address")],
    )
    def test_another_is_told_who_it_is_and_not_who_may(self, peer: str | None, came_from: str) -> None:
        with pytest.raises(UntrustedGatewayError) as refused:
            self.made.whose("", peer, "blue")
        assert str(refused.value) == (
            "x-outrider-tenant: only a trusted gateway may name the tenant, and this came from "
            f"{came_from} (sharedCache.trustedGateways, --trusted-gateways)."
        )

    @pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "a" * 254, "a\n", "a:b", "{a}"])
    def test_a_malformed_name_is_refused(self, name: str) -> None:
        with pytest.raises(TenantNameError, match="1 to 253 letters"):
            self.made.whose("gateway", "10.1.2.3", name)


@pytest.mark.parametrize(
    ("mode", "gateways", "keys", "message"),
    [
        (TenantMode.KEY, [], False, "--tenant-mode key needs --api-keys"),
        (TenantMode.HEADER, [], True, "--tenant-mode header needs --trusted-gateways"),
        (TenantMode.SINGLE, ["10.0.0.0/8"], True, "for --tenant-mode header, not for single"),
        (None, ["10.0.0.0/8"], True, "for --tenant-mode header, not for key"),
        (TenantMode.HEADER, ["10.1.0.1/16"], True, "host bits"),
        (TenantMode.HEADER, ["gateway"], True, "a network is like 10.1.0.0/16"),
    ],
)
def test_contradictions_are_refused(
    mode: TenantMode | None, gateways: list[str], keys: bool, message: str
) -> None:
    with pytest.raises(TenancyError, match=message):
        tenancy_of(mode, gateways, keys=keys, host="0.0.0.0")
