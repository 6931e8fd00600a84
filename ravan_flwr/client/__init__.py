"""Answers of a client, in its own process or a worker."""
