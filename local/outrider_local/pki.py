"""The node's certificates, made with openssl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider_local import addresses
from outrider_local.shell import output

_DAYS = "3650"


@dataclass(frozen=True)
class Certificate:
    """A certificate to be signed by the node's authority."""

    file: str
    subject: str
    names: tuple[str, ...] = ()


CERTIFICATES = (
    Certificate(
        "apiserver",
        "/CN=kube-apiserver",
        (
            "DNS:localhost",
            "DNS:kubernetes",
            "DNS:kubernetes.default",
            "DNS:kubernetes.default.svc",
            f"DNS:kubernetes.default.svc.{addresses.CLUSTER_DOMAIN}",
            "IP:127.0.0.1",
            f"IP:{addresses.NODE_IP}",
            f"IP:{addresses.API_SERVICE_IP}",
        ),
    ),
    Certificate(
        "kubelet-server",
        f"/O=system:nodes/CN=system:node:{addresses.NODE}",
        (f"DNS:{addresses.NODE}", f"IP:{addresses.NODE_IP}", "IP:127.0.0.1"),
    ),
    Certificate("admin", "/O=system:masters/CN=admin"),
    Certificate("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
    Certificate("controller-manager", "/CN=system:kube-controller-manager"),
    Certificate("scheduler", "/CN=system:kube-scheduler"),
    Certificate("proxy", "/CN=system:kube-proxy"),
    Certificate("kubelet", f"/O=system:nodes/CN=system:node:{addresses.NODE}"),
)


def make(folder: Path) -> None:
    """Write the authority, every certificate and the service accounts' key pair into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority, key = folder / "ca.crt", _key(folder, "ca")
    usage = "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"
    output(
        *("openssl", "req", "-x509", "-new", "-key", key, "-days", _DAYS),
        *("-subj", "/CN=outrider-ca", "-addext", usage, "-out", authority),
    )
    for certificate in CERTIFICATES:
        _sign(folder, certificate)
    output("openssl", "ec", "-in", _key(folder, "sa"), "-pubout", "-out", folder / "sa.pub")


def extensions(certificate: Certificate) -> str:
    """The X.509 extensions of a certificate, as openssl reads them from a file."""
    uses = "serverAuth,clientAuth" if certificate.names else "clientAuth"
    lines = ["basicConstraints=CA:FALSE", "keyUsage=critical,digitalSignature", f"extendedKeyUsage={uses}"]
    if certificate.names:
        lines.append("subjectAltName=" + ",".join(certificate.names))
    return "\n".join(lines) + "\n"


def _key(folder: Path, name: str) -> Path:
    path = folder / f"{name}.key"
    output("openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", path)
    path.chmod(0o600)
    return path


def _sign(folder: Path, certificate: Certificate) -> None:
    key = _key(folder, certificate.file)
    request, extra = folder / f"{certificate.file}.csr", folder / f"{certificate.file}.ext"
    extra.write_text(extensions(certificate))
    output("openssl", "req", "-new", "-key", key, "-subj", certificate.subject, "-out", request)
    output(
        *("openssl", "x509", "-req", "-in", request, "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key"),
        *("-CAcreateserial", "-days", _DAYS, "-extfile", extra, "-out", folder / f"{certificate.file}.crt"),
    )
    request.unlink()
    extra.unlink()
