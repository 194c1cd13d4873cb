"""Who is who: mutual TLS from the fleet file's ``ca``, ``cert`` and ``key``; plaintext only where nobody else listens.

A node's id is the common name of its certificate. Each end trusts the fleet's own CA and no other.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path

import grpc

from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import ConfigError, Reason, Refused


def server_credentials(config: SecurityConfig) -> grpc.ServerCredentials | None:
    """Credentials that demand a client certificate of the fleet's CA; None without TLS. Raises ``ConfigError`` for a bad file."""
    files = _read(config)
    if files is None:
        return None
    ca, cert, key = files
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=True)


def channel_credentials(config: SecurityConfig) -> grpc.ChannelCredentials | None:
    """Credentials that show this member's certificate; None without TLS. Raises ``ConfigError`` for a bad file."""
    files = _read(config)
    if files is None:
        return None
    ca, cert, key = files
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


def check_plaintext(address: str, config: SecurityConfig) -> None:
    """Raise ``ConfigError`` where talking plaintext at ``address`` (to dial or to listen on) would show it to others."""
    if config.ca is not None or config.insecure or _is_local(address):
        return
    raise ConfigError(
        f"{address} is not on this machine and security names no certificates: give security.ca, security.cert and security.key "
        "(deploy/certs.sh makes them), or security.insecure: true (--insecure) on a network that you trust"
    )


def node_id(auth_context: Mapping[str, Iterable[bytes]]) -> str | None:
    """The node id of a peer, from the authentication context of its call; None if the connection is not TLS.

    It is the certificate's common name or, where it has none, its first subject alternative name.
    Raises ``Refused(WRONG_IDENTITY)`` for a TLS peer without either.
    """
    if b"ssl" not in auth_context.get("transport_security_type", ()):
        return None
    for field in ("x509_common_name", "x509_subject_alternative_name"):
        for name in auth_context.get(field, ()):
            if name:
                return name.decode("utf-8", "replace")
    raise Refused(Reason.WRONG_IDENTITY, "the certificate has neither a common name nor a subject alternative name")


_SAID_OF_A_HANDSHAKE = {  # by gRPC, in the order looked for; and what that means
    "certificate has expired": "its certificate has expired",
    "unsupported certificate purpose": "its certificate is not a coordinator's, but a node's",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the CA in security.ca",
    "Hostname Verification": "its certificate is not for this address: dial a name that it was made for, or have it made anew",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: it was started without certificates, or another program listens there",
}


def explain(details: str, *, tls: bool) -> str:
    """What the details of a failed call say of a handshake, in words that name who must act; empty if they say nothing of one."""
    for said, meaning in _SAID_OF_A_HANDSHAKE.items():
        if said in details:
            return meaning
    if "failed to connect" in details and "Socket closed" in details:  # it hung up on the handshake
        return "it may not trust security.cert" if tls else "security here names no certificates, and it may want them"
    return ""


def _is_local(address: str) -> bool:
    """Whether only this machine can reach ``address``. A name other than localhost is not looked up: the answer may change."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(config: SecurityConfig) -> tuple[bytes, bytes, bytes] | None:
    """The bytes of ca, cert and key; the config has all three or none."""
    if config.ca is None or config.cert is None or config.key is None:
        return None
    files = _pem("ca", config.ca), _pem("cert", config.cert), _pem("key", config.key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(config.cert, config.key)
    except ssl.SSLError as error:
        raise ConfigError(f"security.key: {config.key} is not the key of {config.cert} ({error.reason})") from error
    return files


def _pem(key: str, path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"security.{key}: cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN" not in data:
        raise ConfigError(f"security.{key}: {path} is not a PEM file")
    return data
