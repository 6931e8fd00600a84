"""Studies: read a grid of settings and seeds, run it, and write its tables and pictures."""
