"""The server's memory."""

import pytest

from ravan_flwr.config.keys import KEYS, KRUM

AGGREGATIONS = KEYS["weighting"].choices[2:]

CLOSING = """
import resource, sys, torch
from ravan_flwr.server.robust import RobustRound
numbers, replies = 2_000_000, 10
state = {"H": torch.zeros(numbers)}
sums = RobustRound(state, sys.argv[1])
for seed in range(replies):
    sums.add({"H": torch.full((numbers,), float(seed))}, 1.0)
if sys.argv[2] == "lacking":
    sums.replies["H"][0][:1] = torch.nan
small = RobustRound({"H": torch.zeros(9)}, sys.argv[1])
for _ in range(5):
    small.add({"H": torch.zeros(9)}, 1.0)
small.close()  # what the first call loads
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = sums.close()["H"]
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 / (replies * numbers * 4), float(made[0]), float(made[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_closing_a_robust_round_takes_little_memory_beside_the_replies(aggregation, python):
    """For ten replies of 8 MB it takes the next state and a block, not copies of all replies."""
    krum = aggregation in KRUM
    ended = python.run(["-c", CLOSING, aggregation, "whole" if krum else "lacking"])
    assert ended.returncode == 0, ended.stderr
    ratio, first, second = map(float, ended.stdout.split())
    middle_of_nine = 5.0
    # Medians of 1 to 9, and of 0 to 9. In Krum n = 10 and f = 3, so a score has 5 distances: in
    # units of the square of a step 1 + 1 + 4 + 4 + 9 = 19 for 2 to 7, 31 for 1 and 8, 55 for 0 and
    # 9. Of equal scores the first counts: 2, and for multi-Krum the mean of 1 to 7.
    expected = {"krum": (2.0, 2.0), "multi-krum": (4.0, 4.0)}
    assert (first, second) == expected.get(aggregation, (middle_of_nine, 4.5))
    assert ratio < 0.5
