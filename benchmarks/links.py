"""Compute a client's seconds and bytes of a round on its link, by payload, wire and bandwidth.

    python -m benchmarks.links              # computed
    python -m benchmarks.links --measure    # and transfers through `tbf` (root, seven minutes)
    python -m benchmarks.links --flower     # and the estimate's constants (root, five minutes)

Computed: the bytes of `link-bytes-estimate`, over the bandwidth. Measured: a payload each way over
TLS between two hosts in network namespaces, each limited by `tbf`, beside the computed seconds.
Flower is not part of that. The constants of the estimate are the bytes that a device's interface
counts while its SuperNode waits, and while it takes part in rounds of docs/deploy.md.
"""

import argparse
import itertools
import re
import tempfile
import time
from pathlib import Path

from ravan_flwr.messages.wire import num_bytes
from ravan_flwr.server.round_log import FRAMES, IDLE_BYTES, MESSAGE_BYTES
from tests.fork_server import LIBRARIES, ForkServer
from tests.support.deployment import ROUNDS_TIMEOUT, wait_for
from tests.support.network import Host, Network
from tests.support.site import Site, site_unavailable

PAYLOADS = (50_000, 1_000_000, 20_000_000)  # bytes of float32, each way, at a whole budget
RATES = (1, 10, 100)  # Mbit/s
WAYS = [(wire, budget) for wire in ("float32", "int8") for budget in (1.0, 0.5)]
PORT = 8443
IDLE, ROUNDS = 60, 10  # seconds and rounds that are counted for the constants
SERVER = f"""
import http.server, ssl, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(bytes(int(self.path[1:])))

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1] + "/superlink.crt", sys.argv[1] + "/superlink.key")
server = http.server.ThreadingHTTPServer(("0.0.0.0", {PORT}), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def payload_bytes(payload: int, wire: str, budget: float) -> tuple[int, int]:
    """Return the payload up and down: half a budget uploads half, and receives the whole."""
    numbers = payload // 4
    return num_bytes([(round(numbers * budget),)], wire), num_bytes([(numbers,)], wire)


def link_bytes(payload: int, wire: str, budget: float) -> int:
    """Return the bytes on the link for a message and its reply, both ways."""
    return round(FRAMES * sum(payload_bytes(payload, wire, budget))) + MESSAGE_BYTES


def show() -> None:
    """Print the table of computed values."""
    print("| payload | wire | budget | bytes on the link | " + " | ".join(
        f"{rate} Mbit/s" for rate in RATES) + " |")  # fmt: skip
    print("| --- " * (4 + len(RATES)) + "|")
    for payload in PAYLOADS:
        for wire, budget in WAYS:
            total = link_bytes(payload, wire, budget)
            seconds = (f"{8e-6 * total / rate:.3g}" for rate in RATES)
            print(f"| {payload:,} | {wire} | {budget:g} | {total:,} | {' | '.join(seconds)} |")


def measure(folder: Path) -> None:
    """Print the measured seconds and bytes of a payload each way, beside the computed ones."""
    with Network(folder, ["server", "device-0"]) as network:
        server, device = network.hosts["server"], network.hosts["device-0"]
        keys = folder / "keys"
        server.run(f"ravan-flwr keys {keys} --host server.example.org --nodes 1")
        (folder / "server.py").write_text(SERVER)
        server.start(f"exec python {folder}/server.py {keys}/superlink")
        wait_for(lambda: f":{PORT}" in server.run("ss -Hltn"), "the server to listen")
        certificate = keys / "authority" / "ca.crt"
        print("| payload | Mbit/s | seconds | computed | bytes on the link | x payload |")
        print("| --- | --- | --- | --- | --- | --- |")
        for rate in RATES:
            device.limit(rate * 1_000_000)
            for payload in PAYLOADS:
                before = sum(device.bytes_on_link())
                seconds = transfer(device, payload, certificate)
                total = sum(device.bytes_on_link()) - before
                computed = FRAMES * 2 * 8e-6 * payload / rate
                print(
                    f"| {payload:,} | {rate} | {seconds:.3g} | {computed:.3g} | {total:,} "
                    f"| {total / 2 / payload:.3f} |", flush=True,
                )  # fmt: skip


def transfer(device: Host, payload: int, certificate: Path) -> float:
    """Download and upload this many bytes; return the seconds, without the handshakes."""
    device.run(f"head -c {payload} /dev/zero > /run/payload")
    url = f"https://server.example.org:{PORT}"
    form = "'%{time_total} %{time_appconnect}\\n'"
    curl = f"curl -sf -m 600 -H Expect: --cacert {certificate} -o /dev/null -w {form}"
    output = device.run(f"{curl} {url}/{payload}; {curl} -T /run/payload {url}/")
    spans = [float(total) - float(begun) for total, begun in re.findall(r"(\S+) (\S+)\n", output)]
    assert len(spans) == 2
    return sum(spans)


def constants(folder: Path) -> None:
    """Print the bytes that a device's interface counts while it waits, and in rounds."""
    hosts = ["server", "operator", "device-0", "device-1"]  # the last one has a poor link
    with ForkServer(LIBRARIES) as python, Network(folder, hosts, python.inside) as network:
        site = Site(network)
        site.set_up()
        site.programs["check-0"].end()  # it would send a request every five seconds in tests

        def count() -> tuple[float, int]:
            return time.monotonic(), sum(site.devices[0].bytes_on_link())

        time.sleep(10)
        before = count()
        time.sleep(IDLE)
        idle = _difference(count(), before)
        a_second = idle[1] / idle[0]
        print(f"a SuperNode that waits: {a_second:.0f} bytes a second, {IDLE_BYTES} in the code")
        before, run = count(), site.run(ROUNDS + 1, "eval-every=100")
        counts = [before]
        for number in (1, ROUNDS + 1):
            wait_for(lambda: len(run.rounds) >= number, "a round", ROUNDS_TIMEOUT)  # noqa: B023
            counts.append(count())
        first, others = (_difference(after, before) for before, after in itertools.pairwise(counts))
        payload = sum(
            record["bytes-up"] + record["bytes-down"] for record in run.rounds[1:]
        ) / len(site.devices)  # fmt: skip
        message = (others[1] - FRAMES * payload - a_second * others[0]) / ROUNDS
        print(f"a message and its reply: {message:.0f} bytes, {MESSAGE_BYTES} in the code")
        payload /= ROUNDS
        bundle = (first[1] - 2 * message - a_second * first[0]) / FRAMES - payload
        print(f"the app bundle: {bundle:.0f} bytes")
        estimate = sum(record["link-bytes-estimate"] for record in run.rounds) / len(site.devices)
        print(f"the run: {first[1] + others[1]:,} bytes, {estimate:,.0f} estimated")


def _difference(after: tuple[float, int], before: tuple[float, int]) -> tuple[float, int]:
    return after[0] - before[0], after[1] - before[1]


def main() -> None:
    """Print the computed values, and the measured ones if selected."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="transfers through tbf, too")
    parser.add_argument("--flower", action="store_true", help="the estimate's constants, too")
    options = parser.parse_args()
    show()
    for selected, action in ((options.measure, measure), (options.flower, constants)):
        if not selected:
            continue
        if why := site_unavailable():
            raise SystemExit(f"no measurement, expected network namespaces and nginx: {why}")
        with tempfile.TemporaryDirectory(prefix="ravan-bench-") as folder:
            action(Path(folder))


if __name__ == "__main__":
    main()
