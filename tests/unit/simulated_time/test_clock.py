"""Simulated time: three clients by hand, hours online by a plain loop, device files."""

import math
import re
import time
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.simulated_time.clock import SimulatedClock, finish
from ravan_flwr.simulated_time.devices import DECILES, MBIT, Device, make_devices


def test_three_clients_by_hand():
    """1 MB down, 30 Gflop, 0.5 MB up: 1 + 3 + 1 s, 0.1 + 30 + 0.1 s, 10 + 1 + 10 s."""
    clock = SimulatedClock([
        Device("a", 1e10, 1e6, 5e5), Device("b", 1e9, 1e7, 5e6), Device("c", 3e10, 1e5, 5e4),
    ])  # fmt: skip
    arrivals = [clock.send(name, i, 10**6, 3e10, 5 * 10**5) for i, name in enumerate("abc")]
    assert arrivals == pytest.approx([5.0, 30.2, 21.0])
    assert clock.arrived("abc") == []
    clock.wait(1000)
    assert (clock.arrived("abc"), clock.now) == (["a"], 5.0)
    clock.forget("a")
    clock.wait(1.0)
    assert (clock.arrived("bc"), clock.now) == ([], 6.0)
    assert clock.send("d", 0, 10**6, 3e10, 5 * 10**5) == 11.0  # it starts when it is sent
    assert clock.send("e", 0, 10**6, 3e10, 5 * 10**5) == 16.0  # and after the device's earlier work
    for _ in range(4):
        clock.wait(1000)
    assert clock.arrived("bcde") == ["d", "e", "c", "b"]
    assert clock.now == pytest.approx(30.2)
    clock.wait(10)
    assert clock.now == pytest.approx(40.2)


@pytest.mark.parametrize("begin", [0.07, 0.29, 1.13, 8.01, 22.0])
def test_after_waiting_for_a_device_it_is_online(begin):
    device = Device("a", 1e10, 1e6, 5e5, online=(begin, begin + 2))
    clock = SimulatedClock([device])
    for _ in range(50):
        clock.wait_for_node()
        assert clock.online(0)


def test_simulating_ten_thousand_clients_is_fast():
    """200 in flight of 10,000: less than 2 ms an update, of this process's time."""
    clock = SimulatedClock(make_devices("edge-gpus", 0, 10_000))
    flying = {str(i) for i in range(200)}
    for i in range(200):
        clock.send(str(i), i, 10**6, 1e12, 10**6)
    began, number = time.process_time(), 2000
    for i in range(200, 200 + number):
        while not (here := clock.arrived(flying)):
            clock.wait(1e9)
        clock.forget(here[0])
        flying.remove(here[0])
        clock.send(str(i), i, 10**6, 1e12, 10**6)
        flying.add(str(i))
    assert time.process_time() - began < 0.002 * number


def slow_end(start, seconds, online):
    """Count hour by hour; all times are whole hours."""
    hour = start
    while seconds:
        if (hour - online[0]) % 24 < online[1] - online[0]:
            seconds -= 1
        hour += 1
    return hour


@given(st.integers(0, 100), st.integers(1, 80), st.integers(0, 23), st.integers(1, 24))
def test_work_continues_in_the_hours_online(start, hours, begin, length):
    online = (float(begin), float(begin + length))
    ends = finish(start * 3600.0, hours * 3600.0, online)
    assert ends == 3600.0 * slow_end(start, hours, online)


@pytest.mark.parametrize("profile", ["uniform", "phones", "edge-gpus"])
def test_a_profile_is_a_function_of_the_seed(profile):
    devices = make_devices(profile, 3, 400)
    assert devices == make_devices(profile, 3, 400)
    assert devices[:7] == make_devices(profile, 3, 7)
    assert (devices == make_devices(profile, 4, 400)) == (profile == "uniform")


def test_links_have_the_published_deciles():
    down = sorted(d.downlink / MBIT for d in make_devices("edge-gpus", 0, 4000))
    assert down[400] == pytest.approx(DECILES[0], rel=0.15)
    assert down[3600] == pytest.approx(DECILES[1], rel=0.15)
    phones = make_devices("phones", 0, 4000)
    assert median(d.downlink for d in phones) / MBIT == pytest.approx(166.13, rel=0.1)
    assert median(d.uplink for d in phones) / MBIT == pytest.approx(21.08, rel=0.1)


FILE = """
- {name: 3090, clients: 2, teraflops: 1, downlink: 100, uplink: 20, memory: 8}
- {name: slow, teraflops: 0.1, downlink: 8, uplink: 0.8, online: 22-6}
"""


def test_a_file_gives_devices_in_its_order_and_may_have_more_than_there_are_clients(tmp_path):
    file = tmp_path / "devices.yaml"
    file.write_text(FILE)
    fast, again, slow = make_devices(str(file), 0, 3)
    assert fast == again == Device("3090", 1e12, 12.5e6, 2.5e6, 8e9, (0.0, 24.0))
    assert slow == Device("slow", 1e11, 1e6, 1e5, math.inf, (22.0, 30.0))
    file.write_text(FILE.replace("clients: 2", f"clients: {10**15}"))
    assert len(make_devices(str(file), 0, 4)) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE, "got devices of 3 clients, expected 4; raise `clients`"),
        ("{", "devices.yaml, line 1, column 2: "),
        (FILE.replace("uplink: 20", "uplink: 20, uplink: 2"), "the key 'uplink' is repeated"),
        (FILE.replace("22-6", "2022-13-45"), "line 3, column 66: '2022-13-45' is no"),
        (FILE.replace("22-6", "2022-12-05"), "device 1.online = datetime.date(2022, 12, 5): exp"),
        ("[" * 10_000, "it is nested too deeply"),
        ("", "got NoneType, expected a list"),
        ("- 3", "device 0 is no mapping, expected one with ['clients'"),
        (FILE.replace("0.8", "0"), "device 1.uplink = 0: expected a number above 0"),
        (FILE.replace("100", "-1"), "device 0.downlink = -1: expected a number above 0"),
        (FILE.replace("100", ".inf"), "device 0.downlink = inf: expected a number above 0"),
        (FILE.replace("100", "true"), "device 0.downlink = True: expected a number above 0"),
        (FILE.replace("22-6", "25-6"), "online = '25-6': expected hours of a day"),
        (FILE.replace("22-6", "6"), "online = 6: expected hours of a day"),
        (FILE.replace("clients: 2", "clients: 0"), "clients = 0: expected a whole number"),
        (FILE.replace("memory: 8", "memory: .nan"), "memory = nan: expected a number above 0"),
        (FILE.replace("memory", "memroy"), "memroy is unknown: did you mean 'memory'?"),
        (FILE.replace("teraflops: 1,", ""), "teraflops is missing; expected the fields"),
    ],
)
def test_an_invalid_device_file_is_reported(text, message, tmp_path):
    (tmp_path / "devices.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        make_devices(str(tmp_path / "devices.yaml"), 0, 4)


def test_an_unknown_profile_is_reported():
    with pytest.raises(ValueError, match=r"devices = 'edge': .* expected one of uniform"):
        make_devices("edge", 0, 4)
