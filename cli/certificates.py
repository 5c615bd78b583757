"""Self-made certificates for mutual TLS in tests, on laptops and in small installations.

Two CAs sign the certificates. Triton can require certificates of its callers, but cannot check
roles. So a separate CA signs the callers of engines, and engines accept only this CA.
"""

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sluice.certificates import CertificateError
from sluice.identity import CALLERS, DOMAIN, CertificateRole, Service, server_name

CA_DIR, PRIVATE_DIR, BUNDLE = "ca", "private", "ca.pem"
INTERNAL, ENGINE_CALLERS = "internal", "engine-callers"
_CA_DAYS = 3650
_SKEW = timedelta(minutes=5)  # tolerance for clocks that differ
_USAGE = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)
_CA_USAGE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA's certificate and the key with which it signs."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def settings_of(directory: Path, role: CertificateRole) -> dict[str, str]:
    """Return the settings with which a process uses the certificates of `create`."""
    return {
        "MTLS__CA": str(directory / CA_DIR),
        "MTLS__CERTIFICATE": str(directory / f"{role}.pem"),
        "MTLS__KEY": str(directory / f"{role}-key.pem"),
        "MTLS__ENGINE_CA": str(directory / CA_DIR / f"{ENGINE_CALLERS}.pem"),
    }


def create(
    directory: Path, *, days: int, domain: str = DOMAIN, hosts: Sequence[str] = ()
) -> list[Path]:
    """Create a certificate for each role, and missing CAs. Returns the certificates' files.

    Each file is replaced atomically, a key before its certificate.

    Args:
        directory: Directory of the files, in which only the owner can read keys.
        days: Number of days for which the certificates are valid.
        domain: Suffix of the roles' names.
        hosts: Additional names and addresses for all certificates.

    Raises:
        CertificateError: A CA exists without its key.
        OSError: Files cannot be written.
    """
    now = datetime.now(UTC)
    authorities = {name: _authority(directory, name, now) for name in (INTERNAL, ENGINE_CALLERS)}
    bundle = b"".join(_pem(authority.certificate) for authority in authorities.values())
    _write(directory / BUNDLE, bundle)
    made: list[Path] = []
    for role in CertificateRole:
        if role is CertificateRole.ENGINE:  # engines use the certificate of their agent
            continue
        name = ENGINE_CALLERS if role in CALLERS[Service.ENGINE] else INTERNAL
        roles = (role, CertificateRole.ENGINE) if role is CertificateRole.AGENT else (role,)
        names = [server_name(each, domain) for each in roles]
        certificate, key = issue(authorities[name], [*names, *hosts], now, timedelta(days=days))
        _write(directory / f"{role}-key.pem", _key_pem(key), mode=0o600)
        made.append(directory / f"{role}.pem")
        _write(made[-1], _pem(certificate))
    return made


def issue(
    authority: Authority, names: Sequence[str], now: datetime, valid: timedelta
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return a new certificate for these DNS names and addresses, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(names[0], key, now, valid)
        .issuer_name(authority.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_USAGE, critical=True)
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return certificate, key


def new_authority(name: str, now: datetime, valid: timedelta) -> Authority:
    """Return a new self-signed CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(name, key, now, valid)
    certificate = (
        builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_CA_USAGE, critical=True)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def _builder(
    name: str, key: ec.EllipticCurvePrivateKey, now: datetime, valid: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _authority(directory: Path, name: str, now: datetime) -> Authority:
    """Return the CA in a directory, after creating it if it is missing."""
    file = directory / CA_DIR / f"{name}.pem"
    key_file = directory / PRIVATE_DIR / f"{name}-key.pem"
    if file.exists() != key_file.exists():
        raise CertificateError(
            f"{directory} has only one of {file.name} and {key_file.name}: put the other one back,"
            " or choose an empty directory and give the new CAs to all processes"
        )
    if file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(
                f"{key_file} is no key of a Sluice CA; choose an empty directory"
            )
        return Authority(x509.load_pem_x509_certificate(file.read_bytes()), key)
    made = new_authority(f"Sluice {name} CA {now:%Y-%m-%d}", now, timedelta(days=_CA_DAYS))
    _write(key_file, _key_pem(made.key), mode=0o600)
    _write(file, _pem(made.certificate))
    return made


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(file: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Replace a file atomically."""
    is_secret = mode == 0o600
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if is_secret else 0o755)
    staging = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as written:
        written.write(content)
    staging.replace(file)
