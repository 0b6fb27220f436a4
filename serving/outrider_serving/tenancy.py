"""Whose a request is: by its key, or by what a trusted gateway says; and whose history it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from outrider_serving.settings import TenantMode
from outrider_serving.suffix.shared import keys as shared_keys

TENANT_HEADER = "x-outrider-tenant"

Network = IPv4Network | IPv6Network


class TenancyError(ValueError):
    """The options contradict each other."""


class UntrustedGatewayError(ValueError):
    """A tenant was named by one who may not."""


class TenantNameError(ValueError):
    """The name of a tenant is malformed."""


@dataclass(frozen=True, slots=True)
class Whose:
    """What a request belongs to.

    Attributes:
        tenant: shares of the engine are equal between tenants, which share no keys and values.
        history: see `engine.types.Request`.
    """

    tenant: str
    history: str | None


@dataclass(frozen=True, slots=True)
class Tenancy:
    """How tenants are told apart.

    Attributes:
        mode: whose history a request sees: that of its key's tenant, the one of all, that of the tenant which
            a trusted gateway names, or none.
        gateways: addresses whose word is taken for the name of a tenant.
    """

    mode: TenantMode
    gateways: tuple[Network, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        """Histories that will be asked for, known before anybody has asked."""
        return ("",) if self.mode is TenantMode.SINGLE else ()

    def whose(self, key_tenant: str, peer: str | None, named: str | None) -> Whose:
        """What a request belongs to.

        Args:
            key_tenant: the tenant of its key, "" where the API is open.
            peer: the address that it came from.
            named: what its header says.

        Raises:
            UntrustedGatewayError: the peer may not name it, or nobody may.
            TenantNameError: the name is malformed.
        """
        if named is not None and self.mode is not TenantMode.HEADER:
            raise UntrustedGatewayError(
                f"{TENANT_HEADER}: it names no tenant here: the tenant mode is {self.mode.value}, not header "
                "(sharedCache.tenantMode, --tenant-mode)."
            )
        match self.mode:
            case TenantMode.KEY:
                return Whose(key_tenant, key_tenant)
            case TenantMode.SINGLE:
                return Whose(key_tenant, "")
            case TenantMode.REQUEST:
                return Whose(key_tenant, None)
        if named is None:
            return Whose(key_tenant, None)
        if peer is None or not self._trusts(peer):
            raise UntrustedGatewayError(
                # Not which networks are: this may be anybody.
                f"{TENANT_HEADER}: only a trusted gateway may name the tenant, and this came from "
                f"{peer or 'an unknown address'} (sharedCache.trustedGateways, --trusted-gateways)."
            )
        if not named or not shared_keys.is_tenant(named):
            raise TenantNameError(
                f"{TENANT_HEADER}: {named[:80]!r} was given, but the name of a tenant has 1 to 253 letters, "
                "digits, '-', '_' and '.'."
            )
        return Whose(named, named)

    def _trusts(self, peer: str) -> bool:
        try:
            address = ip_address(peer)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self.gateways)


EVERYONE_APART = Tenancy(TenantMode.REQUEST)
"""Nobody sees what another request has written."""


def tenancy_of(mode: TenantMode | None, gateways: Sequence[str], *, keys: bool, host: str) -> Tenancy:
    """What the options say.

    Args:
        mode: None for what fits: by key where there are keys; one history for all where nobody else can come,
            since the server listens on loopback; else none.
        gateways: networks, as 10.0.0.0/8.
        keys: whether the API asks for keys.
        host: address that it listens on.

    Raises:
        TenancyError: they contradict each other; the message names the flag.
    """
    if mode is None:
        mode = TenantMode.KEY if keys else TenantMode.SINGLE if _is_loopback(host) else TenantMode.REQUEST
    if mode is TenantMode.KEY and not keys:
        raise TenancyError("--tenant-mode key needs --api-keys: without keys nobody is told apart")
    if (mode is TenantMode.HEADER) != bool(gateways):
        raise TenancyError(
            "--tenant-mode header needs --trusted-gateways, whose word is taken"
            if not gateways
            else f"--trusted-gateways is for --tenant-mode header, not for {mode.value}"
        )
    return Tenancy(mode, tuple(_network(text) for text in gateways))


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise TenancyError(f"--trusted-gateways: {error}; a network is like 10.1.0.0/16") from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
