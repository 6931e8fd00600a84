"""Measurements of speed and memory, with peers; docs/performance.md has the results."""
