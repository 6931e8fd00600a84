"""The tests: unit, properties, runs, processes, networks, Flower, and their shared helpers."""

from tests.support import ROOT

__all__ = ["ROOT"]
