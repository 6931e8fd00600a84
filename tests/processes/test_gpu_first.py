"""`make gpu-first` on the pretend accelerator: each part runs to its end, into the page."""

import os
import re

import pytest

from benchmarks.gpu import BEGIN, END, PARTS


@pytest.fixture
def gpu_first(tmp_path, python):
    def measure(*words):
        page = tmp_path / "gpu.md"
        page.write_text(f"Before.\n{BEGIN}\nOld.\n{END}\nAfter.\n")
        command = ["-m", "benchmarks.gpu", "--small", "--page", str(page), *words]
        done = python.run(command, environment=os.environ | {"OMP_NUM_THREADS": "1"})
        return done.returncode, page.read_text()

    return measure


def test_every_part_runs_to_its_end_on_the_pretend_accelerator(gpu_first):
    status, page = gpu_first("--device", "pretend", "--limit", "100000")
    assert status == 0
    assert page.startswith("Before.\n")
    assert page.endswith("After.\n")
    assert "Old." not in page
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| \w+ \| ", line)][1:]
    assert {row[0].removeprefix("| ") for row in rows} == PARTS.keys()
    told = {row[1]: row[2].removesuffix(" |") for row in rows}
    assert not [what for what in told if what.startswith(("stopped", "ended"))]
    assert told["cifar100-vit-b16: three steps without waiting"] == "yes"
    moved = told["first round: weights that fifty steps of 1e-5 moved"]
    assert float(moved.removesuffix("%")) > 90
    for kind in ("float32", "float16"):  # which is not cast here
        assert float(told[f"gradients in {kind}"].split()[0]) < 1e-4
    assert float(told["sketches of gradients in float16"].split()[0]) < 1e-4
    assert re.search(r"\d+/\d+ tests collected", told["all of these"])
    assert re.fullmatch(r"[\d.]+ ms a step", told["cifar100-vit-b16, as it is"])
    assert re.fullmatch(r"[\d.]+ ms a step", told["cifar100-vit-b16, examples on the device"])
    assert "examples a second" in told["cifar100-vit-b16, an evaluation"]
    assert "train" in told["cifar100-vit-b16, processes=2, 4 clients of 2 steps"]
    assert "times as quick" in told["digits-vit, 8 clients one at a time"]


def test_it_ends_in_time_with_what_it_has(gpu_first):
    status, page = gpu_first("--device", "pretend", "--limit", "1")
    assert status == 0
    assert page.count("| stopped after 0 s |") == len(PARTS)
    assert page.endswith("After.\n")
