"""`ravan-flwr doctor`: a correct machine, and several faults at once, each with advice."""

import http.server
import os
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
def plenty(monkeypatch):
    monkeypatch.setattr(doctor, "DISK", 0)
    monkeypatch.setattr(doctor, "MEMORY", 0)


def checks_of(capsys, *arguments):
    """Run the command; return check -> (ok, text), and its exit status."""
    try:
        main(["doctor", *map(str, arguments)])
        status = 0
    except SystemExit as ended:
        status = int(str(ended.code))
    lines = capsys.readouterr().out.splitlines()
    checks = {line[6:19].strip(): (line.startswith("ok"), line[19:]) for line in lines}
    assert len(checks) == len(lines)
    return checks, status


def test_a_correct_device_passes_all_checks(tmp_path, capsys, plenty):
    keys = tmp_path / "keys"
    make_credentials(keys, ["127.0.0.1"], 1)
    (tmp_path / "data").mkdir()
    with Server(keys / "superlink") as server:
        (keys / "node-0.env").write_text(
            f"SUPERLINK=127.0.0.1:{server.port}\n"
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


def test_a_key_of_another_certificate_is_reported(tmp_path):
    for name in ("keys", "other"):
        make_credentials(tmp_path / name, ["server.example.org"], 1)
    folder = tmp_path / "keys" / "superlink"
    shutil.copy(tmp_path / "other" / "superlink" / "superlink.key", folder)
    check = doctor._check("keys", doctor._superlink_keys, folder)
    assert not check.ok
    assert "superlink.key is not the key of superlink.crt" in check.result


def test_a_certificate_of_another_authority_is_reported(tmp_path, capsys, plenty):
    """Both authorities have the same name."""
    for name in ("keys", "other"):
        make_credentials(tmp_path / name, ["127.0.0.1"], 1)
    folder = tmp_path / "keys" / "superlink"
    shutil.copy(tmp_path / "other" / "superlink" / "ca.crt", folder)
    with Server(folder) as server:
        checks, _ = checks_of(capsys, folder, "--superlink", f"127.0.0.1:{server.port}")
    assert checks["keys"][0]
    assert not checks["SuperLink"][0]
    assert "copy ca.crt of the folder that the certificate was made in" in checks["SuperLink"][1]


def test_an_unreadable_node_config_does_not_stop_other_checks(tmp_path, capsys):
    make_credentials(tmp_path / "keys", ["server.example.org"], 1)
    node = tmp_path / "keys" / "node-0"
    node.with_name("node-0.env").write_text('NODE_CONFIG="partition-id=0\n')
    config = "partition-id=0 num-partitions=2 data-path=/srv/data"
    checks, status = checks_of(capsys, node, "--superlink", "127.0.0.1:1", "--node-config", config)
    assert status == 1
    assert "expected KEY=VALUE pairs, with texts in quotation marks" in checks["node config"][1]
    assert "cannot be read: No closing quotation" in checks["environment"][1]
    assert "memory" in checks


def test_all_faults_of_a_device_are_reported(tmp_path, capsys, monkeypatch, plenty):
    keys, other = tmp_path / "keys", tmp_path / "other"
    make_credentials(other, ["server.example.org"], 1)
    make_credentials(keys, ["server.example.org"], 1)
    shutil.copy(other / "node-0" / "node.pub", keys / "node-0")
    monkeypatch.setattr(doctor, "DISK", 1e18)
    monkeypatch.setattr(doctor, "MEMORY", 1e18)
    with Server(keys / "superlink", status=502, ahead=-10) as server:
        monkeypatch.setattr(doctor, "_TIMEOUT", 1.0)
        checks, status = checks_of(
            capsys, keys / "node-0", "--superlink", f"127.0.0.1:{server.port}",
            "--node-config",
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
        assert words[0] in text, name
        assert words[1] in text, name
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
    fault, words, advice, tmp_path, capsys, monkeypatch, plenty
):
    keys, other = tmp_path / "keys", tmp_path / "other"
    make_credentials(other, ["server.example.org"], 1)
    if fault == "names":
        monkeypatch.setattr(credentials, "LOOPBACK", ())
    if fault == "end":
        monkeypatch.setattr(credentials, "SUPERLINK_DAYS", -0.5)  # valid since a day ago
    make_credentials(keys, ["server.example.org"], 1)
    if fault == "authority":
        shutil.copy(other / "authority" / "ca.crt", keys / "node-0")
    with Server(keys / "superlink") as server:
        address = f"127.0.0.1:{server.port}"
        checks, status = checks_of(capsys, keys / "node-0", "--superlink", address)
    assert status == 1
    ok, text = checks["server"]
    assert not ok
    assert words in text
    assert advice in text
    assert "set this machine's clock" in text
    assert checks["keys"][0]
    assert checks["clock"][0]  # is compared in any case


def test_a_certificate_that_ends_soon_is_reported_on_the_server(tmp_path, monkeypatch):
    monkeypatch.setattr(credentials, "SUPERLINK_DAYS", 29)
    make_credentials(tmp_path, ["server.example.org"], 1)
    with pytest.raises(ValueError, match=r"the certificate ends on .*; renew it"):
        doctor._not_expired(tmp_path / "superlink")


def test_an_invalid_address_does_not_stop_other_checks(tmp_path, capsys, plenty):
    make_credentials(tmp_path / "keys", ["127.0.0.1"], 1)
    env = tmp_path / "keys" / "node-0.env"
    env.write_text("SUPERLINK=server\nNODE_CONFIG='partition-id=0'\n")
    checks, status = checks_of(capsys, tmp_path / "keys" / "node-0")
    assert status == 1
    assert checks["server"] == (
        False,
        "'server': expected HOST:PORT, such as server.example.org:8000",
    )
    assert not checks["node config"][0]  # num-partitions is missing
    assert checks["keys"][0]


def test_an_invalid_port_is_reported(tmp_path, capsys, plenty):
    make_credentials(tmp_path / "keys", ["127.0.0.1"], 1)
    env = tmp_path / "keys" / "node-0.env"
    env.write_text("SUPERLINK=127.0.0.1:99999\nNODE_CONFIG='x=0'\n")
    checks, _ = checks_of(capsys, tmp_path / "keys" / "node-0")
    assert checks["server"][1].startswith("'127.0.0.1:99999': expected HOST:PORT")


@pytest.mark.parametrize("address", ["::1:1", "[::1]:1"])
def test_an_ipv6_address_needs_no_brackets(address, tmp_path):
    make_credentials(tmp_path, ["::1"], 1)
    with pytest.raises(ValueError, match="a firewall"):  # no process listens at port 1
        doctor._request(address, tmp_path / "authority" / "ca.crt")


def test_wrong_permissions_of_files_and_folders_are_reported(tmp_path, capsys, plenty):
    keys = tmp_path / "keys"
    make_credentials(keys, ["127.0.0.1"], 1)
    (keys / "node-0" / "node.key").chmod(0o644)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o000)
    user = ["--user", "nobody"] if os.getuid() == 0 else []
    checks, _ = checks_of(
        capsys, keys / "node-0", "--superlink", f"127.0.0.1:{free_port()}",
        "--read", closed, *user,
    )  # fmt: skip
    closed.chmod(0o700)
    assert "got mode 0644, expected 0600; call chmod 600" in checks["keys"][1]
    assert not checks["read"][0]
    assert not checks["server"][0]
    assert "a firewall" in checks["server"][1]
    assert "--node-config" in checks["node config"][1]


def test_a_file_is_no_folder_to_write_to(tmp_path, capsys, plenty, monkeypatch):
    make_credentials(tmp_path / "keys", ["127.0.0.1"], 1)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path, ok in ((tmp_path / "file", False), ("runs", True)):
        checks, _ = checks_of(capsys, tmp_path / "keys" / "node-0", "--write", path)
        assert checks["write"][0] == ok


def test_an_encrypted_key_is_reported(tmp_path):
    make_credentials(tmp_path, ["127.0.0.1"], 1)
    key = tmp_path / "superlink" / "superlink.key"
    plain = key.rename(tmp_path / "plain.key")
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", plain, "-out", key]
    subprocess.run(command, check=True)
    key.chmod(0o600)
    check = doctor._check("keys", doctor._superlink_keys, tmp_path / "superlink")
    assert not check.ok


def test_the_servers_folder_is_checked(tmp_path, capsys, monkeypatch, plenty):
    keys = tmp_path / "keys"
    make_credentials(keys, ["127.0.0.1"], 1)
    with Server(keys / "superlink") as one, Server(keys / "superlink") as proxy:
        monkeypatch.setattr(doctor, "PROXY_ADDRESS", f"localhost:{proxy.port}")
        checks, status = checks_of(
            capsys, keys / "superlink", "--superlink", f"127.0.0.1:{one.port}"
        )
    assert status == 0, checks
    assert {"SuperLink", "proxy", "closed"} < set(checks)
    with Server(keys / "superlink", refuses=415) as bare:  # a SuperLink accepts such calls
        monkeypatch.setattr(doctor, "PROXY_ADDRESS", f"localhost:{bare.port}")
        checks, status = checks_of(
            capsys, keys / "superlink", "--superlink", f"127.0.0.1:{free_port()}"
        )
    assert status == 1
    assert "devices could submit runs" in checks["proxy"][1]
    assert not checks["SuperLink"][0]


def test_an_exposed_superlink_port_is_reported(monkeypatch):
    ours = SimpleNamespace(family=socket.AF_INET, address="0.0.0.0")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [ours]})
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        with pytest.raises(ValueError, match="all programs that reach it act as the operator"):
            doctor._closed(f"127.0.0.1:{one.getsockname()[1]}")
    port = free_port()  # no process listens
    assert doctor._closed(f"127.0.0.1:{port}") == f"port {port} is closed to other machines"


def test_an_unknown_folder_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(tmp_path)])
    assert ended.value.code == 2
    assert "found neither superlink.crt nor ca.crt" in capsys.readouterr().err
