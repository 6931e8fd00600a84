"""The tutorial of five machines works as it is printed, on loopback, each machine in a folder."""

import json
import re
import shlex
from pathlib import Path

import pytest

from ravan_flwr.launch.superlink import _free_ports
from testing.deployment import Deployment, wait_for
from tests import ROOT
from tests.own_models import make_bert

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)

PAGE = (ROOT / "docs" / "five-machines.md").read_text(encoding="utf-8")
DEVICES = 5


class Machines(Deployment):
    """Six machines, without keys: all that is started is what the page says."""

    def __enter__(self):
        (self.port,) = _free_ports(1)
        return self

    def here(self, text, machine):
        """Put the machine's own folder in the place of /srv, and the ports that are free."""
        home = self._home(machine)
        text = text.replace("/srv/model", str(self.folder / "model"))
        text = text.replace("/srv/ravan-flwr", str(self.app)).replace("/srv", str(home))
        text = text.replace("0.0.0.0 --port 8000", f"127.0.0.1 --port {self.port}")
        return re.sub(r"(SERVER|127\.0\.0\.1):8000", f"127.0.0.1:{self.port}", text)

    def begin(self, machine, line):
        """Start a command in the app's folder."""
        return self.start(machine, "sh", "-c", f"cd {shlex.quote(str(self.app))} && exec {line}")

    def finish(self, machine, line):
        process = self.begin(machine, line)
        assert process.wait(1800) == 0, self.log(machine)
        return self.log(machine)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def machines(tmp_path_factory, python):
    with Machines(tmp_path_factory.mktemp("five"), DEVICES, scripts=python.scripts) as running:
        make_bert(running.folder / "model")
        yield running
    assert running.left_running == []


def commands():
    """The page's commands in their order: (machine, is it started and left running, line)."""
    for block in blocks("bash"):
        comment, *lines = block.strip().splitlines()
        machine = "server" if "server" in comment else "device-0"
        for line in lines:
            yield machine, "terminal of its own" in comment, line


def test_every_command_of_the_page_works_in_its_order(machines, capsys):
    make, use = blocks("python")
    for device in range(DEVICES + 1):
        name = f"device-{device}" if device < DEVICES else "server"
        text = make.replace("device = 0", f"device = {device}")
        # Short texts: most of the time of every step goes there.
        text = text.replace("rows.setdefault(text, name)", "rows.setdefault(text[:80], name)")
        if name == "server":
            text = text.replace("/srv/texts", "/srv/sample")
        exec(compile(machines.here(text, name), "docs/five-machines.md", "exec"), {})
    (config,) = blocks("toml")
    (machines._home("server") / "config.toml").write_text(machines.here(config, "server"))
    ran = []
    for machine, stays, line in commands():
        ran.append(line.split()[0])
        if "flower-superlink" in line:
            machines._superlink = machines.begin("superlink", machines.here(line, machine))
            wait_for(lambda: "startup complete" in machines.log("superlink"), "the server")
        elif "flower-supernode" in line:
            for device, port in enumerate(_free_ports(DEVICES)):
                own = line.replace("partition-id=0", f"partition-id={device}") + f" --port {port}"
                name = f"device-{device}"
                machines._supernodes[device] = machines.begin(name, machines.here(own, name))
        else:
            assert not stays
            told = machines.finish(machine, machines.here(line, machine))
    assert ran == ["ravan-flwr", "ravan-flwr", "flower-superlink", "flower-supernode", "flwr", "ls"]
    (run,) = (machines._home("server") / "runs").iterdir()
    assert told.strip() == run.name
    summary = json.loads((run / "summary.json").read_text())
    merged = [{"partition-id": n, "folder": "merged"} for n in range(DEVICES)]
    assert summary["delivered"] == merged
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == 10
    assert all(len(record["clients"]) == DEVICES for record in rounds)
    exec(compile(machines.here(use, "device-4"), "docs/five-machines.md", "exec"), {})
    assert re.search(r"\{'label': '\w+(\.\w+)*', 'score': 0\.\d+", capsys.readouterr().out)
