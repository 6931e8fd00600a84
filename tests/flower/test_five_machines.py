"""The tutorial of five machines works as printed, on loopback, each machine in a folder."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests import ROOT
from tests.own_models import make_bert
from tests.support.deployment import Deployment, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

_, _rest = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8").split("\n## Five machines\n")
PAGE = _rest.split("\n## ")[0]
DEVICES = 5


class Machines(Deployment):
    """Six machines without keys; the page's commands start everything."""

    def __enter__(self):
        self.port = self._new_port()
        return self

    def localized(self, text, machine):
        """Replace /srv by the machine's folder, and the ports by free ones."""
        home = self._home(machine)
        text = text.replace("/srv/model", str(self.folder / "model"))
        text = text.replace("/srv/ravan-flwr", str(self.app)).replace("/srv", str(home))
        text = text.replace("0.0.0.0 --port 8000", f"127.0.0.1 --port {self.port}")
        return re.sub(r"(SERVER|127\.0\.0\.1):8000", f"127.0.0.1:{self.port}", text)

    def start_line(self, machine, line):
        """Start a command in the app's folder."""
        return self.start(machine, "sh", "-c", f"cd {shlex.quote(str(self.app))} && exec {line}")

    def run_line(self, machine, line):
        process = self.start_line(machine, line)
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
    """Yield the page's commands in order: (machine, whether it occupies a terminal, line)."""
    for block in blocks("bash"):
        comment, *lines = block.strip().splitlines()
        machine = "server" if "server" in comment else "device-0"
        for line in lines:
            yield machine, "terminal of its own" in comment, line


def test_every_command_of_the_page_works_in_its_order(machines, capsys):
    make_data, use_model = blocks("python")
    for device in range(DEVICES + 1):
        name = f"device-{device}" if device < DEVICES else "server"
        text = make_data.replace("device = 0", f"device = {device}")
        # Short texts make every step faster.
        text = text.replace("rows.setdefault(text, name)", "rows.setdefault(text[:80], name)")
        if name == "server":
            text = text.replace("/srv/texts", "/srv/sample")
        exec(compile(machines.localized(text, name), "docs/deploy.md", "exec"), {})
    (config,) = blocks("toml")
    (machines._home("server") / "config.toml").write_text(machines.localized(config, "server"))
    executed = []
    for machine, occupies_terminal, line in commands():
        executed.append(line.split()[0])
        if "flower-superlink" in line:
            machines._superlink = machines.start_line(
                "superlink", machines.localized(line, machine)
            )
            wait_for(lambda: "startup complete" in machines.log("superlink"), "the server")
        elif "flower-supernode" in line:
            for device in range(DEVICES):
                command = line.replace("partition-id=0", f"partition-id={device}")
                command += f" --port {machines._new_port()}"
                name = f"device-{device}"
                machines._supernodes[device] = machines.start_line(
                    name, machines.localized(command, name)
                )
        else:
            assert not occupies_terminal
            output = machines.run_line(machine, machines.localized(line, machine))
    assert executed == [
        "ravan-flwr",
        "ravan-flwr",
        "flower-superlink",
        "flower-supernode",
        "flwr",
        "ls",
    ]
    (run,) = (machines._home("server") / "runs").iterdir()
    assert output.strip() == run.name
    summary = json.loads((run / "summary.json").read_text())
    merged = [{"partition-id": n, "folder": "merged"} for n in range(DEVICES)]
    assert summary["delivered"] == merged
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == 10
    assert all(len(record["clients"]) == DEVICES for record in rounds)
    exec(compile(machines.localized(use_model, "device-4"), "docs/deploy.md", "exec"), {})
    assert re.search(r"\{'label': '\w+(\.\w+)*', 'score': 0\.\d+", capsys.readouterr().out)
