from __future__ import annotations

import shutil
import stat
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from helpers.certificates import certs, make_ca, security

from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.security import channel_credentials, check_plaintext, node_id, server_credentials

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ca(
        tmp_path_factory.mktemp("certs"),
        "edge-1",
        "site_b.2",
        hosts=("localhost", "127.0.0.1", "::1", "fleet.example"),
        server="west",
    )


# ---- plaintext --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "127.8.9.10:1", "[::1]:7070", "localhost:7070", "unix:/run/fleet.sock"])
def test_plaintext_is_fine_where_only_this_machine_listens(address: str) -> None:
    check_plaintext(address, SecurityConfig())


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:7070",
        "10.0.0.1:7070",
        "[::]:7070",
        "fleet.example:7070",
        "localhost.example:7070",
        "128.0.0.1:1",
        "127.0.0.1.nip.io:1",
    ],
)
def test_plaintext_is_refused_elsewhere(address: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_plaintext(address, SecurityConfig())
    for word in (address, "security.ca", "certs.sh", "insecure: true"):
        assert word in str(raised.value)


def test_plaintext_elsewhere_can_be_asked_for() -> None:
    check_plaintext("10.0.0.1:7070", SecurityConfig(insecure=True))


@needs_openssl
def test_tls_is_fine_everywhere(ca: Path) -> None:
    check_plaintext("10.0.0.1:7070", security(ca, "edge-1"))


# ---- credentials ------------------------------------------------------------------------------------------------------------


def test_no_files_no_credentials() -> None:
    assert server_credentials(SecurityConfig()) is None
    assert channel_credentials(SecurityConfig(insecure=True)) is None


@needs_openssl
def test_files_give_credentials(ca: Path) -> None:
    assert server_credentials(security(ca, "coordinator")) is not None
    assert channel_credentials(security(ca, "edge-1")) is not None


@needs_openssl
def test_a_bad_file_is_named(ca: Path, tmp_path: Path) -> None:
    good = security(ca, "edge-1")
    missing = good.model_copy(update={"key": tmp_path / "none.key"})
    with pytest.raises(ConfigError, match=r"security\.key: cannot read .*none\.key: No such file"):
        channel_credentials(missing)
    (tmp_path / "junk.pem").write_bytes(b"\x30\x82")
    junk = good.model_copy(update={"ca": tmp_path / "junk.pem"})
    with pytest.raises(ConfigError, match=r"security\.ca: .*junk\.pem is not a PEM file"):
        server_credentials(junk)


@needs_openssl
def test_a_key_that_is_not_the_certificates_is_named(ca: Path) -> None:
    mixed = security(ca, "edge-1").model_copy(update={"key": ca / "coordinator.key"})
    for make in (channel_credentials, server_credentials):
        with pytest.raises(ConfigError, match=r"security\.key: .*coordinator\.key is not the key of .*edge-1\.pem"):
            make(mixed)


# ---- who the peer is --------------------------------------------------------------------------------------------------------


def test_the_common_name_is_the_node_id() -> None:
    context = {
        "transport_security_type": [b"ssl"],
        "x509_common_name": [b"edge-1"],
        "x509_subject_alternative_name": [b"other"],
    }
    assert node_id(context) == "edge-1"


def test_without_a_common_name_the_first_alternative_name_is() -> None:
    context = {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": [b"edge-1", b"edge-2"]}
    assert node_id(context) == "edge-1"


def test_a_nameless_certificate_is_nobody() -> None:
    with pytest.raises(Refused) as raised:
        node_id({"transport_security_type": [b"ssl"], "x509_common_name": [b""]})
    assert raised.value.reason is Reason.WRONG_IDENTITY


@pytest.mark.parametrize("context", [{}, {"transport_security_type": [b"insecure"], "x509_common_name": [b"edge-1"]}])
def test_a_plaintext_peer_has_no_identity(context: dict[str, list[bytes]]) -> None:
    assert node_id(context) is None


# ---- certs.sh ---------------------------------------------------------------------------------------------------------------


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@needs_openssl
@pytest.mark.parametrize("node", ["edge-1", "site_b.2"])
def test_a_nodes_certificate(ca: Path, node: str) -> None:
    certificate, authority = read(ca / f"{node}.pem"), read(ca / "ca.pem")
    certificate.verify_directly_issued_by(authority)
    assert [a.value for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [node]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]  # a stolen device cannot play the coordinator
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == timedelta(days=825)


@needs_openssl
def test_the_coordinators_certificate(ca: Path) -> None:
    certificate = read(ca / "coordinator.pem")
    certificate.verify_directly_issued_by(read(ca / "ca.pem"))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fleet.example"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1"), ip_address("::1")]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]


@needs_openssl
def test_the_certificate_of_a_node_that_others_dial(ca: Path) -> None:
    certificate = read(ca / "west.pem")
    certificate.verify_directly_issued_by(read(ca / "ca.pem"))
    assert [a.value for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["west"]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fleet.example"]
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


@needs_openssl
def test_keys_are_private_and_nothing_is_overwritten(ca: Path) -> None:
    keys = sorted(ca.glob("*.key"))
    assert [k.stem for k in keys] == ["ca", "coordinator", "edge-1", "site_b.2", "west"]
    assert {stat.S_IMODE(k.stat().st_mode) for k in keys} == {0o600}
    before = {p: p.read_bytes() for p in ca.iterdir()}
    for arguments in (("ca", ca), ("coordinator", ca, "localhost"), ("node", ca, "edge-1")):
        result = certs(*arguments)
        assert result.returncode != 0
        assert "exists already" in result.stderr
    assert {p: p.read_bytes() for p in ca.iterdir()} == before


@needs_openssl
@pytest.mark.parametrize("node", ["", "-x", "a/b", "a b", "x" * 65, "ca", "coordinator", "a,CN=b"])
def test_bad_node_names_are_refused(ca: Path, node: str) -> None:
    before = sorted(ca.iterdir())
    for arguments in (("node", ca, node), ("server", ca, node, "localhost")):
        result = certs(*arguments)
        assert result.returncode == 1
        assert node in result.stderr
    assert sorted(ca.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [(), ("ca",), ("node", "here"), ("coordinator", "here"), ("server", "here", "west"), ("ca", "here", "more"), ("x", "here")],
)
def test_usage(arguments: tuple[str, ...]) -> None:
    result = certs(*arguments)
    assert result.returncode == 2
    assert "usage: certs.sh ca DIR" in result.stderr


@needs_openssl
def test_a_ca_comes_first(tmp_path: Path) -> None:
    result = certs("node", tmp_path, "edge-1")
    assert result.returncode == 1
    assert "there is no CA" in result.stderr
    assert list(tmp_path.iterdir()) == []
