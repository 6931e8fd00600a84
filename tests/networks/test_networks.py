"""docs/deploy.md typed as it is printed, on five hosts; then devices have faults (make networks).

The tests share the hosts, and most of them a run, and run in this order.
"""

import sys
import time

import pytest

from tests.support.deployment import wait_for
from tests.support.site import SITE_TIMEOUT, site_unavailable

pytestmark = [
    pytest.mark.networks,
    pytest.mark.skipif(bool(reason := site_unavailable()), reason=reason),
]


def closed_without(run, number, since):
    """Return whether a round after the first `since` closed without this device."""
    return any(
        number not in {client["partition-id"] for client in record["clients"]}
        for record in run.rounds[since:]
    )


def wait_for_upload(device):
    """Return while the device sends more than its periodic calls: 10 kB in 1.5 seconds."""
    samples = []

    def is_uploading():
        samples.append((time.monotonic(), device.bytes_on_link()[0]))
        recent = [count for at, count in samples if at > samples[-1][0] - 1.5]
        return recent[-1] - recent[0] > 10_000

    wait_for(is_uploading, "an upload", SITE_TIMEOUT)


def test_a_run_set_up_by_the_page_uses_all_devices(site):
    """Device 2 has 200 ms of delay and loses 5 % of its packets."""
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


def test_a_device_whose_link_fails_during_an_upload_takes_part_later(site, run):
    num_rounds = len(run.rounds)
    site.devices[1].limit(100_000)  # so that its upload takes seconds
    wait_for_upload(site.devices[1])
    site.devices[1].cut()
    site.devices[1].limit(None)
    time.sleep(40)
    missed = lambda: closed_without(run, 1, num_rounds)  # noqa: E731
    wait_for(missed, "a round without it", SITE_TIMEOUT, pause=1)
    site.devices[1].mend()
    run.wait_for_all()


def test_a_device_that_restarts_with_another_address_takes_part(site, run):
    num_rounds = len(run.rounds)
    site.devices[1].cut()  # the server receives no message of its end
    site.end_device(1)
    site.devices[1].connect("192.0.2.77")
    site.devices[1].mend()
    node = site.start_device(1)
    wait_for(lambda: "SuperNode ID" in node.log, "its admission", SITE_TIMEOUT)
    assert "Failed to activate" in node.log  # at the first attempt
    run.wait_for_all()
    assert closed_without(run, 1, num_rounds)
