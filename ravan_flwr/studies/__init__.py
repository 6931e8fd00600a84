"""Grids of settings and seeds: what they are, running them, and their tables."""
