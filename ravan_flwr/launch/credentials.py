"""Make a deployment's secrets: certificate authority, the SuperLink's certificate, nodes' keys.

A folder for each machine, which is copied there as it is:

authority/  ca.key ca.crt                         stays with whoever made it
superlink/  ca.crt superlink.crt superlink.key    TLS of the SuperLink
node-0/     ca.crt node.key node.pub              what SuperNode 0 proves with who it is

All keys are on the curve P-384: those of TLS in PEM, those of nodes in OpenSSH's formats, which
`flower-supernode` and `flwr supernode register` read. What is missing is made, what exists is
never touched; a folder appears whole or not at all. Private keys need not stay: a node has its
secrets as long as its `node.pub` is here, whoever made them.
"""

import datetime
import ipaddress
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY, SUPERLINK, NODE = "authority", "superlink", "node-"
# The SuperLink's own processes find it at these names.
LOOPBACK = ("localhost", "127.0.0.1", "::1")
AUTHORITY_DAYS = 3650
SUPERLINK_DAYS = 825

_PUBLIC = {".crt", ".pub"}
_HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*\.?", re.IGNORECASE)


def make_credentials(folder: Path, hosts: Sequence[str], nodes: int) -> list[Path]:
    """Make what is missing in `folder` of the secrets of this many nodes; the new folders.

    `hosts` are the names and addresses of the SuperLink's machine; not needed once its
    certificate is there.
    """
    if nodes < 1:
        raise ValueError(f"--nodes {nodes}: expected a whole number at least 1, such as 3")
    names = _subject_names((*hosts, *LOOPBACK))
    _check_folder(folder)
    missing = _missing(folder, nodes, hosts)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in missing:
        if name == AUTHORITY:
            files = _authority()
        elif name == SUPERLINK:
            files = _superlink(folder / AUTHORITY, names)
        else:
            files = _node(folder / AUTHORITY)
        _write_folder(folder / name, files)
    return [folder / name for name in missing]


def certificate_of(path: Path) -> x509.Certificate:
    """Read the certificate in a PEM file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path}: got no certificate ({error}), expected PEM; restore it"
        ) from None


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """List the names and addresses that a certificate is for."""
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
                    "such as 192.0.2.1, without https:// and without a port; correct it"
                ) from None
            names[host.lower()] = x509.DNSName(host.lower())
        else:
            names[str(address)] = x509.IPAddress(address)
    return list(names.values())


def _check_folder(folder: Path) -> None:
    """Raise ValueError unless it is new, empty, or made by this module and whole."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: got a file, expected a folder; give another name")
    if not folder.is_dir() or all(path.name.startswith(".") for path in folder.iterdir()):
        return
    if not (folder / AUTHORITY / "ca.crt").is_file():
        raise ValueError(
            f"{folder}: it has files but no {AUTHORITY}/ca.crt, expected a folder that is new or "
            "made by this command; name another one, or restore that file"
        )
    # Private keys may be gone: to the machines that they are for, or offline.
    for path in [folder / SUPERLINK, *folder.glob(f"{NODE}*")]:
        public = "superlink.crt" if path.name == SUPERLINK else "node.pub"
        if path.exists() and not (path / public).is_file():
            raise ValueError(
                f"{path}: found no {public}, expected it there; restore it, or remove the folder "
                "to have it made anew"
            )


def _missing(folder: Path, nodes: int, hosts: Sequence[str]) -> list[str]:
    """List the folders to make, in order; ValueError if there is none or they cannot be made."""
    wanted = [AUTHORITY, SUPERLINK, *(f"{NODE}{number}" for number in range(nodes))]
    missing = [name for name in wanted if not (folder / name).exists()]
    if SUPERLINK not in missing:
        present = hosts_of(certificate_of(folder / SUPERLINK / "superlink.crt"))
        asked = {str(name.value) for name in _subject_names(hosts)}
        if other := sorted(asked - set(present)):
            raise ValueError(
                f"--host: got {', '.join(other)}, but the certificate in "
                f"{folder / SUPERLINK} is for {', '.join(present)}; remove that folder to have it "
                "made anew, or leave --host out"
            )
    elif not hosts:
        raise ValueError(
            "--host: got none, expected the name or the address at which SuperNodes reach the "
            "SuperLink; give --host NAME, once for each"
        )
    if not missing:
        raise ValueError(
            f"{folder}: it has the secrets of {nodes} nodes already, and none is overwritten; "
            "give a larger --nodes for more, or remove a node's folder to have it made anew"
        )
    return missing


def _authority() -> dict[str, bytes]:
    key, now = _new_key(), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ravan-flwr authority")])
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return {"ca.key": _pem_of(key), "ca.crt": _signed(builder, key, key.public_key())}


def _superlink(authority: Path, names: Sequence[x509.GeneralName]) -> dict[str, bytes]:
    issuer = certificate_of(authority / "ca.crt")
    signer = _signer(authority / "ca.key", issuer)
    key, now = _new_key(), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ravan-flwr SuperLink")])
    builder = _builder(issuer.subject, name, key.public_key(), now, SUPERLINK_DAYS)
    for extension, critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(digital_signature=True), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
    ):
        builder = builder.add_extension(extension, critical=critical)
    return {
        "ca.crt": (authority / "ca.crt").read_bytes(),
        "superlink.crt": _signed(builder, signer, signer.public_key()),
        "superlink.key": _pem_of(key),
    }


def _signer(path: Path, issuer: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    """Read the key of the authority, which must belong to its certificate."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
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


def _node(authority: Path) -> dict[str, bytes]:
    key = _new_key()
    return {
        "ca.crt": (authority / "ca.crt").read_bytes(),
        "node.key": key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
        "node.pub": key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        + b"\n",
    }


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _builder(
    issuer: x509.Name,
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    days: int,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # a device's clock may be behind
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder,
    signer: ec.EllipticCurvePrivateKey,
    authority: ec.EllipticCurvePublicKey,
) -> bytes:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority)
    certificate = builder.add_extension(identifier, critical=False).sign(signer, hashes.SHA384())
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_usage(
    *, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False
) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write beside, flush to disk, then rename; fails if the folder has come meanwhile."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(mode=0o700)
    try:
        for name, data in files.items():
            mode = 0o644 if Path(name).suffix in _PUBLIC else 0o600
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(temporary / name, flags, mode), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
