"""Make a deployment's secrets: certificate authority, the SuperLink's certificate, nodes' keys.

Each machine has a folder, which is copied there unchanged:

authority/  ca.key ca.crt                         stays on the machine where it was made
superlink/  ca.crt superlink.crt superlink.key    TLS of the SuperLink
node-0/     ca.crt node.key node.pub              authenticates SuperNode 0

All keys are on the curve P-384: those of TLS in PEM, those of nodes in OpenSSH's formats, which
`flower-supernode` and `flwr supernode register` read. Missing folders are made, existing ones are
never changed; a folder is written whole or not at all. Private keys may be moved away: a node whose
`node.pub` is here counts as made.
"""

import datetime
import ipaddress
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ravan_flwr.files import write_atomically

AUTHORITY, SUPERLINK, NODE = "authority", "superlink", "node-"
# Names at which the SuperLink's processes connect to it.
LOOPBACK = ("localhost", "127.0.0.1", "::1")
AUTHORITY_DAYS = 3650
SUPERLINK_DAYS = 825

_PUBLIC = {AUTHORITY: "ca.crt", SUPERLINK: "superlink.crt"}  # a folder's public file
_HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*\.?", re.IGNORECASE)
_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def make_credentials(folder: Path, hosts: Sequence[str], nodes: int) -> list[Path]:
    """Make the missing secrets of a deployment with this many nodes; return the new folders.

    `hosts` are the names and addresses of the SuperLink's machine. They are not needed once its
    certificate exists.
    """
    if nodes < 1:
        raise ValueError(f"--nodes {nodes}: expected a whole number at least 1, such as 3")
    names = _subject_names((*hosts, *LOOPBACK))
    missing = _missing(folder, nodes, hosts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in missing:
        if name == AUTHORITY:
            files = _authority()
        else:
            files = {"ca.crt": (folder / AUTHORITY / "ca.crt").read_bytes()}
            files |= _superlink(folder / AUTHORITY, names) if name == SUPERLINK else _node()
        _write_folder(folder / name, files)
    return [folder / name for name in missing]


def load_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a PEM file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path}: got no certificate ({error}), expected PEM; restore it"
        ) from None


def list_hosts(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that a certificate is for."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in extension.value]


def _subject_names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    names: dict[str, x509.GeneralName] = {}
    for host in hosts:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"--host {host!r}: expected a name such as server.example.org or an address "
                    "such as 192.0.2.1, without https:// and without a port"
                ) from None
            names[host.lower()] = x509.DNSName(host.lower())
        else:
            names[str(address)] = x509.IPAddress(address)
    return list(names.values())


def _missing(folder: Path, nodes: int, hosts: Sequence[str]) -> list[str]:
    """Return the names of the folders to make, in order; ValueError if they cannot be made."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: got a file, expected a folder; give another name")
    files = [path.name for path in folder.glob("*") if not path.name.startswith(".")]
    if files and not (folder / AUTHORITY / "ca.crt").is_file():
        raise ValueError(
            f"{folder}: it has files but no {AUTHORITY}/ca.crt, expected a folder that is new or "
            "made by this command; name another one, or restore that file"
        )
    # Private keys may have been moved to their machines, or offline.
    for name in files:
        public = _PUBLIC.get(name, "node.pub")
        if (name in _PUBLIC or name.startswith(NODE)) and not (folder / name / public).is_file():
            raise ValueError(
                f"{folder / name}: found no {public}, expected it there; restore it, or remove the "
                "folder to have it made anew"
            )
    names = [AUTHORITY, SUPERLINK, *(f"{NODE}{number}" for number in range(nodes))]
    missing = [name for name in names if name not in files]
    if SUPERLINK in files:
        present = list_hosts(load_certificate(folder / SUPERLINK / "superlink.crt"))
        host_names = {str(name.value) for name in _subject_names(hosts)}
        if lacking := sorted(host_names - set(present)):
            raise ValueError(
                f"--host: got {', '.join(lacking)}, but the certificate in "
                f"{folder / SUPERLINK} is for {', '.join(present)}; remove that folder to have it "
                "made anew, or leave --host out"
            )
    elif not hosts:
        raise ValueError(
            "--host: got none, expected the name or the address at which SuperNodes reach the "
            "SuperLink; give --host NAME, once for each"
        )
    return missing


def _authority() -> dict[str, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = _named("ravan-flwr authority")
    certificate = _certificate(
        name, key.public_key(), AUTHORITY_DAYS, (name, key),
        x509.BasicConstraints(ca=True, path_length=0), "key_cert_sign", "crl_sign",
    )  # fmt: skip
    return {"ca.key": _private(key, PrivateFormat.PKCS8), "ca.crt": certificate}


def _superlink(authority: Path, names: Sequence[x509.GeneralName]) -> dict[str, bytes]:
    issuer = load_certificate(authority / "ca.crt")
    key = ec.generate_private_key(ec.SECP384R1())
    certificate = _certificate(
        _named("ravan-flwr SuperLink"), key.public_key(), SUPERLINK_DAYS,
        (issuer.subject, _signer(authority / "ca.key", issuer)),
        x509.BasicConstraints(ca=False, path_length=None), "digital_signature",
        extensions=[
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
            x509.SubjectAlternativeName(names),
        ],
    )  # fmt: skip
    return {"superlink.crt": certificate, "superlink.key": _private(key, PrivateFormat.PKCS8)}


def _node() -> dict[str, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return {"node.key": _private(key, PrivateFormat.OpenSSH), "node.pub": public + b"\n"}


def _signer(path: Path, issuer: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    """Return the private key of the authority; ValueError unless it belongs to its certificate."""
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: it cannot be read as a key ({error}), expected the one that ca.crt was made "
            "with, to sign the SuperLink's certificate; put it back"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != issuer.public_key():
        raise ValueError(
            f"{path}: got the key of another authority, expected that of ca.crt beside it; put it "
            "back"
        )
    return key


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey],
    constraints: x509.BasicConstraints,
    *usages: str,
    extensions: Sequence[x509.ExtensionType] = (),
) -> bytes:
    """Return a certificate in PEM, signed by the issuer's key."""
    now, (name, signer) = datetime.datetime.now(datetime.UTC), issuer
    builder = (
        x509.CertificateBuilder(name, subject, key, x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # a device's clock may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(constraints, critical=True)
        .add_extension(x509.KeyUsage(**{use: use in usages for use in _USAGES}), critical=True)
    )
    for extension in (
        x509.SubjectKeyIdentifier.from_public_key(key),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
        *extensions,
    ):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder atomically; OSError if it exists by then."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(mode=0o700)
    try:
        for name, data in files.items():
            mode = 0o600 if name.endswith(".key") else 0o644
            write_atomically(temporary / name, data, mode)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
