"""docs/deploy.md typed as it is printed, on five hosts; then devices have faults (make networks).

The tests share the hosts, and most of them a run. They come in this order.
"""

import sys
import time
from pathlib import Path

import pytest

from testing.deployment import wait_for
from testing.network import clock_library
from testing.site import SOON, for_node, why_no_site

pytestmark = [
    pytest.mark.networks,
    pytest.mark.skipif(bool(why := why_no_site()), reason=why),
]


def without(run, number, since):
    """Whether a round was closed in which this device did not take part."""
    return any(
        number not in {client["partition-id"] for client in record["clients"]}
        for record in run.rounds[since:]
    )


def wait_for_upload(device):
    """Return while it sends more than its calls do: 10 kB in a second and a half."""
    sent = []

    def uploads():
        sent.append((time.monotonic(), device.bytes_on_link()[0]))
        recent = [count for at, count in sent if at > sent[-1][0] - 1.5]
        return recent[-1] - recent[0] > 10_000

    wait_for(uploads, "an upload", SOON)


def test_the_page_leads_to_a_run_in_which_all_take_part(site):
    """Device 2 has 200 ms of delay and loses 5 % of what it sends and receives."""
    before = [device.bytes_on_link() for device in site.devices]
    run = site.run(2)
    assert run.wait() == "finished:completed", run.program.log
    assert run.took_part() == [3, 3]
    after = [device.bytes_on_link() for device in site.devices]
    up, down = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in (0, 1))
    payload = sum(record["bytes-up"] + record["bytes-down"] for record in run.rounds)
    estimate = sum(record["link-bytes-estimate"] for record in run.rounds)
    sys.stdout.write(f"links: up {up}, down {down}, payload {payload}, estimate {estimate}\n")
    assert down < 4_500_000  # each device gets the app bundle, compressed
    assert 0.6 < (up + down) / estimate < 1.6


def test_a_device_with_a_slow_link_takes_part(site, run):
    site.devices[1].limit(1_000_000)
    run.wait_for_all()
    site.devices[1].limit(None)


def test_a_link_that_is_cut_during_an_upload_costs_rounds_only(site, run):
    there = len(run.rounds)
    site.devices[1].limit(100_000)  # its upload takes seconds
    wait_for_upload(site.devices[1])
    site.devices[1].cut()
    site.devices[1].limit(None)
    time.sleep(40)
    wait_for(lambda: without(run, 1, there), "a round without it", SOON, pause=1)
    site.devices[1].mend()
    run.wait_for_all()


def test_a_host_vanishes_and_comes_back_with_another_address(site, run):
    there = len(run.rounds)
    site.devices[1].cut()  # nothing of it is heard
    site.end_device(1)
    site.devices[1].connect("192.0.2.77")
    site.devices[1].mend()
    node = site.start_device(1)
    wait_for(lambda: "SuperNode ID" in node.log, "its admission", SOON)
    assert "Failed to activate" in node.log  # before
    run.wait_for_all()
    assert without(run, 1, there)


def test_a_clock_that_is_ahead_ends_a_supernode_with_status_0_and_it_is_started_again(
    site, run, tmp_path
):
    if (library := clock_library(tmp_path)) is None:
        pytest.skip("no C compiler")
    site.end_device(0)
    # Without the fork server, whose clock is this machine's.
    real = f"PATH={Path(sys.executable).parent}:$PATH"
    ahead = f"{real} LD_PRELOAD={library} AHEAD="
    doctor = for_node(0, site.doctor).replace("ravan-flwr", f"{ahead}60 ravan-flwr", 1)
    with pytest.raises(RuntimeError, match=r"TO DO clock +this machine's clock is 6\d s ahead"):
        site.devices[0].run(doctor)
    # The clock is mended after a while.
    clock = f"env $(test -e /var/mended || echo {ahead}60)"
    node = site.start_device(0, clock, after="echo ended with $?;")
    wait_for(lambda: "ended with 0" in node.log, "its end", SOON)
    site.devices[0].run("touch /var/mended")
    wait_for(lambda: "SuperNode ID" in node.log, "its admission", SOON)
    run.wait_for_all()
