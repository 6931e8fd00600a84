"""Settings for every test: no network, one thread, examples that are the same every time."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # two test files run side by side, and tests start processes
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import hypothesis

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
