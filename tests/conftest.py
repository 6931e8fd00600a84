"""Settings for every test: no network, few threads, examples that are the same every time."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import hypothesis
import torch

torch.set_num_threads(2)
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
