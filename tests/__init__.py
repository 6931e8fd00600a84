"""The tests: unit, properties, runs, processes, networks, Flower, and their shared helpers."""

from testing import ROOT

__all__ = ["ROOT"]
