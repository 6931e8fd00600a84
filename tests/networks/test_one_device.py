"""A short part of `make networks` for `make test`: the page's commands and one device."""

import sys

import pytest

from tests.support.network import Network
from tests.support.site import Site, site_unavailable

pytestmark = pytest.mark.skipif(bool(reason := site_unavailable()), reason=reason)


def test_a_run_set_up_by_the_page_uses_a_device_with_a_poor_link(tmp_path, python):
    """The device has 1 Mbit/s and 200 ms of delay, and loses 5 %."""
    with Network(tmp_path, ["server", "operator", "device-0"], python.inside) as network:
        site = Site(network)
        try:
            site.set_up()
            (device,) = site.devices
            device.limit(1_000_000)
            sent, received = device.bytes_on_link()
            run = site.run(1)
            assert run.wait() == "finished:completed", run.program.log
        except BaseException:
            site.show_logs()
            raise
        (record,) = run.rounds
        assert [client["partition-id"] for client in record["clients"]] == [0]
        up, down = device.bytes_on_link()
        estimate = record["link-bytes-estimate"]
        sys.stdout.write(f"link: up {up - sent}, down {down - received}, estimate {estimate}\n")
        assert 0.6 < (up - sent + down - received) / estimate < 1.6
