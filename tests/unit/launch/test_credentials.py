"""The secrets of a deployment: complete, private, never overwritten, in forms that Flower reads."""

import ipaddress
import shutil
import ssl
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

from ravan_flwr.cli import main
from ravan_flwr.launch.credentials import list_hosts, load_certificate, make_credentials

HOSTS = ["server.example.org", "192.0.2.7"]


@pytest.fixture
def folder(tmp_path):
    make_credentials(tmp_path / "keys", HOSTS, 2)
    return tmp_path / "keys"


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_machine_has_a_folder_and_private_files_are_private(folder):
    assert {str(path.relative_to(folder)) for path in contents(folder)} == {
        "authority/ca.key", "authority/ca.crt",
        "superlink/ca.crt", "superlink/superlink.crt", "superlink/superlink.key",
        "node-0/ca.crt", "node-0/node.key", "node-0/node.pub",
        "node-1/ca.crt", "node-1/node.key", "node-1/node.pub",
    }  # fmt: skip
    assert len(set(contents(folder).values())) == 8  # there are four copies of ca.crt
    for path in [folder, *folder.rglob("*")]:
        file_mode = 0o600 if path.suffix == ".key" else 0o644
        expected = 0o700 if path.is_dir() else file_mode
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


@pytest.mark.parametrize("name", ["server.example.org", "localhost", "192.0.2.7", "127.0.0.1"])
def test_the_certificate_is_valid_for_its_hosts(name, folder):
    authority = load_certificate(folder / "authority" / "ca.crt")
    certificate = load_certificate(folder / "superlink" / "superlink.crt")
    try:
        subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        subject = x509.DNSName(name)
    assert isinstance(subject, x509.DNSName | x509.IPAddress)
    builder = verification.PolicyBuilder().store(verification.Store([authority]))
    assert builder.build_server_verifier(subject).verify(certificate, [])
    with pytest.raises(verification.VerificationError):
        builder.build_server_verifier(x509.DNSName("elsewhere.org")).verify(certificate, [])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*(folder / "superlink" / f"superlink.{end}" for end in ("crt", "key")))


def test_nodes_keys_are_what_flower_reads(folder):
    for node in ("node-0", "node-1"):
        key = serialization.load_ssh_private_key((folder / node / "node.key").read_bytes(), None)
        public = key.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        assert uses_nist_ec_curve(public)
        assert try_load_public_key(folder / node / "node.pub") == public_key_to_bytes(public)


def test_adding_nodes_keeps_existing_files(folder):
    before = contents(folder)
    for key in folder.glob("*/*.key"):  # moved to other machines; the authority's key is offline
        key.unlink()
        del before[key]
    written = make_credentials(folder, [], 4)
    assert written == [folder / "node-2", folder / "node-3"]
    assert before.items() <= contents(folder).items()


def test_removed_files_are_made_again(folder):
    before = contents(folder)
    shutil.rmtree(folder / "node-0")
    shutil.rmtree(folder / "superlink")
    assert make_credentials(folder, ["new.org"], 2) == [folder / "superlink", folder / "node-0"]
    after = contents(folder)
    assert {p.parent.name for p in before if before[p] != after[p]} == {"superlink", "node-0"}
    assert list_hosts(load_certificate(folder / "superlink" / "superlink.crt"))[0] == "new.org"


def test_a_failure_leaves_no_incomplete_folder(folder, monkeypatch):
    before = contents(folder)

    def full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr("ravan_flwr.files.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        make_credentials(folder, [], 3)
    assert contents(folder) == before
    assert not (folder / "node-2").exists()


@pytest.mark.parametrize("host", ["https://a.org", "a.org:8000", "", "a b", "-a", "ä.org", "a..b"])
def test_hosts(host, tmp_path):
    with pytest.raises(ValueError, match=r"--host .*: expected a name such as server\.example"):
        make_credentials(tmp_path / "keys", [host], 1)
    assert not (tmp_path / "keys").exists()


def refused(message, folder, hosts, nodes):
    with pytest.raises(ValueError, match=message):
        make_credentials(folder, hosts, nodes)


def test_refusals(folder, tmp_path):
    before, mine = contents(folder), tmp_path / "mine"
    refused(r"--host: got other\.org, but the certificate .* for server", folder, ["other.org"], 3)
    refused("--nodes 0: expected a whole number at least 1", folder, [], 0)
    assert make_credentials(folder, HOSTS, 2) == []  # all exist, and none is overwritten
    assert contents(folder) == before
    refused("--host: got none", tmp_path / "new", [], 1)
    (folder / "node-1" / "node.pub").unlink()
    refused(r"node-1: found no node\.pub, .*restore", folder, [], 3)
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    refused(r"it has files but no authority/ca\.crt", mine, HOSTS, 1)
    refused("got a file, expected a folder", mine / "notes.txt", HOSTS, 1)


def test_an_incomplete_authority_is_refused(folder, tmp_path):
    shutil.rmtree(folder / "superlink")
    key = folder / "authority" / "ca.key"
    make_credentials(tmp_path / "other", HOSTS, 1)
    shutil.copy(tmp_path / "other" / "authority" / "ca.key", key)
    refused("the key of another authority", folder, HOSTS, 2)
    key.write_bytes(b"nothing")
    refused("cannot be read as a key", folder, HOSTS, 2)
    key.unlink()
    refused(r"ca\.key: it cannot be read as a key .*; put it back", folder, HOSTS, 2)


def test_the_command(tmp_path, capsys):
    main(["keys", str(tmp_path / "keys"), "--host", "a.org", "--host", "192.0.2.1", "--nodes", "1"])
    output = capsys.readouterr().out
    assert f"made {tmp_path}/keys/node-0" in output
    assert "certificate is for a.org, 192.0.2.1, localhost, 127.0.0.1, ::1, until" in output
    main(["keys", str(tmp_path / "keys"), "--nodes", "1"])
    assert "made" not in capsys.readouterr().out
