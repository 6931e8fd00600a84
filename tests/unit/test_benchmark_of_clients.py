"""benchmarks/clients.py: its images, its clock, and equal work of all rows."""

import os
import sys

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

from benchmarks.clients import Measured, crops, measured, our_command, pfl_command, ratio
from ravan_flwr.config.keys import read_settings


def test_the_images_are_crops_of_two_photographs_in_ten_classes():
    images, labels = crops(200, np.random.default_rng(0))
    assert images.shape == (200, 32, 32, 3)
    assert images.dtype == np.uint8
    assert set(labels) == set(range(10))
    photographs = load_sample_images().images
    for image, label in zip(images[:20], labels[:20], strict=True):
        windows = np.lib.stride_tricks.sliding_window_view(photographs[label // 5], (32, 32, 3))
        corners = np.argwhere((windows[:, :, 0, 0, 0] == image[0, 0]).all(-1))
        lefts = [left for top, left in corners if (windows[top, left, 0] == image).all()]
        assert label % 5 in [left * 5 // (640 - 32) for left in lefts]


def command(script, folder):
    return [sys.executable, "-c", f"import sys, time\nout = {str(folder)!r}\n{script}"]


ROUNDS = """
for number in range(4):
    until = time.process_time() + (0.6 if number == 3 else 0.2)
    while time.process_time() < until:
        pass
    with open(out + "/rounds.jsonl", "a") as file:
        file.write("{}\\n")
"""


@pytest.mark.slow
def test_a_round_is_the_time_between_two_lines(tmp_path):
    out = tmp_path / "run"
    found = measured(command(ROUNDS, out), out, os.environ)
    assert len(found.rounds) == 2  # of four rounds, the first starts up and the last evaluates
    assert min(found.rounds) > 0.15
    assert min(found.processor) > 0.15
    assert found.memory > 1
    assert found.clients_a_second == 50 / np.median(found.rounds)


def test_a_failed_run_is_reported_with_its_output(tmp_path):
    with pytest.raises(RuntimeError, match="(?s)ended with 1: .*ZeroDivisionError"):
        measured(command("1 / 0", tmp_path / "run"), tmp_path / "run", os.environ)


def test_all_rows_do_the_same_work(tmp_path):
    words = our_command(tmp_path, tmp_path / "out", 6, "fedit")[4:]
    ours, clients = read_settings([word for word in words if "preset" not in word])
    peers = pfl_command(tmp_path, tmp_path / "python", tmp_path / "out", 6, "adam")[2:]
    theirs = dict(zip(peers[::2], peers[1::2], strict=True))
    assert (clients, theirs["--clients"]) == (1000, "1000")
    assert str(ours["clients-per-round"]) == theirs["--cohort"] == "50"
    assert str(ours["batch-size"]) == theirs["--batch-size"] == "10"
    assert ours["local-steps"] == 50 // 10
    assert str(ours["num-rounds"]) == theirs["--rounds"]
    assert str(ours["lora-rank"]) == theirs["--lora-rank"]
    assert str(ours["learning-rate"]) == theirs["--learning-rate"]


def test_ratios_are_computed_run_by_run():
    def run(seconds):
        return Measured(rounds=[seconds], processor=[seconds], start=0, memory=0)

    found = {"pfl, Adam": [run(1), run(4), run(2)], "ours": [run(2), run(2), run(1)]}
    assert ratio(found, "ours") == 2
    assert ratio(found, "ours", "processor_a_client") == 0.5
