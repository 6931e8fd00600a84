"""Files for systemd and containers agree with Flower and each other; none of them runs here."""

import fnmatch
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.supernode.fleet_http_client import FleetHttpClient

from ravan_flwr.launch.credentials import make_credentials
from tests import ROOT
from tests.support.parsing import PARSERS


def parse(command):
    """Parse a command with Flower's own parser: an unknown option ends the test."""
    return PARSERS[Path(command[0]).name]().parse_args(command[1:])


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "keys"
    make_credentials(folder, ["superlink"], 3)
    return {f"../keys/{path.relative_to(folder)}" for path in folder.rglob("*")}


# The scripts that enrol and install many devices.

# The programs that the scripts call, on one machine: a device's /etc and /opt are in a folder of
# its name.
FAKES = {
    "ssh": '[ "$1" != -n ] || shift; cd "$HOMES/$1"; shift; words="$*"; '
    'words="${words//\\/etc\\//$PWD/etc/}"; bash -c "${words//\\/opt\\//$PWD/opt/}"',
    "scp": 'cp -r "$2" "$HOMES/${3%%:*}${3#*:}"',
    "flwr": 'echo "$@" >> "$HOMES/calls"; [ "$2" = register ] || exit 0; [ -z "$AWAY" ]; '
    'if grep -qxFs "$3" "$HOMES/registered"; then echo "Public key already in use." >&2; '
    'exit 1; fi; echo "$3" >> "$HOMES/registered"',
    "ravan-flwr": 'exec "$PYTHON" -m ravan_flwr "$@"',
    "git": 'tar -c -C "$PYTHONPATH" pyproject.toml deploy',
    "python3": "mkdir -p .venv/bin; echo 'pwd >> pip' > .venv/bin/pip; chmod +x .venv/bin/pip",
    "systemctl": 'echo "$@" >> calls',
    "id": "[ -e user ]",
    "useradd": "echo $* > user",
}
DEVICE_NAMES = ("a.example.org", "b.example.org", "c.example.org")


@pytest.fixture
def many(tmp_path):
    """Return a function that runs a script of the page with FAKES, in a folder with devices.txt."""
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\nset -e\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for name in DEVICE_NAMES:
        (tmp_path / name / "etc" / "systemd" / "system").mkdir(parents=True)
    (tmp_path / "devices.txt").write_text("\n".join(DEVICE_NAMES))  # the last line has no break
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(tmp_path), "HOMES": str(tmp_path), "PYTHON": sys.executable}
    environment = os.environ | own | {"PYTHONPATH": str(ROOT), "AWAY": ""}
    page = (ROOT / "docs" / "deploy.md").read_text()
    scripts = re.findall(r"^```bash\n(set -euo pipefail\n.*?)^```$", page, re.M | re.S)

    def run(word, *arguments, **variables):
        (script,) = [text for text in scripts if word in text]
        command = ["bash", "-c", script, "script", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment | variables).returncode

    return run


def test_the_script_enrols_each_device_once_with_a_key_of_its_own(many, tmp_path):
    calls = [f"supernode register {tmp_path}/keys/node-{n}/node.pub edge" for n in range(3)]
    listed = ["supernode list edge"]

    def key(number):
        folder = tmp_path / DEVICE_NAMES[number] / "etc" / "ravan-flwr"
        return folder / f"node-{number}" / "node.key"

    def enrol(expected, **variables):
        status = many("supernode register", **variables)
        assert (tmp_path / "calls").read_text().splitlines() == expected
        (tmp_path / "calls").unlink()
        return status

    assert enrol(calls[:1], AWAY="yes") != 0  # the SuperLink cannot be reached
    assert (tmp_path / "keys" / "node-0" / "node.key").exists()
    assert enrol(calls + listed) == 0
    assert enrol(listed) == 0
    keys = [key(number).read_text() for number in range(3)]
    assert len(set(keys)) == 3
    # It was stopped after it had registered device 1.
    shutil.copy(key(1), tmp_path / "keys" / "node-1")
    assert enrol([calls[1], *listed]) == 0
    assert [key(number).read_text() for number in range(3)] == keys
    assert not list((tmp_path / "keys").glob("node-*/node.key"))


def test_the_script_installs_each_device_with_its_number(many, tmp_path):
    example = (ROOT / "deploy" / "supernode.env.example").read_text()
    config = 'budget=0.5 result-path="/var/lib/ravan-flwr/node-0/results"'
    (tmp_path / "node-0.env").write_text(example.replace("budget=0.5", config))
    for name in DEVICE_NAMES:
        (tmp_path / name / "etc" / "ravan-flwr").mkdir()
        (tmp_path / name / "opt").mkdir()
    for times in (1, 2):  # it can be repeated
        assert many("git archive") == 0
        for number, name in enumerate(DEVICE_NAMES):
            folder, node = tmp_path / name, f"node-{number}"
            config = parse_exec_start(
                "ravan-supernode@.service", folder / "etc" / "ravan-flwr" / f"{node}.env"
            ).node_config
            values = parse_config_args([config])
            assert (values["partition-id"], values["num-partitions"]) == (number, 3)
            assert values["result-path"] == f"/var/lib/ravan-flwr/{node}/results"
            installed = folder / "opt" / "ravan-flwr"
            assert (installed / "pip").read_text() == f"{installed}\n" * times
            assert " ravan" in (installed / "user").read_text()
            units = {path.name for path in (folder / "etc" / "systemd" / "system").iterdir()}
            assert units == {"ravan-supernode@.service", "ravan-supernode-check@.service"}
            names = f"ravan-supernode@{node} ravan-supernode-check@{node}"
            commands = ["daemon-reload", f"enable {names}", f"restart {names}"]
            assert (installed / "calls").read_text().splitlines() == commands * times


def test_the_script_upgrades_the_named_devices_and_keeps_the_old_installation(many, tmp_path):
    (tmp_path / "node-0.env").write_text("partition-id=0")
    (tmp_path / "node-1.env").write_text("partition-id=1 budget=0.25")
    folders = [tmp_path / name for name in DEVICE_NAMES]
    for folder in folders:
        (folder / "etc" / "ravan-flwr").mkdir()
        (folder / "opt").mkdir()
    assert many("git archive") == 0
    programs = [folder / "opt" / "ravan-flwr" / ".venv" / "bin" for folder in folders]
    for program in programs[1:]:  # device 0 has an installation that was interrupted
        (program / "flower-supernode").write_text("old")
    assert many("git archive", "0", "1") == 0
    calls = [(x / "opt" / "ravan-flwr" / "calls").read_text().count("restart") for x in folders]
    assert calls == [2, 2, 1]
    copies = [folder / "opt" / "ravan-flwr-old" for folder in folders]
    assert [copy.exists() for copy in copies] == [False, True, False]
    (programs[1] / "flower-supernode").write_text("new")
    assert many("git archive", "1") == 0  # the copy stays
    assert (copies[1] / ".venv" / "bin" / "flower-supernode").read_text() == "old"
    settings = [x / "etc" / "ravan-flwr" / f"node-{n}.env" for n, x in enumerate(folders)]
    expected = ["partition-id=0", "partition-id=1 budget=0.25", "partition-id=2"]
    assert [path.read_text() for path in settings] == expected


def test_the_script_of_the_collector_counts_nodes_and_failed_runs(tmp_path):
    page = (ROOT / "docs" / "operating.md").read_text()
    (script,) = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    fake = tmp_path / "flwr"
    fake.write_text(  # which prints as Flower's own command does
        f"#!{sys.executable}\n"
        "import sys\n"
        "from flwr.cli.utils import print_json_to_stdout\n"
        "nodes = ['online', 'offline', 'registered', 'online']\n"
        "runs = ['running', 'finished:failed', 'finished:completed']\n"
        "key, found = ('runs', runs) if sys.argv[1] == 'ls' else ('nodes', nodes)\n"
        "print_json_to_stdout({'success': True, key: [{'status': status} for status in found]})\n"
    )
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", script, "script", str(tmp_path)]
    written = tmp_path / "ravan.prom"
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
        assert written.read_text() == "ravan_supernodes_online 2\nravan_runs_failed 1\n"
    written.write_text("before")
    fake.write_text("#!/bin/bash\nexit 1\n")  # no SuperLink answers
    assert subprocess.run(command, env=environment).returncode == 1
    assert written.read_text() == "before"


# Containers.


def compose(*names: str) -> dict[str, Any]:
    """Merge Compose files in order: maps by key, lists by concatenation."""

    def merge(first, second):
        if isinstance(first, dict) and isinstance(second, dict):
            both = {key: merge(first[key], second[key]) for key in first.keys() & second.keys()}
            return first | second | both
        return first + second if isinstance(first, list) and isinstance(second, list) else second

    merged: dict[str, Any] = {}
    for name in names:
        merged = merge(merged, yaml.safe_load((ROOT / "deploy" / name).read_text()))
    return merged


NODES = [f"supernode-{number}" for number in range(3)]


@pytest.fixture(scope="module")
def services():
    return compose("compose.yaml")["services"]


def test_every_service_is_confined(services):
    assert set(services) == {"proxy", "superlink", "serverapp", "operator", *NODES}
    for name, service in services.items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        if name != "proxy":
            assert set(service["build"]["args"]) <= set(re.findall(r"ARG (\w+)", dockerfile()))
            assert (ROOT / "deploy" / service["build"]["context"] / "Dockerfile").samefile(
                ROOT / "Dockerfile"
            )


def test_the_superlink_has_tls_and_authentication_and_is_behind_the_proxy(services):
    superlink, proxy = services["superlink"], services["proxy"]
    arguments = parse(superlink["command"])
    assert arguments.enable_supernode_auth
    assert not arguments.insecure
    files = {arguments.ssl_ca_certfile, arguments.ssl_certfile, arguments.ssl_keyfile}
    assert files == {f"/run/secrets/{name}" for name in superlink["secrets"]}
    (volume,) = superlink["volumes"]
    persistent = Path(volume.split(":")[1])
    assert Path(arguments.database).parent == persistent
    assert superlink["environment"] == {
        "HEALTH_URL": f"https://localhost:{arguments.port}/health",
        "HEALTH_CA": arguments.ssl_ca_certfile,
    }
    # Only services in the reverse proxy's network can reach it.
    assert f"{arguments.host}:{arguments.port}" == superlink_address()
    behind_proxy = {n for n, s in services.items() if s.get("network_mode") == "service:proxy"}
    assert behind_proxy == {"superlink", "serverapp", "operator"}
    assert [name for name, service in services.items() if "ports" in service] == ["proxy"]
    assert proxy["ports"] == [f"${{BIND:-127.0.0.1}}:{proxy_port()}:{proxy_port()}"]
    assert {secret["target"] for secret in proxy["secrets"]} == set(certificates_of_the_proxy())
    for secret in proxy["secrets"]:
        assert Path(secret["target"]).name == secret["source"]
    assert proxy["networks"]["default"]["aliases"] == ["superlink"]
    assert proxy["volumes"] == ["./reverse-proxy.conf:/etc/reverse-proxy.conf:ro"]


def test_a_run_that_exhausts_memory_does_not_end_the_superlinks_container(services):
    """Containers have memory limits, and the kernel kills the ServerApps before the SuperLink."""
    assert parse(services["superlink"]["command"]).isolation == "process"
    apps = services["serverapp"]
    arguments = parse(apps["command"])
    assert arguments.runtime_api_address == "localhost:8001"
    assert arguments.root_certificates == "/run/secrets/ca.crt"
    assert apps["mem_limit"] == apps["memswap_limit"]
    assert services["superlink"]["oom_score_adj"] < 0 < apps["oom_score_adj"]
    for name in set(services) - {"operator"}:
        assert services[name]["mem_limit"], name


def proxy_conf():
    return (ROOT / "deploy" / "reverse-proxy.conf").read_text()


def superlink_address():
    (address,) = re.findall(r"^\s*server ([\d.:]+);", proxy_conf(), re.MULTILINE)
    return address


def proxy_port():
    (port,) = re.findall(r"^\s*listen (\d+) ssl;", proxy_conf(), re.MULTILINE)
    return int(port)


def certificates_of_the_proxy():
    return sorted(set(re.findall(r"/run/credentials/\S+(?=;)", proxy_conf())))


def test_the_proxy_admits_exactly_the_calls_of_flowers_supernode():
    """The calls are those in Flower's client, except the calls without a registered key."""
    (names,) = re.findall(r"\^/v1/fleet/\(\?<name>([a-z|-]+)\)", proxy_conf())
    source = inspect.getsource(FleetHttpClient)
    called = set(re.findall(r'path="/v1/fleet/([a-z-]+)"', source))
    assert set(names.split("|")) == called - {"register-node", "unregister-node"}


def test_three_supernodes_have_separate_keys_and_data(services):
    for number, name in enumerate(NODES):
        node = services[name]
        arguments = parse(node["command"])
        assert arguments.superlink == "superlink:8000"
        assert arguments.root_certificates == "/run/secrets/ca.crt"
        assert arguments.auth_supernode_private_key == f"/run/secrets/node-{number}.key"
        assert node["secrets"] == ["ca.crt", f"node-{number}.key"]
        assert f"../data/node-{number}:/data:ro" in node["volumes"]
        config = parse_config_args([arguments.node_config])
        assert (config["partition-id"], config["num-partitions"]) == (number, 3)
        assert config["data-path"] == "/data"
        assert isinstance(config["budget"], float)
        assert node["depends_on"] == {"superlink": {"condition": "service_healthy"}}
    assert len({services[name]["volumes"][0] for name in NODES}) == 3


def test_secrets_and_volumes_exist(keys):
    content = compose("compose.yaml")
    assert {secret["file"] for secret in content["secrets"].values()} <= keys
    for name, service in content["services"].items():
        secrets = {s["source"] if isinstance(s, dict) else s for s in service["secrets"]}
        assert secrets <= set(content["secrets"]), name
        for volume in service["volumes"]:
            assert volume.count(":") in (1, 2)
            source = volume.split(":")[0]
            if source.startswith("../keys"):
                assert source in keys
                assert source.endswith(".pub")
                assert volume.endswith(":ro")
            elif source.startswith("./"):
                assert (ROOT / "deploy" / source).is_file()
            elif not source.startswith("../data"):
                assert source in content["volumes"]


def test_only_the_supernodes_reserve_a_gpu():
    services = compose("compose.yaml", "compose.gpu.yaml")["services"]
    assert "deploy" not in services["superlink"]
    for name in NODES:
        node = services[name]
        (device,) = node["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        assert node["image"] == "ravan-flwr:cuda"
        assert "UID" in node["build"]["args"]  # from compose.yaml
        assert "TORCH_INDEX_GPU" in node["build"]["args"]["TORCH_INDEX"]
        assert node["command"][0] == "flower-supernode"


def dockerfile():
    return (ROOT / "Dockerfile").read_text()


def test_the_image_copies_existing_files_and_excludes_all_others():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line[:1] not in "#"]
    assert rules[0] == "*"
    admitted = [rule[1:] for rule in rules if rule.startswith("!")]
    copies = re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE)
    copied = [source for line in copies for source in line.split()[:-1]]
    assert sorted(copied) == sorted(admitted)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not fnmatch.filter([source], "*key*")
    assert re.search(r"^USER \$UID$", dockerfile(), re.MULTILINE)
    assert "HEALTHCHECK" in dockerfile()
    assert re.search(r"^RUN pip install .*\[privacy,quantize\]", dockerfile(), re.MULTILINE)
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


# systemd.


def unit(name):
    """Return the settings of a unit's service; a repeated one has several lines."""
    text = (ROOT / "deploy" / name).read_text().replace("\\\n", "")
    section = text.partition("[Service]\n")[2].partition("\n[")[0]
    settings: dict[str, str] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        settings[key] = f"{settings[key]}\n{value}" if key in settings else value
    return settings


def parse_exec_start(name, environment_file=None):
    """Parse ExecStart as systemd does: ${NAME} is one word, also with spaces in its value."""
    settings = {"CREDENTIALS_DIRECTORY": "/run/credentials"}
    text = (ROOT / "deploy" / environment_file).read_text() if environment_file else ""
    for line in shlex.split(text, comments=True):
        key, _, value = line.partition("=")
        settings[key] = value
    words = unit(name)["ExecStart"].split()
    return parse([re.sub(r"\$\{(\w+)\}", lambda m: settings[m[1]], word) for word in words])


def credentials(service):
    """Return the paths from which systemd copies a unit's credentials, by their names."""
    return dict(line.split(":") for line in service["LoadCredential"].split("\n"))


def test_the_superlinks_unit():
    arguments = parse_exec_start("ravan-superlink.service")
    assert arguments.enable_supernode_auth
    assert f"{arguments.host}:{arguments.port}" == superlink_address()
    service = unit("ravan-superlink.service")
    files = (arguments.ssl_ca_certfile, arguments.ssl_certfile, arguments.ssl_keyfile)
    assert {Path(file).name for file in files} == credentials(service).keys()
    assert arguments.database.startswith("/var/lib/ravan-flwr/")


def test_the_proxys_unit():
    service = unit("ravan-proxy.service")
    folder = "/run/credentials/ravan-proxy.service"  # systemd's folder, named after the unit
    loaded = {f"{folder}/{name}" for name in credentials(service)}
    assert loaded == set(certificates_of_the_proxy())
    assert "/opt/ravan-flwr/deploy/reverse-proxy.conf" in service["ExecStart"]
    assert f"-p /var/cache/{service['CacheDirectory']}/" in service["ExecStart"]


def test_a_run_that_exhausts_memory_does_not_end_the_superlinks_unit():
    """Units have separate limits, below 100 % together; the kernel kills the SuperLink last."""
    superlink, apps = unit("ravan-superlink.service"), unit("ravan-serverapp.service")
    assert parse_exec_start("ravan-superlink.service").isolation == "process"
    arguments = parse_exec_start("ravan-serverapp.service")
    assert arguments.runtime_api_address == "localhost:8001"
    assert apps["User"] != superlink["User"]
    memory_limits = [int(u["MemoryMax"].removesuffix("%")) for u in (superlink, apps)]
    assert sum(memory_limits) < 100
    assert int(superlink["OOMScoreAdjust"]) < 0 < int(apps["OOMScoreAdjust"])
    # The kernel kills one process; the unit continues, also a SuperNode's.
    for name in ("ravan-serverapp.service", "ravan-supernode@.service"):
        assert unit(name)["OOMPolicy"] == "continue"
        assert unit(name)["MemoryMax"].endswith("%")


def test_the_supernodes_unit():
    arguments = parse_exec_start("ravan-supernode@.service", "supernode.env.example")
    assert arguments.superlink == "server.example.org:8000"
    # The page shows the example without its comments.
    example = (ROOT / "deploy" / "supernode.env.example").read_text()
    lines = [line for line in example.splitlines() if not line.startswith("#")]
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert "\n".join(["```text", *lines, "```"]) in page
    config = parse_config_args([arguments.node_config])
    assert config == {
        "partition-id": 0, "num-partitions": 3, "data-path": "/data/mine", "budget": 0.5
    }  # fmt: skip
    service = unit("ravan-supernode@.service")
    files = (arguments.root_certificates, arguments.auth_supernode_private_key)
    assert {Path(file).name for file in files} == credentials(service).keys()


def test_a_supernode_without_a_connection_is_restarted_by_its_check(services):
    """The check has the addresses of the SuperNode's unit, or of its container."""
    command = unit("ravan-supernode-check@.service")["ExecStart"].split()
    health_settings = dict(word.split("=", 1) for word in command if "=" in word)
    assert health_settings == {
        "HEALTH_URL": "http://127.0.0.1:${RUNTIME_PORT}/health",
        "HEALTH_SUPERLINK": "${SUPERLINK}",
        "HEALTH_CA": "${CREDENTIALS_DIRECTORY}/ca.crt",
    }
    assert command[-1] == "/opt/ravan-flwr/deploy/health.py"
    for node in map(services.get, NODES):
        assert f"--superlink={node['environment']['HEALTH_SUPERLINK']}" in node["command"]
        assert f"--root-certificates={node['environment']['HEALTH_CA']}" in node["command"]


def test_no_unit_and_no_container_installs_an_apps_dependencies():
    """From Flower 1.42 on, installing them is the default."""
    setting = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1"
    assert setting in dockerfile()
    for name in ("superlink", "serverapp", "supernode@"):
        assert setting in unit(f"ravan-{name}.service")["Environment"].split("\n")


USERS = {
    "ravan-superlink.service": "ravan",
    "ravan-supernode-check@.service": "ravan",
    "ravan-supernode@.service": "ravan",
    "ravan-serverapp.service": "ravan-app",
    "ravan-proxy.service": "ravan-proxy",
}


@pytest.mark.parametrize("name", USERS)
def test_units_are_confined_and_restart(name, keys):
    service = unit(name)
    assert (service["User"], service["Restart"]) == (USERS[name], "always")
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    for path in credentials(service).values():
        here = Path(path.replace("%i", "node-0")).relative_to("/etc/ravan-flwr")
        assert f"../keys/{here}" in keys
    if analyze := shutil.which("systemd-analyze"):
        command = [analyze, "verify", str(ROOT / "deploy" / name)]
        errors = subprocess.run(command, capture_output=True, text=True).stderr
        lines = [line for line in errors.splitlines() if "is not executable" not in line]
        assert lines == []


def test_the_script_that_tries_the_units_is_bash_and_names_every_unit():
    """It needs root and minutes, so nothing runs it but a person: here its two scripts are read."""
    script = ROOT / "scripts" / "try_units.sh"
    outer, _, rest = script.read_text().partition("<<'END'\n")
    inner, end, after = rest.partition("\nEND\n")  # what its systemd runs
    assert end
    for text in (f"{outer}\n{after}", inner):
        read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (read.returncode, read.stderr) == (0, "")
    started = re.findall(r"^systemctl enable --now (.*)$", inner, re.MULTILINE)
    names = {f"{word.replace('@node-0', '@')}.service" for line in started for word in line.split()}
    assert names == {path.name for path in (ROOT / "deploy").glob("*.service")}
    # Each command of the app is one that there is.
    for command in re.findall(r"^ravan-flwr (\w+)", inner, re.MULTILINE):
        assert f'add_command(commands, "{command}"' in "".join(
            path.read_text() for path in (ROOT / "ravan_flwr" / "cli").glob("*.py")
        )
