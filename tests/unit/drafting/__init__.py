"""Tests of `drafting/`."""
