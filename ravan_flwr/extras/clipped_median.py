"""The median of clipped updates: no client moves the state far, and a few do not move it at all.

The change of each client, in all tensors together, is clipped to a norm. The next state has the
median of each number over the clients that trained it.
"""

import math
from functools import cached_property

from ravan_flwr.methods.base import Tensors, expand_to_state
from ravan_flwr.server.releases import Release
from ravan_flwr.server.robust import RobustRound
from ravan_flwr.server.update import Update


class ClippedMedian(Release):
    """Release the median of the clipped updates."""

    @cached_property
    def kept(self) -> RobustRound:
        """Return the clipped replies, none before the first."""
        return RobustRound(self.state, "median")

    def add(self, update: Update) -> None:
        filled = expand_to_state(self.method, self.state, update.upload)
        changes = {name: filled[name] - old for name, old in self.state.items()}
        norm = math.hypot(*(float(x.nan_to_num(0.0).norm()) for x in changes.values()))
        bound = self.config.median_of_clipped
        assert bound is not None
        factor = min(1.0, bound / norm) if norm else 1.0
        clipped = {name: self.state[name] + factor * x for name, x in changes.items()}
        self.kept.add(clipped, 1.0)

    def close(self) -> Tensors | None:
        kept = self.kept
        del self.kept
        return kept.close() if kept.count >= 3 else None
