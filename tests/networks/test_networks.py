"""docs/deploy.md typed as it is printed, on five hosts; then the network is broken (make networks).

The tests share the hosts and come in this order.
"""

import json
import re
import sys
import time

import pytest

from testing import ROOT
from testing.deployment import wait_for
from testing.network import Network, clock_library, why_not

pytestmark = [
    pytest.mark.networks,
    pytest.mark.skipif(bool(why := why_not()), reason=f"no network namespaces: {why}"),
]
NODES = 3
SOON = 400.0  # seconds; a busy machine is no fault
SERVERS = ("superlink", "superexec", "fence")
QUICK = "report=false local-steps=5"
RUN = "/var/lib/ravan-serverapp/runs"


def blocks(page, heading):
    """The commands under a heading, a text for each block, in order."""
    text = (ROOT / "docs" / page).read_text()
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return re.findall(r"^```\n(.*?)^```", section, re.M | re.S)


def for_node(number, text):
    """What the page prints for node 0, for another one."""
    for name in ("node-", "device-", "partition-id="):
        text = text.replace(f"{name}0", f"{name}{number}")
    return text


class Site:
    """What the page sets up."""

    def __init__(self, network):
        self.network = network
        self.server, self.operator = network.hosts["server"], network.hosts["operator"]
        self.devices = [network.hosts[f"device-{n}"] for n in range(NODES)]
        self.programs = {}

    def set_up(self):
        exports = blocks("deploy.md", "1. Install, on every machine")[1]
        assert exports.startswith("export PATH=/opt/ravan-flwr/.venv/bin")
        self.network.exports = exports.replace("POLL_INTERVAL=0.1", "POLL_INTERVAL=0.5")

        make, copy, look, delete, _ = blocks("deploy.md", "2. Keys, on the operator's machine")
        self.operator.type(make)
        for number in range(NODES):
            self.operator.type(for_node(number, copy) if number else copy)
        sums = re.findall(r"^[0-9a-f]{64}", self.operator.type(look), re.M)
        own = self.operator.run("sha256sum ~/keys/superlink/superlink.key ~/keys/node-0/node.key")
        assert sums == re.findall(r"^[0-9a-f]{64}", own, re.M)
        self.operator.type(delete)

        folders, *self.servers, doctor = blocks("deploy.md", "3. The server")
        assert len(self.servers) == 3
        self.server.type(folders)
        self.start_server()
        said = self.server.type(doctor)
        assert "TO DO" not in said

        tunnel, config, register = blocks("deploy.md", "4. Registering SuperNodes, by the operator")
        self.operator.type(tunnel)
        self.operator.type(config)
        self.operator.type(register)
        steps = blocks("deploy.md", "5. A SuperNode, on each device")
        self.doctor, self.supernode, self.check = steps
        last = self.devices[-1]
        last.run("sed -i s/192.0.2.1/127.0.0.2/ /etc/hosts")
        self.network.relay(last, "127.0.0.2:8000", "192.0.2.1:8000", delay=0.1, loss=0.05)
        for number, device in enumerate(self.devices):
            said = device.run(for_node(number, self.config(self.doctor)))
            assert "TO DO" not in said
            self.start_device(number)
        self.wait_for_nodes(NODES)

    def config(self, text):
        """The preset's data in place of a device's own, and a warm worker, which saves a minute."""
        assert 'data-path="/data/mine" budget=0.5' in text
        return text.replace('data-path="/data/mine" budget=0.5', "warm-worker=true")

    def restart_server(self):
        for name in SERVERS:
            self.programs[name].end()
        self.start_server()

    def start_server(self, *names):
        for name, text in zip(SERVERS, self.servers, strict=True):
            if names and name not in names:
                continue
            # As the units do.
            self.programs[name] = self.server.start(again(text, 2))
            if name == "superlink":
                wait_for(lambda: "Uvicorn running" in self.programs["superlink"].log, "it", SOON)

    def start_device(self, number, before="", after=""):
        text = for_node(number, self.config(self.supernode))
        device = self.devices[number]
        self.programs[f"node-{number}"] = device.start(again(text, 5, before, after))
        text = for_node(number, self.check).replace("EVERY=60", "EVERY=5")
        self.programs[f"check-{number}"] = device.start(text)

    def online(self):
        told = self.operator.run("flwr supernode list edge --format json")
        return sum(node["status"] == "online" for node in json.loads(told)["nodes"])

    def wait_for_nodes(self, number):
        wait_for(lambda: self.online() == number, f"{number} nodes", SOON, pause=2)

    def run(self, rounds, more="", folder=None):
        """`flwr run` of the page, with other numbers of rounds and another folder."""
        text = blocks("deploy.md", "6. A run, by the operator")[0]
        folder = folder or f"{RUN}/{time.monotonic_ns()}"
        text = text.replace("num-rounds=3", f"num-rounds={rounds} {QUICK} {more}").replace(
            RUN, folder
        )
        assert folder in text
        # What a person types while the page's `flwr run` holds the terminal is in another one.
        return Run(self, self.operator.start(text), folder)


def again(text, pause, before="", after=""):
    """What a unit with Restart=always does with the last command of a block."""
    *setting, command = re.sub(r"\\\n\s*", "", text).strip().splitlines()
    command = f"{before or 'exec'} {command}"
    return "\n".join([*setting, f"while true; do ( {command} ); {after} sleep {pause}; done"])


class Run:
    def __init__(self, site, program, folder):
        self.site, self.program, self.folder = site, program, folder
        wait_for(lambda: self.id or self.failed, "the run to begin", SOON)
        assert self.id, program.log

    @property
    def failed(self):
        return self.program.process.poll() is not None

    @property
    def id(self):
        found = re.search(r"Successfully started run (\d+)", self.program.log)
        return found and found[1]

    @property
    def rounds(self):
        text = self.site.server.run(f"cat {self.folder}/*/rounds.jsonl 2>/dev/null || true")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def status(self):
        told = self.site.operator.run(f"flwr ls edge --run-id {self.id} --format json")
        return json.loads(told)["runs"][0]["status"]

    def wait_for_rounds(self, number, patience=SOON):
        wait_for(lambda: len(self.rounds) >= number, f"round {number}", patience, pause=1)

    def wait(self, patience=SOON):
        wait_for(lambda: self.status.startswith("finished"), "its end", patience, pause=2)
        return self.status

    def took_part(self, since=0):
        """How many clients were used in each round."""
        return [len(record["clients"]) for record in self.rounds[since:]]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    names = ["server", "operator", *(f"device-{n}" for n in range(NODES))]
    with Network(tmp_path_factory.mktemp("network"), names) as network:
        site = Site(network)
        try:
            site.set_up()
            yield site
        finally:  # what a failed test needs
            for name, program in sorted(site.programs.items()):
                sys.stdout.write(f"--- {name}\n{program.log[-3000:]}\n")


def test_the_page_leads_to_a_run_in_which_all_take_part(site):
    """Device 2 has 200 ms of delay and loses 5 % of what it sends and receives."""
    before = [device.bytes_on_link() for device in site.devices]
    run = site.run(2)
    assert run.wait() == "finished:completed", run.program.log
    assert run.took_part() == [NODES, NODES]
    after = [device.bytes_on_link() for device in site.devices]
    up, down = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in (0, 1))
    payload = sum(record["bytes-up"] + record["bytes-down"] for record in run.rounds)
    estimate = sum(record["link-bytes-estimate"] for record in run.rounds)
    sys.stdout.write(f"links: up {up}, down {down}, payload {payload}, estimate {estimate}\n")
    assert down < 4_500_000  # each device gets the app bundle, compressed
    assert 0.6 < (up + down) / estimate < 1.6


def test_a_slow_link_a_cut_one_and_a_superlink_that_is_away_for_seconds_cost_rounds_only(site):
    run = site.run(60)
    run.wait_for_rounds(1)
    site.devices[1].limit(1_000_000)
    there = len(run.rounds)
    wait_for(lambda: NODES in run.took_part(there), "a round of all", SOON, pause=1)

    site.devices[1].limit(None)
    site.devices[1].cut()
    time.sleep(40)
    site.devices[1].mend()
    there = len(run.rounds)
    wait_for(lambda: NODES in run.took_part(there), "device 1 to take part again", SOON, pause=1)

    site.programs["superlink"].end()
    time.sleep(10)
    site.start_server("superlink")
    there = len(run.rounds)
    run.wait_for_rounds(there + 2)
    assert run.status == "running"
    wait_for(lambda: NODES in run.took_part(there), "all to take part again", SOON, pause=1)
    assert [record["round"] for record in run.rounds] == list(range(1, len(run.rounds) + 1))

    # Away for longer: the run has failed, and goes on where it was.
    site.programs["superlink"].end()
    time.sleep(90)
    site.start_server("superlink")
    wait_for(lambda: run.status == "finished:failed", "the run to count as failed", SOON, pause=2)
    directory = site.server.run(f"echo {run.folder}/*").strip()
    there = len(run.rounds)
    site.wait_for_nodes(NODES)
    resumed = site.run(there + 2, f"resume='{directory}'", folder=run.folder)
    assert resumed.wait() == "finished:completed", resumed.program.log
    assert [record["round"] for record in run.rounds] == list(range(1, there + 3))
    assert max(run.took_part(there)) == NODES


def test_a_device_vanishes_and_comes_back_with_another_address(site):
    node, check = site.programs["node-1"], site.programs["check-1"]
    site.devices[1].cut()  # nothing of it is heard
    node.end()
    check.end()
    site.devices[1].connect("192.0.2.77")
    site.devices[1].mend()
    site.start_device(1)
    node = site.programs["node-1"]
    wait_for(lambda: "SuperNode ID" in node.log, "its admission", SOON)
    assert "Failed to activate" in node.log  # before
    site.wait_for_nodes(NODES)


def test_a_clock_that_is_ahead_ends_a_supernode_with_status_0_and_it_is_started_again(
    site, tmp_path
):
    if (library := clock_library(tmp_path)) is None:
        pytest.skip("no C compiler")
    site.programs["node-0"].end()
    site.programs["check-0"].end()
    ahead = f"LD_PRELOAD={library} AHEAD="
    doctor = for_node(0, site.config(site.doctor)).replace("ravan-flwr", f"{ahead}60 ravan-flwr", 1)
    with pytest.raises(RuntimeError, match=r"TO DO clock +this machine's clock is 6\d s ahead"):
        site.devices[0].run(doctor)
    # The clock is mended after a while.
    clock = f"env $(test -e /var/mended || echo {ahead}60)"
    site.start_device(0, clock, after="echo ended with $?;")
    node = site.programs["node-0"]
    wait_for(lambda: "ended with 0" in node.log, "its end", SOON)
    site.devices[0].run("touch /var/mended")
    wait_for(lambda: "SuperNode ID" in node.log, "its admission", SOON)
    site.wait_for_nodes(NODES)


def test_after_an_expired_certificate_is_renewed_all_devices_take_part(site):
    renew = blocks("operating.md", "Adding, replacing, revoking")[0]
    assert "rm -r ~/keys/superlink" in renew
    expire = (
        "from ravan_flwr.launch import credentials; from ravan_flwr.cli import main; import sys; "
        "credentials.SUPERLINK_DAYS = -0.5; main(sys.argv[1:])"
    )
    expired = renew.replace("ravan-flwr keys", f"python -c {expire!r} keys".replace("'", '"'))
    assert expired != renew
    site.operator.run(expired.splitlines()[0])
    site.operator.run(expired.splitlines()[1])
    site.operator.type(expired.splitlines()[2])
    site.restart_server()
    logs = [site.programs[f"node-{number}"] for number in range(NODES)]
    given_up = "SSL/TLS handshake error"
    wait_for(lambda: all(given_up in node.log for node in logs), "all to give up", SOON)
    site.devices[0].run("curl -sf localhost:9094/health")  # 200, as if nothing had happened
    doctor = for_node(0, site.config(site.doctor))
    with pytest.raises(RuntimeError, match="TO DO expiry"):
        site.devices[0].run(doctor)

    for line in renew.splitlines():
        site.operator.type(line)
    site.restart_server()
    site.wait_for_nodes(NODES)
    assert "had no connection to server.example.org:8000" in site.programs["check-0"].log
    run = site.run(1)
    assert run.wait() == "finished:completed"
    assert run.took_part() == [NODES]
