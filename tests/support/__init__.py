"""Helpers of tests and benchmarks: small models, small data, a deployment on loopback."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
