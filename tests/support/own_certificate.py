"""Certificates that sign themselves, for servers of tests on 127.0.0.1."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

HOUR = timedelta(hours=1)
CERTIFICATE_HOURS = 48


def write_certificate(
    home: Path,
    ends_in: timedelta = 24 * HOUR,
    issuer: str = "test",
    curve: ec.EllipticCurve | None = None,
) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, signed by itself, and its key; return both files."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    name, of = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, it)]) for it in ("test", issuer))
    ends = datetime.now(UTC) + ends_in
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(of, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(ends - CERTIFICATE_HOURS * HOUR)
        .not_valid_after(ends)
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = home / "cert.pem", home / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.TraditionalOpenSSL
    plain = serialization.NoEncryption()
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return cert_file, key_file
