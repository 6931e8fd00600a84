"""`ravan-flwr doctor`: a correct machine, and several faults at once, each with advice."""

import grp
import http.server
import os
import pwd
import shutil
import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate
from types import SimpleNamespace

import psutil
import pytest

from ravan_flwr.cli import main
from ravan_flwr.launch import credentials, doctor
from ravan_flwr.launch.credentials import make_credentials
from tests.commands import error_of


class Server:
    """Serve a health page over TLS, a proxy's refusals, and a clock."""

    def __init__(self, keys, status=200, ahead=0.0, refuses=404):
        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self, code):
                self.send_response_only(code)
                self.send_header("Date", formatdate(time.time() + ahead, usegmt=True))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self):
                self.answer(status)

            def do_POST(self):
                self.answer(refuses)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys / "superlink.crt", keys / "superlink.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.server.handle_error = self.ignore  # type: ignore[method-assign]
        self.port = self.server.server_address[1]

    def ignore(self, *_):
        """Print nothing about a client that does not trust this certificate."""

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def keys(tmp_path):
    make_credentials(tmp_path / "keys", ["127.0.0.1"], 1)
    return tmp_path / "keys"


@pytest.fixture
def other(tmp_path):
    make_credentials(tmp_path / "other", ["127.0.0.1"], 1)
    return tmp_path / "other"


def here(server):
    return f"127.0.0.1:{server.port}"


@pytest.fixture
def plenty(monkeypatch):
    monkeypatch.setattr(doctor, "DISK", 0)
    monkeypatch.setattr(doctor, "MEMORY", 0)


def checks_of(capsys, *arguments):
    """Run the command; return check -> (ok, text), and its exit status."""
    status = 0
    try:
        main(["doctor", *map(str, arguments)])
    except SystemExit as ended:
        status = int(str(ended.code))
    lines = capsys.readouterr().out.splitlines()
    checks = {line[6:19].strip(): (line.startswith("ok"), line[19:]) for line in lines}
    assert len(checks) == len(lines)
    return checks, status


def test_a_correct_device_passes_all_checks(keys, tmp_path, capsys, plenty):
    (tmp_path / "data").mkdir()
    with Server(keys / "superlink") as server:
        (keys / "node-0.env").write_text(
            f"SUPERLINK={here(server)}\n"
            f'NODE_CONFIG=\'partition-id=0 num-partitions=3 data-path="{tmp_path}/data" '
            f'result-path="{tmp_path}/results"\'\n'
        )
        checks, status = checks_of(capsys, keys / "node-0")
    assert [name for name, (ok, _) in checks.items() if not ok] == []
    assert status == 0
    assert {"server", "clock", "data-path", "result-path"} < set(checks)
    assert checks["node config"][1] == "partition 0 of 3"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_wrong_or_encrypted_key_of_a_certificate_is_reported(keys, other):
    folder = keys / "superlink"
    key = folder / "superlink.key"
    plain = key.rename(keys / "plain.key")
    shutil.copy(other / "superlink" / "superlink.key", folder)
    check = doctor._check("keys", doctor._superlink_keys, folder)
    assert not check.ok
    assert "superlink.key is not the key of superlink.crt" in check.result
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", plain, "-out", key]
    subprocess.run(command, check=True)
    assert not doctor._check("keys", doctor._superlink_keys, folder).ok


@pytest.mark.parametrize(
    ("machine", "name", "check"),
    [
        ("node-0", "node.key", doctor._node_keys),
        ("node-0", "node.pub", doctor._node_keys),
        ("superlink", "superlink.key", doctor._superlink_keys),
    ],
)
def test_a_missing_key_is_reported_with_what_to_do(machine, name, check, keys):
    (keys / machine / name).unlink()
    result = doctor._check("keys", check, keys / machine)
    assert not result.ok
    assert f"{machine}/{name} is not there" in result.result
    assert "copy the folder again" in result.result


def test_a_certificate_of_another_authority_is_reported(keys, other, capsys, plenty):
    """Both authorities have the same name."""
    folder = keys / "superlink"
    shutil.copy(other / "superlink" / "ca.crt", folder)
    with Server(folder) as server:
        checks, _ = checks_of(capsys, folder, "--superlink", here(server))
    assert checks["keys"][0]
    assert not checks["SuperLink"][0]
    assert "copy ca.crt" in checks["SuperLink"][1]


@pytest.mark.parametrize("content", [None, "", "no certificate\n"])
def test_a_missing_or_damaged_authority_is_no_fault_of_the_network(keys, content, capsys, plenty):
    path = keys / "superlink" / "ca.crt"
    path.unlink()
    if content is not None:
        path.write_text(content)
    checks, _ = checks_of(capsys, keys / "superlink", "--superlink", f"127.0.0.1:{free_port()}")
    for name in ("SuperLink", "proxy"):
        assert not checks[name][0]
        assert f"{path}: got no certificate" in checks[name][1]
        assert "firewall" not in checks[name][1]


def test_an_unreadable_node_config_does_not_stop_other_checks(keys, capsys):
    (keys / "node-0.env").write_text('NODE_CONFIG="partition-id=0\n')
    config = "partition-id=0 num-partitions=2 data-path=/srv/data"
    arguments = ["--superlink", "127.0.0.1:1", "--node-config", config]
    checks, status = checks_of(capsys, keys / "node-0", *arguments)
    assert status == 1
    assert "expected KEY=VALUE pairs, with texts in quotation marks" in checks["node config"][1]
    assert "cannot be read: No closing quotation" in checks["environment"][1]
    assert "memory" in checks


def test_all_faults_of_a_device_are_reported(keys, other, tmp_path, capsys, monkeypatch):
    shutil.copy(other / "node-0" / "node.pub", keys / "node-0")
    monkeypatch.setattr(doctor, "DISK", 1e18)
    monkeypatch.setattr(doctor, "MEMORY", 1e18)
    with Server(keys / "superlink", status=502, ahead=-10) as server:
        monkeypatch.setattr(doctor, "_TIMEOUT", 1.0)
        checks, status = checks_of(
            capsys, keys / "node-0", "--superlink", here(server), "--node-config",
            f'partition-id=0 num-partitions=3 data-pth="/x" '
            f'data-path="{tmp_path}/nowhere" result-path="{tmp_path}/no/where"',
        )  # fmt: skip
    assert status == 1
    found = {name: text for name, (ok, text) in checks.items() if not ok}
    for name, words in {
        "keys": ("node.key and node.pub", "copy the folder again"),
        "server": ("answers 502", "start the SuperLink"),
        "clock": ("s ahead", "NTP"),
        "node config": ("data-pth", "change it"),
        "data-path": ("it is not there", "expected the absolute path"),
        "result-path": ("there is no such folder", "make it"),
        "disk": ("are free", "remove old runs"),
        "memory": ("are free", "end other programs"),
    }.items():
        text = found.pop(name)
        assert all(one in text for one in words), name
    assert found == {}


@pytest.mark.parametrize(
    ("fault", "words", "advice"),
    [
        ("authority", "unable to get local issuer certificate", "copy ca.crt"),
        ("names", "not valid for '127.0.0.1'", "renew the certificate"),
        ("end", "certificate has expired", "renew the certificate"),
    ],
)
def test_a_fault_of_the_servers_certificate_is_reported(
    fault, words, advice, tmp_path, other, capsys, monkeypatch, plenty
):
    keys = tmp_path / "keys"
    if fault == "names":
        monkeypatch.setattr(credentials, "LOOPBACK", ())
    if fault == "end":
        monkeypatch.setattr(credentials, "SUPERLINK_DAYS", -0.5)  # valid since a day ago
    make_credentials(keys, ["server.example.org"], 1)
    if fault == "authority":
        shutil.copy(other / "authority" / "ca.crt", keys / "node-0")
    with Server(keys / "superlink") as server:
        checks, status = checks_of(capsys, keys / "node-0", "--superlink", here(server))
    assert status == 1
    ok, text = checks["server"]
    assert not ok
    for part in (words, advice, "set this machine's clock"):
        assert part in text
    assert checks["keys"][0]
    assert checks["clock"][0]  # is compared in any case


def test_a_certificate_that_ends_soon_is_reported_on_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(credentials, "SUPERLINK_DAYS", 29)
    make_credentials(tmp_path, ["server.example.org"], 1)
    with pytest.raises(ValueError, match=r"the certificate ends on .*; renew it"):
        doctor._not_expired(tmp_path / "superlink")


@pytest.mark.parametrize("address", ["server", "127.0.0.1:99999"])
def test_an_invalid_address_does_not_stop_other_checks(address, keys, capsys, plenty):
    (keys / "node-0.env").write_text(f"SUPERLINK={address}\nNODE_CONFIG='partition-id=0'\n")
    checks, status = checks_of(capsys, keys / "node-0")
    assert status == 1
    assert not checks["server"][0]
    assert checks["server"][1].startswith(f"{address!r}: expected HOST:PORT")
    assert not checks["node config"][0]  # num-partitions is missing
    assert checks["keys"][0]


@pytest.mark.parametrize("address", ["::1:1", "[::1]:1"])
def test_an_ipv6_address_needs_no_brackets(address, tmp_path):
    make_credentials(tmp_path, ["::1"], 1)
    with pytest.raises(ValueError, match="a firewall"):  # no process listens at port 1
        doctor._request(address, tmp_path / "authority" / "ca.crt")


def test_wrong_permissions_of_files_and_folders_are_reported(keys, tmp_path, capsys, plenty):
    (keys / "node-0" / "node.key").chmod(0o644)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    user = ["--user", "nobody"] if os.getuid() == 0 else []
    arguments = ["--superlink", f"127.0.0.1:{free_port()}", "--read", closed, *user]
    checks, _ = checks_of(capsys, keys / "node-0", *arguments)
    closed.chmod(0o700)
    assert "got mode 0644, expected 0600; call chmod 600" in checks["keys"][1]
    assert not checks["read"][0]
    assert not checks["server"][0]
    assert "a firewall" in checks["server"][1]
    assert "--node-config" in checks["node config"][1]


def test_a_cache_is_a_folder_to_write_to(keys, tmp_path, capsys, plenty):
    """Examples are encoded into it, and it is made where it is missing."""
    (tmp_path / "open").mkdir()
    user = ["--user", "nobody"] if os.getuid() == 0 else []
    for path, ok in ((tmp_path / "open", True), (tmp_path / "new", True), ("/proc/self", False)):
        settings = f'partition-id=0 num-partitions=1 cache-dir="{path}"'
        checks, _ = checks_of(
            capsys, keys / "node-0", "--node-config", settings, *(user if not ok else [])
        )
        assert checks["cache-dir"][0] == ok, path


def test_a_user_has_the_groups_of_the_system(monkeypatch):
    """Some users have no group of their own name, and were called no users at all."""
    asked = []

    def run(command, *, user, group, extra_groups, **_):
        asked.append((user, group, {group, *extra_groups}))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    for entry in pwd.getpwall():
        doctor._as_user(["true"], entry.pw_name)
        user, group, groups = asked.pop()
        named = {one.gr_gid for one in grp.getgrall() if entry.pw_name in one.gr_mem}
        assert (user, group) == (entry.pw_name, entry.pw_gid)
        assert groups == {entry.pw_gid, *named}
    with pytest.raises(ValueError, match="there is no such user"):
        doctor._as_user(["true"], "no-such-user")


def test_a_file_is_no_folder_to_write_to(keys, tmp_path, capsys, plenty, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for path, ok in ((tmp_path / "file", False), ("runs", True)):
        checks, _ = checks_of(capsys, keys / "node-0", "--write", path)
        assert checks["write"][0] == ok


def test_the_servers_folder_is_checked(keys, capsys, monkeypatch, plenty):
    folder = keys / "superlink"
    with Server(folder) as one, Server(folder) as proxy:
        monkeypatch.setattr(doctor, "PROXY_ADDRESS", f"localhost:{proxy.port}")
        checks, status = checks_of(capsys, folder, "--superlink", here(one))
    assert status == 0, checks
    assert {"SuperLink", "proxy", "closed"} < set(checks)
    with Server(folder, refuses=415) as bare:  # a SuperLink accepts such calls
        monkeypatch.setattr(doctor, "PROXY_ADDRESS", f"localhost:{bare.port}")
        checks, status = checks_of(capsys, folder, "--superlink", f"127.0.0.1:{free_port()}")
    assert status == 1
    assert "devices could submit runs" in checks["proxy"][1]
    assert not checks["SuperLink"][0]


def test_an_exposed_superlink_port_is_reported(monkeypatch):
    ours = SimpleNamespace(family=socket.AF_INET, address="0.0.0.0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [ours]})
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        with pytest.raises(ValueError, match="act as the operator"):
            doctor._closed(f"127.0.0.1:{one.getsockname()[1]}")
    port = free_port()  # no process listens
    assert doctor._closed(f"127.0.0.1:{port}") == f"port {port} is closed to other machines"


def test_an_unknown_folder_is_refused(tmp_path, capsys):
    assert "found neither superlink.crt nor ca.crt" in error_of(capsys, "doctor", tmp_path)
