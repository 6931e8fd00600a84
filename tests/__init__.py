"""The tests: unit, laws, whole runs, processes, Flower; what they share lies beside."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
