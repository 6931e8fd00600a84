"""Measurements of speed and memory, with peers; results/performance.md has the results."""
