"""`make gpu-first` on the pretend accelerator: each part runs to its end, into the page."""

import json
import os
import re

import pytest

from benchmarks.gpu import BEGIN, END, PARTS

pytestmark = pytest.mark.slow


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
    rows_by_name = {row[1]: row[2].removesuffix(" |") for row in rows}
    assert not [name for name in rows_by_name if name.startswith(("stopped", "ended"))]
    assert rows_by_name["cifar100-vit-b16: three steps without waiting"] == "yes"
    moved = rows_by_name["first round: weights that fifty steps of 1e-5 moved"]
    assert float(moved.removesuffix("%")) > 90
    for kind in ("float32", "float16"):  # which is not cast here
        assert float(rows_by_name[f"gradients in {kind}"].split()[0]) < 1e-4
    assert float(rows_by_name["sketches of gradients in float16"].split()[0]) < 1e-4
    assert re.search(r"\d+/\d+ tests collected", rows_by_name["all of these"])
    assert re.fullmatch(r"[\d.]+ ms a step", rows_by_name["cifar100-vit-b16, as it is"])
    assert re.fullmatch(r"[\d.]+ ms a step", rows_by_name["cifar100-vit-b16, cuda-graphs=off"])
    assert "examples a second" in rows_by_name["cifar100-vit-b16, an evaluation"]
    assert "train" in rows_by_name["cifar100-vit-b16, processes=2, 4 clients of 2 steps"]
    assert "ms a step" in rows_by_name["digits-vit, float32, eager"]
    assert "ms a step" in rows_by_name["ViT-B/16, a plain script: PEFT's LoRA, autocast, AdamW"]


def test_gradients_in_few_bits_are_near_those_in_float64(python):
    words = ("-m", "benchmarks.gpu", "right", "--small", "--device", "cpu")
    done = python.run(words, environment=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    distances = {name: float(text.split()[0]) for name, text in rows.items() if " off " in text}
    assert distances.pop("gradients in float32") < 1e-5
    assert distances.keys() == {
        "gradients in bfloat16",
        "gradients in bfloat16, backbone in it",
        "gradients in 4 bits, bfloat16",
    }
    assert all(0 < distance < 0.05 for distance in distances.values()), distances


def test_the_time_limit_stops_every_part(gpu_first):
    status, page = gpu_first("--device", "pretend", "--limit", "1")
    assert status == 0
    assert page.count("| stopped after 0 s |") == len(PARTS)
    assert page.endswith("After.\n")
