"""Measurements of speed and memory, beside peers; docs/performance.md has their results."""
