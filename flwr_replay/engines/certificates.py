"""Certificates for TLS and keys of SuperNodes, as Flower reads them.

    ca.crt       every place needs it; it is no secret
    server.crt   the SuperLink's certificate, which names the addresses that it is reached by
    server.key   the SuperLink's private key

The key that signs is thrown away at once, so nobody can sign a second server with it. A new address needs new files.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from flwr_replay.files.atomic import private_folder, write_atomic

__all__ = ["CA", "SERVER", "SERVER_KEY", "write_certificates", "write_key"]

CA, SERVER, SERVER_KEY = "ca.crt", "server.crt", "server.key"
EARLIER = timedelta(hours=1)  # for clocks that are behind


def write_certificates(folder: Path, hosts: Sequence[str], days: int) -> datetime:
    """Make a certificate authority and the server's certificate, and write them into a folder of their owner's.

    The server is reached by these hosts, IP addresses or names. Returns when the certificates end, UTC.
    """
    ca_key, key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    begins = datetime.now(UTC) - EARLIER
    ends = begins + timedelta(days=days)
    ca_name, name = _name("study CA"), _name("study SuperLink")
    base = x509.CertificateBuilder().issuer_name(ca_name).not_valid_before(begins).not_valid_after(ends)
    issuer = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        base.subject_name(ca_name)
        .public_key(ca_key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(issuer, critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    server = (
        base.subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    private_folder(folder)
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    write_atomic(folder / SERVER_KEY, pem)
    write_atomic(folder / SERVER, server.public_bytes(serialization.Encoding.PEM))
    write_atomic(folder / CA, ca.public_bytes(serialization.Encoding.PEM))
    return ends


def write_key(path: Path) -> None:
    """Make a SuperNode's key pair as `ssh-keygen -t ecdsa -b 384` does: `path`, its owner's only, and `path`.pub."""
    key = ec.generate_private_key(ec.SECP384R1())
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, plain)
    write_atomic(path, pem)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_atomic(path.with_name(f"{path.name}.pub"), public + b"\n")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
