"""What the tests and the benchmarks share: small models, small data, a deployment on loopback."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
