"""The server's memory."""

import pytest

from ravan_flwr.config.keys import KEYS

AGGREGATIONS = KEYS["weighting"].choices[2:]

CLOSING = """
import resource, sys, torch
from ravan_flwr.server.aggregation import RobustRound
numbers, replies = 2_000_000, 10
state = {"H": torch.zeros(numbers)}
sums = RobustRound(state, sys.argv[1])
for seed in range(replies):
    sums.add({"H": torch.full((numbers,), float(seed))}, 1.0)
sums.replies["H"][0][:1] = torch.nan
small = RobustRound({"H": torch.zeros(9)}, sys.argv[1])
small.replies = {"H": [torch.zeros(9)] * 3}
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
    ended = python.run(["-c", CLOSING, aggregation])
    assert ended.returncode == 0, ended.stderr
    ratio, first, second = map(float, ended.stdout.split())
    middle_of_nine = 5.0
    assert (first, second) == (middle_of_nine, 4.5)  # medians of 1 to 9, and of 0 to 9
    assert ratio < 0.5
