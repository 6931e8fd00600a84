"""The memory that a process takes for what a server does."""

import pytest

from ravan_flwr.config.keys import KEYS

HOW = KEYS["weighting"].choices[2:]

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


@pytest.mark.parametrize("how", HOW)
def test_closing_takes_little_beside_the_replies(how, python):
    """Ten replies of 8 MB: the next state, and a block, not eight times all of them."""
    ended = python.run(["-c", CLOSING, how])
    assert ended.returncode == 0, ended.stderr
    share, first, second = map(float, ended.stdout.split())
    middle_of_nine = 5.0
    assert (first, second) == (middle_of_nine, 4.5)  # of 1 to 9, and of 0 to 9
    assert share < 0.5
