"""The number of cores respects containers, affinity and studies."""

import os

import pytest

from ravan_flwr.training import machine
from ravan_flwr.training.machine import CORES, usable_cores


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(machine, "_quotas", lambda _: [float("inf")])


def test_affinity_and_a_studys_share_of_cores_count():
    assert usable_cores({}) == 16
    assert usable_cores({CORES: "4"}) == 4
    assert usable_cores({CORES: "99"}) == 16
    assert usable_cores({CORES: ""}) == 16


@pytest.mark.parametrize("share", ["0", "many", "-1", "1.5", "²", "9" * 5000, "\x1b[2J"])
def test_an_invalid_number_of_cores_is_refused(share):
    message = (
        f"{CORES} = '[^\x1b]{{1,50}}' in the environment: expected .* 1 or more; set such a number"
    )
    with pytest.raises(ValueError, match=message):
        usable_cores({CORES: share})


@pytest.mark.parametrize(("quota", "number"), [(2.5, 2), (0.3, 1), (64.0, 16)])
def test_a_cgroup_quota_limits_the_cores(monkeypatch, quota, number):
    monkeypatch.setattr(machine, "_quotas", lambda _: [quota])
    assert usable_cores({}) == number


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3.0),
        ("3:cpu,cpuacct:/x\n", {
            "cpu,cpuacct/x/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
        }, 2.0),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "9\n"}, None),
        ("4:memory:/x\n", {"memory/x/cpu.max": "1 1\n"}, None),
        ("0::/../..\n", {"cpu.max": "nonsense"}, None),
        ("nonsense", {}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_quotas_of_both_cgroup_versions_are_read(tmp_path, monkeypatch, groups, files, found):
    monkeypatch.undo()
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    quotas = list(machine._quotas(tmp_path / "groups", tmp_path / "root"))
    assert min(quotas) == (found or float("inf"))
    assert list(machine._quotas(tmp_path / "absent")) == [float("inf")]
