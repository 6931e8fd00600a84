"""The tests: unit, properties, whole runs, processes, Flower; what they share lies beside."""

from testing import ROOT

__all__ = ["ROOT"]
