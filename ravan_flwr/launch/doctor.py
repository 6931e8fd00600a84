"""Check a server or a device before a run: one line for each check, with what to do.

The folder of `ravan-flwr keys` determines the machine: `superlink/` is the server's, `node-0/` a
device's. The checks are independent, so one fault does not hide another.
"""

import contextlib
import importlib.metadata
import os
import pwd
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from ravan_flwr.flower_private import parse_node_config
from ravan_flwr.launch.credentials import list_hosts, load_certificate

MAX_AHEAD, MAX_BEHIND = 5, 305  # seconds of a device's clock that Flower's SuperLink allows
RENEWAL = timedelta(days=30)  # before the end of a certificate
DISK, MEMORY = 2e9, 2e9  # bytes that a run with a small model needs
SUPERLINK_ADDRESS, PROXY_ADDRESS = "127.0.0.1:8001", "localhost:8000"  # as in docs/deploy.md
OPERATOR_CALL = "/v1/control/list-runs"
_TIMEOUT = 5.0


@dataclass(frozen=True)
class Check:
    """The result of one check: whether it passed, and else what is wrong and what to do."""

    name: str
    ok: bool
    result: str

    def __str__(self) -> str:
        return f"{'ok' if self.ok else 'TO DO':6}{self.name:13}{self.result}"


def checks(folder: Path, options: Namespace) -> Iterator[Check]:
    """Yield the checks of the machine whose keys are in `folder`.

    `options` are those of the command line: None, or an empty list, where they are not given.
    """
    server = (folder / "superlink.crt").exists()
    if not server and not (folder / "ca.crt").exists():
        raise ValueError(
            f"{folder}: found neither superlink.crt nor ca.crt, expected the folder superlink/ or "
            "node-0/ of `ravan-flwr keys`; copy it here, or name the folder where it is"
        )
    yield _check("versions", _versions)
    yield from _server(folder, options) if server else _device(folder, options)
    for path in options.read:
        yield _check("read", _access, path, options.user, "readable")
    for path in options.write:
        yield _check("write", _access, path, options.user, "writable")
    yield _check("disk", _disk, options.write or [Path.home()])
    yield _check("memory", _memory)


def _check(name: str, function: Callable[..., str], *arguments: Any) -> Check:
    try:
        return Check(name, True, function(*arguments))
    except Exception as error:  # noqa: BLE001 (the checks are independent)
        return Check(name, False, " ".join(str(error).split()) or type(error).__name__)


def _device(folder: Path, options: Namespace) -> Iterator[Check]:
    environment, settings = dict[str, str](), dict[str, Any]()
    try:
        environment = _environment_file(folder)
    except (OSError, ValueError) as error:
        yield Check(
            "environment",
            False,
            f"{folder}.env cannot be read: {error}; write one NAME=VALUE a line",
        )
    address = options.superlink or environment.get("SUPERLINK")
    text = options.node_config or environment.get("NODE_CONFIG")
    yield _check("keys", _node_keys, folder)
    if address is None:
        yield Check("server", False, "its address is not known; give --superlink HOST:8000")
    else:
        yield _check("server", _answers, address, folder / "ca.crt")
        yield _check("clock", _clock, address)
    if text is None:
        yield Check("node config", False, "it is not known; give --node-config 'partition-id=...'")
        return
    yield _check("node config", _node_config, text)
    with contextlib.suppress(ValueError):  # the check above reports it
        settings = parse_node_config(text)
    if "data-path" in settings:
        path = Path(str(settings["data-path"]))
        yield _check("data-path", _access, path, options.user, "readable")
    for name in ("cache-dir", "result-path"):
        if name in settings:
            parent = Path(str(settings[name]))
            parent = parent if parent.exists() else parent.parent
            yield _check(name, _access, parent, options.user, "writable")


def _server(folder: Path, options: Namespace) -> Iterator[Check]:
    yield _check("keys", _superlink_keys, folder)
    address = options.superlink or SUPERLINK_ADDRESS
    yield _check("expiry", _not_expired, folder)
    yield _check("SuperLink", _answers, address, folder / "ca.crt")
    yield _check("proxy", _proxy, folder / "ca.crt")
    yield _check("closed", _closed, address)


def _versions() -> str:
    names = ("ravan-flwr", "flwr", "torch", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"{versions}: compare with the other machines"


def _environment_file(folder: Path) -> dict[str, str]:
    """Return the environment of the SuperNode's unit: node-0.env beside node-0/."""
    path = folder.with_name(f"{folder.name}.env")
    words = shlex.split(path.read_text(), comments=True) if path.is_file() else []
    return dict(word.split("=", 1) for word in words if "=" in word)


def _private(path: Path) -> bytes:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ValueError(f"{path}: got mode {mode:04o}, expected 0600; call chmod 600 {path}")
    return path.read_bytes()


def _check_there(folder: Path, *names: str) -> None:
    """Raise ValueError for the first file that is missing."""
    for name in names:
        if not (folder / name).exists():
            raise ValueError(
                f"{folder / name} is not there, expected the whole folder of `ravan-flwr keys`; "
                "copy the folder again"
            )


def _node_keys(folder: Path) -> str:
    _check_there(folder, "node.pub", "node.key")
    public = (folder / "node.pub").read_text().split()[:2]
    key = load_ssh_private_key(_private(folder / "node.key"), None).public_key()
    if key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode().split()[:2] != public:
        raise ValueError(
            f"{folder}: node.key and node.pub are of two pairs, expected one; copy the folder again"
        )
    return f"{folder}: node.key and node.pub are a pair"


def _superlink_keys(folder: Path) -> str:
    """Raise ValueError unless key and certificate are a pair; a connection checks the authority."""
    certificate, key = folder / "superlink.crt", folder / "superlink.key"
    _check_there(folder, key.name)
    _private(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate,
            key,
            password=lambda: b"",  # else OpenSSL asks the terminal for one
        )
    except ssl.SSLError as error:
        raise ValueError(
            f"{folder}: superlink.key is not the key of superlink.crt ({error}); copy the folder "
            "again"
        ) from None
    return f"{folder}: a pair for {', '.join(list_hosts(load_certificate(certificate)))}"


def _request(
    address: str, authority: Path | None, method: str = "GET", path: str = "/health"
) -> httpx.Response:
    """Return a server's response; ValueError if it is not reached, or not trusted.

    Without an authority every server is trusted.
    """
    host, port = _parts(address)
    try:
        trusted = authority is not None and ssl.create_default_context(cafile=str(authority))
    except OSError as error:
        raise ValueError(
            f"{authority}: got no certificate ({error}), expected PEM; copy the folder again"
        ) from None
    try:
        return httpx.request(
            method, httpx.URL(scheme="https", host=host, port=port, path=path), trust_env=False,
            verify=trusted, timeout=_TIMEOUT,
        )  # fmt: skip
    except (OSError, httpx.HTTPError) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise ValueError(
                f"{address}: {error}; expected a certificate by {authority} for {host}: copy "
                "ca.crt of the folder that the certificate was made in, set this machine's clock, "
                "or renew the certificate (docs/operating.md)"
            ) from None
        raise ValueError(
            f"{address}: {error}; expected TLS there: check the name and the port, a firewall, and "
            "that the server's programs run, nginx and the SuperLink"
        ) from None


def _parts(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r}: expected HOST:PORT, such as server.example.org:8000")
    return host.strip("[]"), int(port)


def _not_expired(folder: Path) -> str:
    end = load_certificate(folder / "superlink.crt").not_valid_after_utc
    if end < datetime.now(UTC) + RENEWAL:
        raise ValueError(f"the certificate ends on {end:%Y-%m-%d}; renew it (docs/operating.md)")
    return f"the certificate is valid until {end:%Y-%m-%d}"


def _answers(address: str, authority: Path) -> str:
    status = _request(address, authority).status_code
    if status != httpx.codes.OK:
        raise ValueError(
            f"{address} answers {status} in place of 200; start the SuperLink on the server, "
            "and read its log"
        )
    return f"the SuperLink answers at {address}, with a certificate by {authority}"


def _clock(address: str) -> str:
    """Compare this machine's clock with the server's; ValueError where Flower refuses it.

    No server is refused: by a wrong clock, a valid certificate seems to have ended.
    """
    date = _request(address, None).headers.get("Date")
    if not date:
        raise ValueError(f"{address} sends no time; compare the clocks by hand")
    ahead = time.time() - parsedate_to_datetime(date).timestamp()
    text = f"this machine's clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}"
    if not -MAX_BEHIND < ahead < MAX_AHEAD + 1:  # the header has whole seconds
        raise ValueError(
            f"{text}, expected at most {MAX_AHEAD} s ahead and {MAX_BEHIND} s behind, or its "
            "SuperNode is refused; set it by NTP, such as `timedatectl set-ntp true`"
        )
    return text


def _node_config(text: str) -> str:
    from ravan_flwr.config.node_config import read_node  # noqa: PLC0415

    node = read_node(parse_node_config(text))
    return f"partition {node.partition_id} of {node.num_partitions}"


def _access(path: Path, user: str | None, right: str) -> str:
    """Raise ValueError if the service's user lacks a right: "readable" (all files), "writable"."""
    if right == "writable" and not path.is_dir():
        raise ValueError(f"{path}: there is no such folder; make it")
    if right == "readable" and not (path.is_absolute() and path.exists()):
        raise ValueError(
            f"{path}: it is not there, expected the absolute path of a folder that is there"
        )
    depth = ["-maxdepth", "0"] if right == "writable" else []
    output = _as_user(["find", "-L", str(path), *depth, "!", f"-{right}", "-print", "-quit"], user)
    name = f"user {user}" if user else "this user"
    if output:
        raise ValueError(f"{output}: not {right} by {name}; change its owner or its mode")
    return f"{path}: {right} by {name}"


def _as_user(command: list[str], user: str | None) -> str:
    """Return the first line that a command prints as the service's user, errors included."""
    options: dict[str, Any] = {}
    if user:
        try:
            group = pwd.getpwnam(user).pw_gid
        except KeyError:
            raise ValueError(
                f"--user {user}: there is no such user; make it with useradd"
            ) from None
        options = {"user": user, "group": group, "extra_groups": os.getgrouplist(user, group)}
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except PermissionError:
        raise ValueError(f"--user {user}: call this command as root (sudo)") from None
    lines = (result.stdout + result.stderr).strip().splitlines()
    return lines[0] if lines else ""


def _disk(folders: Sequence[Path]) -> str:
    texts = []
    for folder in (*folders, Path(os.environ.get("TMPDIR", "/tmp"))):  # noqa: S108
        free = shutil.disk_usage(folder).free
        if free < DISK:
            raise ValueError(
                f"{folder}: {free / 1e9:.1f} GB are free, expected {DISK / 1e9:g}; remove old runs"
            )
        texts.append(f"{free / 1e9:.0f} GB free in {folder}")
    return ", ".join(texts)


def _memory() -> str:
    free = psutil.virtual_memory().available
    if free < MEMORY:
        raise ValueError(
            f"{free / 1e9:.1f} GB are free, expected {MEMORY / 1e9:g}; end other programs"
        )
    return f"{free / 1e9:.0f} GB free"


def _proxy(authority: Path) -> str:
    """Raise ValueError unless the reverse proxy refuses an operator's call."""
    status = _request(PROXY_ADDRESS, authority, "POST", OPERATOR_CALL).status_code
    if status != httpx.codes.NOT_FOUND:
        raise ValueError(
            f"{PROXY_ADDRESS} answers an operator's call with {status}, expected 404: devices "
            "could submit runs; use deploy/reverse-proxy.conf as it is"
        )
    return f"{PROXY_ADDRESS} refuses the calls of an operator"


def _closed(address: str) -> str:
    """Raise ValueError if the SuperLink's port is open on an address other than loopback."""
    port = _parts(address)[1]
    for addresses in psutil.net_if_addrs().values():
        for addr in addresses:
            if addr.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if addr.address.startswith("127.") or addr.address == "::1":
                continue
            with contextlib.suppress(OSError):
                socket.create_connection((addr.address, port), timeout=1).close()
                raise ValueError(
                    f"{addr.address}:{port} is open: all programs that reach it act as the "
                    "operator; start the SuperLink with --host 127.0.0.1"
                )
    return f"port {port} is closed to other machines"
