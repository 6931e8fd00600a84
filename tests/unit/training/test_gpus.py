"""The GPUs of a machine by nvidia-smi, and how simulated clients share them."""

import functools
import threading
from types import SimpleNamespace

import pytest
import torch
from flwr.proto.federation_config_pb2 import SimulationConfig

from benchmarks.gpu import classes, fitting
from ravan_flwr.cli import main
from ravan_flwr.config.run_config import read_config
from ravan_flwr.lab import running
from ravan_flwr.lab.choosing import table_runs
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.spec import read_study
from ravan_flwr.launch import superlink as flower
from ravan_flwr.launch.sharing import MAX_CLIENTS_PER_GPU, Sharing, share_gpus
from ravan_flwr.specs import Scalar
from ravan_flwr.training import machine as found_gpus
from ravan_flwr.training.cost import (
    CONTEXT,
    Footprint,
    _PeakMemory,
    evaluation_memory,
    footprint,
    step_memory,
)
from ravan_flwr.training.device import free_memory, pick_device, release_cached_memory
from ravan_flwr.training.machine import Gpu, assign_gpus, explain_unused_gpus, visible_gpus
from ravan_flwr.training.model_and_data import ModelAndData
from tests import ROOT
from tests.commands import error_of
from tests.memory import bytes_for_backward

# As `nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.free` prints it, by its manual.
CUDA = torch.device("cuda")
LARGE = "NVIDIA H100 80GB HBM3, 81559, 81004"
SMALL = "NVIDIA GeForce RTX 3060 Laptop GPU, 6144, 6000"


def machine(folder, *cards, status=0):
    """Return an environment in which a fake nvidia-smi lists these cards."""
    lines = [f"{i}, GPU-{i}{i}{i}aaaa-bbbb, {card}" for i, card in enumerate(cards)]
    folder.mkdir(exist_ok=True)
    (folder / "answer").write_text("".join(f"{line}\n" for line in lines))
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\n[ $# -gt 0 ] || exit 9\n"
        f'while IFS= read -r line; do echo "$line"; done < {folder}/answer\nexit {status}\n'
    )
    program.chmod(0o755)
    return {"PATH": str(folder)}


def names(environment):
    return [gpu.index for gpu in visible_gpus(environment)]


def test_without_a_working_driver_there_is_no_gpu(tmp_path):
    assert visible_gpus({"PATH": str(tmp_path)}) == []
    assert visible_gpus(machine(tmp_path, "NVIDIA-SMI has failed", status=9)) == []
    assert visible_gpus(machine(tmp_path)) == []


def test_memory_is_in_bytes_and_may_be_unknown(tmp_path):
    one, other = visible_gpus(machine(tmp_path, LARGE, "Some, name, [N/A], [N/A]"))
    assert one.name == "NVIDIA H100 80GB HBM3"
    assert (one.total, one.free) == (81559 * 2**20, 81004 * 2**20)
    assert (other.name, other.total, other.free) == ("Some, name", None, None)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []), ("-1", []), ("NoDevFiles", []), ("1", ["1"]), ("2,0", ["2", "0"]),
        ("0,-1,2", ["0"]), ("0,7,1", ["0"]), (" 1 , 2 ", ["1", "2"]),
        ("GPU-111aaaa-bbbb", ["1"]), ("GPU-2,0", ["2", "0"]), ("GPU-", []), ("GPU-9,1", []),
        ("MIG-41b7,1", ["MIG-41b7", "1"]),
    ],
)  # fmt: skip
def test_visible_devices_are_selected_as_by_cuda(visible, expected, tmp_path):
    environment = machine(tmp_path, LARGE, LARGE, LARGE)
    assert names(environment) == ["0", "1", "2"]
    assert names(environment | {"CUDA_VISIBLE_DEVICES": visible}) == expected


@pytest.mark.parametrize("number", range(1, 17))
def test_a_gpu_share_gives_the_same_number_of_clients_in_flower_and_ray(number, monkeypatch):
    """Flower stores a GPU share as float32 and divides; Ray counts it in ten-thousandths."""
    import ray
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    node = {"Resources": {"CPU": 10_000.0, "GPU": float(number)}}
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    for clients in range(1, MAX_CLIENTS_PER_GPU + 1):
        share = Sharing(clients).share
        sent = SimulationConfig(client_resources_num_gpus=share).client_resources_num_gpus
        assert pool_size_from_resources({"num_cpus": 1, "num_gpus": sent}) == number * clients
        assert 10_000 // round(sent * 10_000) == clients  # on each GPU


def shared(folder, *cards, clients=100, asked=None, runs=1, cpus=100, monkeypatch=None, **settings):
    """Return how clients of a preset share these cards, on a machine with that many CPUs."""
    monkeypatch.setattr("os.cpu_count", lambda: cpus)
    config: dict[str, Scalar] = {"preset": "cifar100-vit-b16", "clients-per-round": 100}
    config |= {key.replace("_", "-"): value for key, value in settings.items()}
    return share_gpus(read_config(config), clients, asked, runs, machine(folder, *cards))


@pytest.mark.slow
def test_as_many_clients_run_as_fit_beside_the_server(tmp_path, monkeypatch):
    cached_footprint = functools.cache(footprint)  # once for each configuration
    monkeypatch.setattr("ravan_flwr.training.cost.footprint", cached_footprint)

    def clients(*cards, **options):
        return shared(tmp_path, *cards, monkeypatch=monkeypatch, **options).clients_per_gpu

    need = footprint(read_config({"preset": "cifar100-vit-b16"}))
    usable = 0.9 * 81004 * 2**20
    fit = int((usable - need.server) // need.client)
    assert 5 < fit < 30
    assert clients(LARGE) == fit
    # The server is on the first GPU, and a share is the same on all.
    two = shared(tmp_path, LARGE, LARGE, monkeypatch=monkeypatch)
    assert (two.clients_per_gpu, len(two.gpus)) == (fit, 2)
    # The smallest GPU decides, less the server's process on the first one.
    less = f"Less, 40960, {int((need.client * 2.5 + need.server) / 0.9 / 2**20)}"
    assert clients(less, LARGE) == 2
    fewer = f"Less, 40960, {int(need.client * 2.5 / 0.9 / 2**20)}"
    assert clients(fewer, LARGE) == 1
    assert clients(LARGE, fewer) == 2
    # The number is limited by CPUs and clients, spread over the GPUs.
    assert clients(LARGE, LARGE, cpus=3) == 2
    assert clients(LARGE, clients_per_round=3) == 3
    assert clients(LARGE, clients=2) == 2
    # Several runs share all GPUs.
    half = 0.9 * 81559 * 2**20 // 2
    assert clients(LARGE, runs=2) == int((half - need.server) // need.client)
    assert clients(LARGE, cpus=8, runs=4, local_steps=1) == 2
    # Smaller steps permit more clients; a requested number is used unchanged.
    assert clients(LARGE, batch_size=8) > fit
    assert clients(SMALL, LARGE, asked=7) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cards", "options", "message"),
    [
        ([LARGE, SMALL], {"batch_size": 256}, r"GPU 1 \(NVIDIA G.*\) is too small: .* batch-size"),
        (["NVIDIA GB10, [N/A], [N/A]"], {}, "GPU 0 .* not report its memory, .* --clients-per-gpu"),
        ([], {"asked": 2}, "--clients-per-gpu 2: found no GPU"),
        ([LARGE], {"asked": 2, "device": "cpu"}, "2: found no GPU for device = 'cpu'"),
        ([LARGE], {"asked": 0}, "--clients-per-gpu 0: expected 1 .* device=cpu"),
        ([LARGE], {"asked": -1}, "--clients-per-gpu -1: expected 1"),
        ([LARGE], {"asked": 25}, "--clients-per-gpu 25: expected 1"),
        ([LARGE], {"runs": 0}, "--runs-at-a-time 0: expected"),
        ([LARGE], {"device": "cuda:1"}, "device = 'cuda:1': .* CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_impossible_gpu_settings_are_reported(cards, options, message, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=message):
        shared(tmp_path, *cards, monkeypatch=monkeypatch, **options)


class Recorder:
    """Stand in for a SuperLink: record the command's words, and run nothing."""

    def __init__(self):
        self.runs = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def run(self, app, run_config, federation):
        self.runs.append((run_config, federation))
        return "finished:completed"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run `--engine flower` on a machine with these cards; return federation config, run config and
    output."""

    def run(*words, cards=()):
        recorder = Recorder()
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(flower, "LocalSuperLink", lambda: recorder)
        monkeypatch.setenv("PATH", machine(tmp_path / "bin", *cards)["PATH"])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("os.cpu_count", lambda: 8)
        main(["simulate", "--engine=flower", *words])
        ((run_config, federation),) = recorder.runs
        return federation, run_config, capsys.readouterr().out

    return run


PLAIN = "num-supernodes=20 client-resources-num-cpus=1"


def test_the_command_requests_a_share_of_the_available_gpus(command):
    federation, _, output = command()
    assert federation == PLAIN
    assert "GPU" not in output
    assert "  export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0\n" in output
    assert "  export RAY_worker_niceness=0\n" in output

    federation, run_config, output = command("clients-per-round=4", cards=[SMALL])
    assert federation == f"{PLAIN} client-resources-num-gpus=0.25"
    assert f"flwr run . --stream --federation-config \"{federation}\" -c '{run_config}'" in output
    assert "(NVIDIA GeForce RTX 3060 Laptop GPU), 4 clients at a time on it\n" in output
    assert "1 client at a time on each\n" in command("clients-per-round=2", cards=[LARGE] * 2)[2]
    assert "device" not in run_config
    for words, share in (
        (("--clients-per-gpu", "3"), f"{PLAIN} client-resources-num-gpus=0.3333"),
        (("device=cuda", "--clients-per-gpu", "1"), f"{PLAIN} client-resources-num-gpus=1"),
        (("device=cpu",), PLAIN),
        (("device=mps",), PLAIN),
    ):
        assert command(*words, cards=[SMALL])[0] == share


STUDY = """
title: Two rows
num-clients: 4
seeds: [0]
settings: {num-rounds: 1}
tables:
  - {title: Both, rows: {ravan: {}, fedit: {method: fedit}}}
"""


def test_a_study_passes_gpu_sharing_to_its_runs(tmp_path, capsys):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    run = table_runs(read_study(file), Results(tmp_path))[0]

    def words(*options):
        return running.RunOptions(*options).command(run, tmp_path)

    assert words("flower", 2, 3)[-4:] == ["--runs-at-a-time", "2", "--clients-per-gpu", "3"]
    assert words("flower", 1, None)[-2:] == ["--runs-at-a-time", "1"]
    assert words("process", 2, None) == run.command(tmp_path, "process")
    error = error_of(capsys, "study", file, "--output", tmp_path, "--clients-per-gpu", 3)
    assert "got --engine process beside it, expected flower" in error


# The memory counts.


def test_the_peak_of_live_memory_is_counted():
    weight = torch.empty(10, 1000, device="meta")
    with _PeakMemory([weight]) as memory:
        a = torch.empty(1000, device="meta")
        b = weight.T.view(1000, 10)  # a view without memory of its own
        c = 2 * a
        assert memory.peak == 8000
        del a, b
        d = c.view(10, 100) + 1
        del c, d
        torch.empty(500, device="meta")
    assert memory.peak == 8000


@pytest.mark.slow
def test_evaluation_memory_is_its_batch_and_the_widest_layer():
    config = read_config({"preset": "cifar100-vit-b16"})
    # ViT-B/16: 197 tokens of 768, four times as wide between the two layers of a block; 256
    # images, of which the next batch waits.
    wide, images = 256 * 197 * 3072 * 4, 256 * 3 * 224 * 224 * 4
    assert wide + 2 * images < evaluation_memory(config) < 3 * wide + 4 * images
    # T5-Base generates: keys and values of 12 layers, of the prompt for each.
    text = read_config({"preset": "newsgroups-t5"})
    assert evaluation_memory(text) > 2 * 12 * 256 * text.max_length * 768 * 4


@pytest.mark.slow
def test_the_page_agrees_with_the_plan_for_each_size_of_gpu():
    """The memory of a process, the clients beside the server, and the numbers on the page agree."""
    assert [fitting(room, Footprint(30, 20)) for room in (20, 30, 50, 110, 1e6)] == [
        "no", "in process", "1", "3", str(MAX_CLIENTS_PER_GPU)
    ]  # fmt: skip
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert "\n".join(classes()) in page


@pytest.mark.slow
@pytest.mark.parametrize("evaluate_on", ["server", "clients"])
def test_process_memory_is_model_context_and_work(evaluate_on):
    settings = {"preset": "newsgroups-t5", "evaluate-on": evaluate_on, "batch-size": 4}
    held = {"validation-share": 0.2} if evaluate_on == "clients" else {}
    config = read_config(settings | held)
    step, evaluation, found = step_memory(config, 1.0), evaluation_memory(config), footprint(config)
    assert evaluation > step.added
    rest = CONTEXT + step.weights
    expected = (step.added, evaluation) if evaluate_on == "server" else (evaluation, 0)
    assert (found.client - rest, found.server - rest) == expected


@pytest.mark.parametrize("method", ["ravan", "fedit", "full"])
def test_in_sixteen_bits_no_more_memory_is_kept_than_counted(method):
    config = read_config({"method": method, "precision": "bfloat16", "batch-size": 4})
    measured, _ = bytes_for_backward(ModelAndData(config), 1.0, 4, torch.bfloat16)
    estimate = step_memory(config, 1.0).activations
    assert measured <= estimate < 1.6 * measured


def test_checkpointing_counts_the_recomputed_block():
    settings = {"preset": "glue-llama", "glue-task": "rte"}
    without_checkpointing = step_memory(read_config(settings), 1.0)
    few = step_memory(read_config(settings | {"gradient-checkpointing": True}), 1.0)
    block = without_checkpointing.activations // 16
    assert block < few.activations < without_checkpointing.activations / 4


# Messages of a process on the CPU about GPUs that it was not given.


def test_a_process_without_the_machines_gpus_is_advised(tmp_path):
    driver, empty = tmp_path / "gpus", {"PATH": str(tmp_path)}
    for i in range(2):
        (driver / f"0000:0{i}:00.0").mkdir(parents=True)
    advice = explain_unused_gpus(driver, empty) or ""
    assert "on the CPU, but the machine has 2 GPUs" in advice
    assert "CUDA_VISIBLE_DEVICES" in advice
    assert advice.endswith("set device=cpu")
    # Without a driver's folder, as under WSL, nvidia-smi is asked.
    nowhere = tmp_path / "nowhere"
    assert explain_unused_gpus(nowhere, empty) is None
    assert "has 1 GPU." in (explain_unused_gpus(nowhere, machine(tmp_path / "wsl", SMALL)) or "")


@pytest.fixture
def cuda(monkeypatch):
    """Let CUDA report this memory of a GPU, in bytes; return how often its cache was emptied."""

    def of(free, reserved, allocated, integrated=False):
        emptied: list[int] = []
        for name, value in {
            "mem_get_info": (free, 100), "memory_reserved": reserved, "memory_allocated": allocated,
            "get_device_properties": SimpleNamespace(is_integrated=integrated),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, lambda _=None, value=value: value)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
        return emptied

    return of


def test_free_memory_of_an_integrated_gpu_is_the_machines(cuda, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=70))
    cuda(free=20, reserved=9, allocated=4)
    assert free_memory(CUDA) == 20 + 5
    cuda(free=20, reserved=9, allocated=4, integrated=True)
    assert free_memory(CUDA) == 70 + 5


@pytest.mark.parametrize(("free", "released"), [(50, 0), (20, 1)])
def test_cached_memory_is_released_only_if_others_need_it(free, released, cuda):
    emptied = cuda(free, reserved=60, allocated=20)
    release_cached_memory(CUDA)
    release_cached_memory(torch.device("cpu"))
    assert len(emptied) == released


# Several GPUs.


@pytest.mark.parametrize(
    ("number", "processes", "expected"),
    [
        (1, 3, [None] * 3), (4, 1, [None]), (2, 2, ["0", "1"]), (2, 3, ["0", "1", "0"]),
        (4, 2, ["0,2", "1,3"]), (3, 2, ["0,2", "1"]),
    ],
)  # fmt: skip
def test_gpus_are_assigned_to_processes_in_turn(number, processes, expected):
    gpus = [Gpu(str(i), str(i), "H100", 1, 1) for i in range(number)]
    places = assign_gpus(gpus, processes)
    assert [place.get("CUDA_VISIBLE_DEVICES") for place in places] == expected


def test_each_run_of_a_study_has_its_own_gpu(tmp_path, monkeypatch):
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    monkeypatch.setenv("PATH", machine(tmp_path / "bin", LARGE, LARGE)["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    both, visible = threading.Barrier(2), []

    def run(_, command, environment, report):
        visible.append(environment.get("CUDA_VISIBLE_DEVICES"))
        both.wait(60)
        return "stopped"

    monkeypatch.setattr(running.Children, "run", run)
    running.run_study(file, tmp_path / "runs", jobs=2)
    assert sorted(visible) == ["GPU-000aaaa-bbbb", "GPU-111aaaa-bbbb"]
    # A run that names its GPU must see it.
    visible.clear()
    running.run_study(file, tmp_path / "others", jobs=2, overrides={"device": "cuda:1"})
    assert visible == [None, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compute on")
def test_an_unused_gpu_is_logged_once_unless_the_cpu_was_requested(tmp_path, monkeypatch, caplog):
    if found_gpus.DRIVER.is_dir():
        pytest.skip("there is a GPU of this machine to tell of")
    monkeypatch.setenv("PATH", machine(tmp_path, SMALL)["PATH"])
    monkeypatch.delenv(found_gpus.VISIBLE, raising=False)
    with pytest.raises(ValueError, match=r"'cuda' is not there: .*the machine has 1 GPU\."):
        pick_device("cuda")
    found_gpus.log_unused_gpus.cache_clear()
    try:
        assert pick_device("cpu").type == "cpu"
        assert not caplog.messages
        assert {pick_device("auto").type for _ in range(2)} == {"cpu"}
    finally:
        found_gpus.log_unused_gpus.cache_clear()
    (message,) = caplog.messages
    assert "the machine has 1 GPU." in message
