"""Decide how long a round waits for its replies."""

import math
import time

LEAST_GRACE = 60.0  # seconds for stragglers, unless the run config sets them
GRACE = 10.0  # times what the first half of the replies took, likewise


class RoundDeadline:
    """Tell when to stop waiting: enough replies came, the grace has passed, or the timeout.

    The grace for stragglers begins with the `least`-th reply that was used. With grace None it
    begins when half of those that were asked have answered, and is ten times what that took, at
    least a minute. `enough` replies end the round at once.
    """

    def __init__(
        self,
        timeout: float,
        asked: int,
        least: int = 1,
        grace: float | None = math.inf,
        enough: float = math.inf,
    ) -> None:
        self._began = time.monotonic()
        self._until = self._began + timeout
        self._grace, self._enough = grace, enough
        self._quorum = min(asked, max(least, math.ceil(asked / 2)) if grace is None else least)
        self.used = 0

    def use(self) -> None:
        """Count one more reply that was used."""
        self.used += 1
        if self.used == self._quorum:
            now = time.monotonic()
            grace = self._grace
            if grace is None:
                grace = max(LEAST_GRACE, GRACE * (now - self._began))
            self._until = min(self._until, now + grace)

    @property
    def satisfied(self) -> bool:
        """Return whether as many replies were used as were wanted."""
        return self.used >= self._enough

    @property
    def left(self) -> float:
        """Return the seconds that are left to wait."""
        return self._until - time.monotonic()

    @property
    def seconds(self) -> float:
        """Return the seconds from the start to the end of waiting."""
        return self._until - self._began
