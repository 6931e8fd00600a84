"""The server of a run: the roster, rounds, replies and their sums."""
