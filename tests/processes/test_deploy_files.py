"""Files for systemd and containers, none of which runs here: they fit Flower and each other."""

import configparser
import fnmatch
import inspect
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.supercore.cli.flower_superexec import _parse_args as _parse_args_superexec
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

from ravan_flwr.launch.credentials import make_credentials
from tests import ROOT

PARSERS = {
    "flower-superexec": _parse_args_superexec,
    "flower-superlink": _parse_args_run_superlink,
    "flower-supernode": _parse_args_run_supernode,
}


def parsed(command):
    """A command as Flower itself reads it: an option that it does not have ends the test."""
    return PARSERS[Path(command[0]).name]().parse_args(command[1:])


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_credentials(folder, ["superlink"], 3)
    return {f"keys/{path.relative_to(folder)}" for path in folder.rglob("*")}


# Containers.


def compose(*names: str) -> dict[str, Any]:
    """Compose files, each merged into those before it: maps by key, lists one after the other."""

    def merge(one, two):
        if isinstance(one, dict) and isinstance(two, dict):
            both = {key: merge(one[key], two[key]) for key in one.keys() & two.keys()}
            return one | two | both
        return one + two if isinstance(one, list) and isinstance(two, list) else two

    merged: dict[str, Any] = {}
    for name in names:
        merged = merge(merged, yaml.safe_load((ROOT / name).read_text()))
    return merged


def test_every_service_is_confined():
    services = compose("compose.yaml")["services"]
    nodes = {"supernode-0", "supernode-1", "supernode-2"}
    assert set(services) == {"proxy", "superlink", "serverapp", "operator"} | nodes
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        if name != "proxy":
            assert set(service["build"]["args"]) <= set(re.findall(r"ARG (\w+)", dockerfile()))


def test_the_superlink_has_tls_and_authentication_and_is_behind_the_proxy():
    content = compose("compose.yaml")
    superlink, proxy = content["services"]["superlink"], content["services"]["proxy"]
    arguments = parsed(superlink["command"])
    assert arguments.enable_supernode_auth
    assert not arguments.insecure
    files = {arguments.ssl_ca_certfile, arguments.ssl_certfile, arguments.ssl_keyfile}
    assert files == {f"/run/secrets/{name}" for name in superlink["secrets"]}
    (volume,) = superlink["volumes"]
    assert Path(arguments.database).parent == Path(volume.split(":")[1])  # outlives the container
    assert superlink["environment"] == {
        "HEALTH_URL": f"https://localhost:{arguments.port}/health",
        "HEALTH_CA": arguments.ssl_ca_certfile,
    }
    # It listens where nobody but those in the reverse proxy's network can ask.
    assert f"{arguments.host}:{arguments.port}" == upstream()
    inside = {n for n, s in content["services"].items() if s.get("network_mode") == "service:proxy"}
    assert inside == {"superlink", "serverapp", "operator"}
    with_ports = {name for name, service in content["services"].items() if "ports" in service}
    assert with_ports == {"proxy"}
    assert proxy["ports"] == [f"${{BIND:-127.0.0.1}}:{listens()}:{listens()}"]
    assert {secret["target"] for secret in proxy["secrets"]} == set(certificates_of_the_proxy())
    for secret in proxy["secrets"]:
        assert Path(secret["target"]).name == secret["source"]
    assert proxy["networks"]["default"]["aliases"] == ["superlink"]
    assert proxy["volumes"] == ["./deploy/reverse-proxy.conf:/etc/reverse-proxy.conf:ro"]


def test_a_run_that_takes_all_memory_does_not_take_the_superlink_with_it():
    """Containers: memory of their own, and the kernel's choice where the machine runs out."""
    services = compose("compose.yaml")["services"]
    assert parsed(services["superlink"]["command"]).isolation == "process"
    apps = services["serverapp"]
    arguments = parsed(apps["command"])
    assert arguments.runtime_api_address == "localhost:8001"
    assert arguments.root_certificates == "/run/secrets/ca.crt"
    assert apps["mem_limit"] == apps["memswap_limit"]
    assert services["superlink"]["oom_score_adj"] < 0 < apps["oom_score_adj"]
    for name in set(services) - {"operator"}:
        assert services[name]["mem_limit"], name


def proxy_conf():
    return (ROOT / "deploy" / "reverse-proxy.conf").read_text()


def upstream():
    (address,) = re.findall(r"^\s*server ([\d.:]+);", proxy_conf(), re.MULTILINE)
    return address


def listens():
    (port,) = re.findall(r"^\s*listen (\d+) ssl;", proxy_conf(), re.MULTILINE)
    return int(port)


def certificates_of_the_proxy():
    return sorted(set(re.findall(r"/run/credentials/\S+(?=;)", proxy_conf())))


def test_the_proxy_lets_in_what_flowers_supernode_calls_and_nothing_else():
    """By Flower's own client, but for what a SuperNode without a registered key calls."""
    (names,) = re.findall(r"\^/v1/fleet/\(\?<name>([a-z|-]+)\)", proxy_conf())
    source = inspect.getsource(FleetHttpClient)
    called = set(re.findall(r'path="/v1/fleet/([a-z-]+)"', source))
    assert set(names.split("|")) == called - {"register-node", "unregister-node"}


def test_three_supernodes_with_keys_and_data_of_their_own():
    services = compose("compose.yaml")["services"]
    for number in range(3):
        node = services[f"supernode-{number}"]
        arguments = parsed(node["command"])
        assert arguments.superlink == "superlink:8000"
        assert arguments.root_certificates == "/run/secrets/ca.crt"
        assert arguments.auth_supernode_private_key == f"/run/secrets/node-{number}.key"
        assert node["secrets"] == ["ca.crt", f"node-{number}.key"]
        assert f"./data/node-{number}:/data:ro" in node["volumes"]
        config = parse_config_args([arguments.node_config])
        assert (config["partition-id"], config["num-partitions"]) == (number, 3)
        assert config["data-path"] == "/data"
        assert isinstance(config["budget"], float)
        assert node["depends_on"] == {"superlink": {"condition": "service_healthy"}}
    assert len({services[f"supernode-{n}"]["volumes"][0] for n in range(3)}) == 3


def test_secrets_and_volumes_are_there(keys):
    content = compose("compose.yaml")
    assert {secret["file"] for secret in content["secrets"].values()} <= keys
    for name, service in content["services"].items():
        secrets = {s["source"] if isinstance(s, dict) else s for s in service["secrets"]}
        assert secrets <= set(content["secrets"]), name
        for volume in service["volumes"]:
            assert volume.count(":") in (1, 2)
            source = volume.split(":")[0]
            if source.startswith("./keys"):
                assert source.removeprefix("./") in keys
                assert source.endswith(".pub")
                assert volume.endswith(":ro")
            elif source.startswith("./deploy"):
                assert (ROOT / source).is_file()
            elif not source.startswith("./data"):
                assert source in content["volumes"]


def test_the_gpu_is_the_nodes():
    services = compose("compose.yaml", "compose.gpu.yaml")["services"]
    assert "deploy" not in services["superlink"]
    for number in range(3):
        node = services[f"supernode-{number}"]
        (device,) = node["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert node["image"] == "ravan-flwr:cuda"
        assert "UID" in node["build"]["args"]  # from compose.yaml
        assert "TORCH_INDEX_GPU" in node["build"]["args"]["TORCH_INDEX"]
        assert node["command"][0] == "flower-supernode"


def dockerfile():
    return (ROOT / "Dockerfile").read_text()


def test_the_image_copies_what_is_there_and_nothing_else_can_get_in():
    rules = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in "#"
    ]
    assert rules[0] == "*"
    let_in = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert sorted(copied) == sorted(let_in)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not fnmatch.filter([source], "*key*")
    assert re.search(r"^USER \$UID$", dockerfile(), re.MULTILINE)
    assert "HEALTHCHECK" in dockerfile()
    assert re.search(r"^RUN pip install .*\[privacy,quantize\]", dockerfile(), re.MULTILINE)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


# systemd.


def unit(name):
    parser = configparser.ConfigParser(
        strict=False, interpolation=None, dict_type=MultiDict, empty_lines_in_values=False
    )
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((ROOT / "deploy" / name).read_text().replace("\\\n", ""))
    return parser["Service"]


class MultiDict(dict[str, Any]):
    """Keys that come again add a line."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self and isinstance(value, list) and isinstance(self[key], list):
            self[key].extend(value)
        else:
            super().__setitem__(key, value)


def started(name, environment_file=None):
    """ExecStart as systemd starts it: ${NAME} is one word, whatever is in it."""
    settings = {"CREDENTIALS_DIRECTORY": "/run/credentials"}
    text = (ROOT / "deploy" / environment_file).read_text() if environment_file else ""
    for line in shlex.split(text, comments=True):
        key, _, value = line.partition("=")
        settings[key] = value
    words = unit(name)["ExecStart"].split()
    return parsed([re.sub(r"\$\{(\w+)\}", lambda m: settings[m[1]], word) for word in words])


def test_the_superlinks_unit():
    arguments = started("ravan-superlink.service")
    assert arguments.enable_supernode_auth
    assert f"{arguments.host}:{arguments.port}" == upstream()
    service = unit("ravan-superlink.service")
    given = {line.split(":")[0] for line in service["LoadCredential"].split("\n")}
    files = (arguments.ssl_ca_certfile, arguments.ssl_certfile, arguments.ssl_keyfile)
    assert {Path(file).name for file in files} == given
    assert arguments.database.startswith("/var/lib/ravan-flwr/")


def test_the_proxys_unit():
    service = unit("ravan-proxy.service")
    given = {line.split(":")[0] for line in service["LoadCredential"].split("\n")}
    folder = "/run/credentials/ravan-proxy.service"  # systemd's, by the unit's name
    assert {f"{folder}/{name}" for name in given} == set(certificates_of_the_proxy())
    assert "/opt/ravan-flwr/deploy/reverse-proxy.conf" in service["ExecStart"]
    assert f"-p /var/cache/{service['CacheDirectory']}/" in service["ExecStart"]


def test_memory_that_a_run_takes_is_not_the_superlinks():
    """Units: apart, with less than the machine together; the SuperLink is the last to go."""
    superlink, apps = unit("ravan-superlink.service"), unit("ravan-serverapp.service")
    assert started("ravan-superlink.service").isolation == "process"
    arguments = started("ravan-serverapp.service")
    assert arguments.runtime_api_address == "localhost:8001"
    assert apps["User"] != superlink["User"]
    shares = [int(u["MemoryMax"].removesuffix("%")) for u in (superlink, apps)]
    assert sum(shares) < 100
    assert int(superlink["OOMScoreAdjust"]) < 0 < int(apps["OOMScoreAdjust"])
    # What the kernel ends is one process; the unit goes on, and so does a SuperNode's.
    for name in ("ravan-serverapp.service", "ravan-supernode@.service"):
        assert unit(name)["OOMPolicy"] == "continue"
        assert unit(name)["MemoryMax"].endswith("%")


def test_the_supernodes_unit():
    arguments = started("ravan-supernode@.service", "supernode.env.example")
    assert arguments.superlink == "server.example.org:8000"
    config = parse_config_args([arguments.node_config])
    assert config == {
        "partition-id": 0, "num-partitions": 3, "data-path": "/data/mine", "budget": 0.5
    }  # fmt: skip
    service = unit("ravan-supernode@.service")
    given = {line.split(":")[0] for line in service["LoadCredential"].split("\n")}
    files = (arguments.root_certificates, arguments.auth_supernode_private_key)
    assert {Path(file).name for file in files} == given


def test_a_supernode_that_gave_up_is_ended_and_started_again():
    """By its check, with the addresses of its unit; and in its container."""
    command = unit("ravan-supernode-check@.service")["ExecStart"].split()
    given = dict(word.split("=", 1) for word in command if "=" in word)
    assert given == {
        "HEALTH_URL": "http://127.0.0.1:${RUNTIME_PORT}/health",
        "HEALTH_SUPERLINK": "${SUPERLINK}",
        "HEALTH_CA": "${CREDENTIALS_DIRECTORY}/ca.crt",
    }
    assert command[-1] == "/opt/ravan-flwr/deploy/health.py"
    for number in range(3):
        node = compose("compose.yaml")["services"][f"supernode-{number}"]
        assert f"--superlink={node['environment']['HEALTH_SUPERLINK']}" in node["command"]
        assert f"--root-certificates={node['environment']['HEALTH_CA']}" in node["command"]


@pytest.mark.parametrize("name", ["superlink", "serverapp", "supernode@"])
def test_no_unit_and_no_container_installs_what_an_app_asks_for(name):
    """From Flower 1.42 on that is the default."""
    setting = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"
    assert setting in unit(f"ravan-{name}.service")["Environment"].split("\n")
    assert setting in dockerfile()


UNITS = {
    "ravan-superlink.service": ("ravan", "always"),
    "ravan-supernode-check@.service": ("ravan", "always"),
    "ravan-supernode@.service": ("ravan", "always"),
    "ravan-serverapp.service": ("ravan-app", "always"),
    "ravan-proxy.service": ("ravan-proxy", "always"),
}


@pytest.mark.parametrize("name", UNITS)
def test_units_are_confined_and_come_back(name, keys):
    service = unit(name)
    assert (service["User"], service["Restart"]) == UNITS[name]
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    for line in service["LoadCredential"].split("\n"):
        path = line.split(":")[1].replace("%i", "node-0")
        assert f"keys/{Path(path).relative_to('/etc/ravan-flwr')}" in keys
    if analyze := shutil.which("systemd-analyze"):
        told = subprocess.run(
            [analyze, "verify", str(ROOT / "deploy" / name)], capture_output=True, text=True
        ).stderr
        lines = [line for line in told.splitlines() if "is not executable" not in line]
        assert lines == []
