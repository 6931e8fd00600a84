"""The fraction of time in which a GPU waits, of handmade traces."""

import pytest
import torch

from benchmarks.waiting import busy_seconds, kernels, traced, waiting_share


def event(start, duration, kind="kernel", phase="X"):
    return {"ph": phase, "cat": kind, "name": "k", "ts": start, "dur": duration}


# CPU operators and the GPU's copies of annotations are not GPU work.
BESIDE = [
    *(event(0, 1e6, kind) for kind in ("cpu_op", "gpu_user_annotation", "cuda_runtime")),
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "f", "cat": "ac2g", "ts": 3, "id": 1},
]


@pytest.mark.parametrize(
    ("events", "busy"),
    [
        ([], 0),
        (BESIDE, 0),
        ([event(10, 5), event(20, 5)], 10),  # one after the other, with a gap
        ([event(20, 5), event(10, 5)], 10),  # in any order
        ([event(10, 5), event(15, 5)], 10),  # without a gap
        ([event(10, 5), event(12, 5)], 7),  # two streams
        ([event(10, 20), event(12, 5), event(29, 2)], 21),  # one within another
        ([event(10, 5), event(10, 5)], 5),
        ([event("1.5", "2.5"), event(3, 2, "gpu_memcpy"), event(9, 1, "gpu_memset")], 4.5),
    ],
)
def test_the_gpu_is_busy_in_the_union_of_its_events(events, busy):
    assert busy_seconds([*BESIDE, *events]) == pytest.approx(busy / 1e6)


def test_the_gpu_waits_in_the_remaining_time():
    events = [*BESIDE, event(0, 250_000), event(500_000, 250_000)]
    assert waiting_share(events, 2.0) == pytest.approx(0.75)
    assert waiting_share([], 2.0) == 1.0
    assert waiting_share(events, 0.1) == 0.0  # kernels that extend beyond the end of the time
    assert kernels(events) == 2


def test_a_pytorch_profile_is_read():
    events = traced(lambda: torch.ones(50, 50) @ torch.ones(50, 50))
    assert any(event.get("cat") == "cpu_op" for event in events)
    if not torch.cuda.is_available():
        assert busy_seconds(events) == 0
