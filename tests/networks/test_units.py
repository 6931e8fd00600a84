"""The units of docs/deploy.md, typed as it is printed, on three hosts (make networks).

The tests emulate systemd: users, environment, copies of the keys, folders, the command, and its
restart whenever it ends. They do not emulate its confinement. No program is a fork, since a fork
would keep the user of the fork server.
"""

import re
import shlex
import sys

import pytest

from tests.support.deployment import wait_for
from tests.support.network import Network, Program
from tests.support.site import SITE_TIMEOUT, Site, blocks, for_node, site_unavailable

pytestmark = [
    pytest.mark.networks,
    pytest.mark.skipif(bool(reason := site_unavailable()), reason=reason),
]
FOLDERS = {"StateDirectory": "/var/lib", "CacheDirectory": "/var/cache"}


def start_unit(host, name):
    """Start an enabled unit as systemd does."""
    stem, at, instance = name.partition("@")
    text = host.run(f"cat /etc/systemd/system/{stem}{at}.service").replace("%i", instance)
    settings: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", re.sub(r"\\\n\s*", "", text), re.M):
        settings.setdefault(key, []).append(value)
    (user,), credentials = settings["User"], f"/run/credentials/{name}.service"
    before = ["set -e", "umask 077"]
    for copied in settings.get("LoadCredential", []):
        credential, path = copied.split(":")
        before.append(f"install -D -m 0400 -o {user} {path} {credentials}/{credential}")
    before += [f"chmod 755 /run/credentials; chown {user} {credentials}"]
    for setting, folder in FOLDERS.items():
        for path in " ".join(settings.get(setting, [])).split():
            before.append(f"install -d -m 0700 -o {user} -g {user} {folder}/{path}")
    host.run("\n".join(before))
    inside = [f"export {shlex.quote(variable)}" for variable in settings.get("Environment", [])]
    inside += ["set -a", *(f". {path}" for path in settings.get("EnvironmentFile", [])), "set +a"]
    command = re.sub(r"\$\{(\w+)\}", r'"${\1}"', settings["ExecStart"][0])
    inside += [
        f"export CREDENTIALS_DIRECTORY={credentials}",
        f"cd {settings.get('WorkingDirectory', ['/'])[0]}",
        f"exec setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs {command}",
    ]
    assert settings["Restart"] == ["always"]
    bare = "env -i HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 bash -c " + shlex.quote("\n".join(inside))
    return host.start(f"while true; do {bare}; sleep {settings['RestartSec'][0]}; done")


def type_page(host, heading, edit):
    """Type a section's commands; return the units' programs, and the section's `doctor` command."""
    (text,) = blocks("deploy.md", heading)
    programs: dict[str, Program] = {}
    doctor = ""
    for line in text.splitlines():
        if line.startswith("systemctl enable --now "):
            units = line.removeprefix("systemctl enable --now ").split()
            programs |= {name: start_unit(host, name) for name in units}
        elif line.startswith("ravan-flwr doctor"):
            doctor = line
        elif not line.startswith("systemctl"):
            host.type(f"cd /opt/ravan-flwr\n{line}")
        edit(line)
    assert programs
    assert doctor
    return programs, doctor


@pytest.fixture
def site(tmp_path):
    with Network(tmp_path, ["server", "operator", "device-0"]) as network:
        for host in network.hosts.values():
            host.run("chmod o+x /root")  # the tests' Python may be there
        yield Site(network)


def test_a_run_works_with_the_units(site):
    site.make_keys()
    server, (device,) = site.server, site.devices
    programs, doctor = type_page(server, "Units on the server", lambda line: None)
    try:
        superlink = programs["ravan-superlink"]
        wait_for(lambda: "Uvicorn running" in superlink.log, "the SuperLink", SITE_TIMEOUT)
        site.register()
        assert "TO DO" not in server.run(doctor)

        def edit(line):
            if "then edit it" in line:  # for the preset's data
                device.run("sed -i 's/3 data-path.*budget=0.5/1/' /etc/ravan-flwr/node-0.env")

        device_programs, doctor = type_page(device, "Units on a device", edit)
        programs |= device_programs
        site.wait_for_nodes(1)
        assert "TO DO" not in device.run(for_node(0, doctor))
        run = site.run(1)
        assert run.wait() == "finished:completed", run.program.log
        assert run.took_part() == [1]
        # The processes' users, and the restart of an ended process.
        find_users = "ps -e -o user:20=,comm= | awk '$2 ~ /^flower-/ {print $1}'"
        assert set(server.run(find_users).split()) == {"ravan", "ravan-app"}
        assert set(device.run(find_users).split()) == {"ravan"}
        node = programs["ravan-supernode@node-0"]
        find_node = "ps -u ravan -o pid=,comm= | awk '/flower-supernod/ {print $1}'"
        device.run(f"kill $({find_node})")
        wait_for(lambda: node.log.count("SuperNode ID") > 1, "its start", SITE_TIMEOUT)
    except BaseException:
        for name, program in programs.items():
            sys.stdout.write(f"--- {name}\n{program.log[-2000:]}\n")
        raise
