"""A run that is killed or cannot write resumes from its last checkpoint to the same bits."""

import json
import signal

import pytest

from ravan_flwr import simulate
from ravan_flwr.config.keys import as_key_values
from ravan_flwr.runs.checkpoint import load_checkpoint
from tests.short_runs import SHORT, records_without_times

SETTINGS = SHORT | {
    "num-rounds": 4, "clients-per-round": 2, "eval-every": 2, "classifier": "trained",
}  # fmt: skip
CLIENTS = 4

# Moments of a round: a function, and the number of the call that kills the process.
MOMENTS = {
    "while clients register": (
        "ravan_flwr.messages.registered_client.RegisteredClient.as_config",
        2,
    ),
    "before the first checkpoint": ("ravan_flwr.server.run_recorder.save_checkpoint", 1),
    "while clients train": ("ravan_flwr.client.answers.train_locally", 5),
    "before the record": ("ravan_flwr.runs.directory.RunDirectory.append_round", 3),
    "between record and checkpoint": ("ravan_flwr.server.run_recorder.save_checkpoint", 3),
    "in the middle of a checkpoint": ("ravan_flwr.runs.checkpoint.safetensors.torch.save", 3),
    "in the middle of a file": ("ravan_flwr.files.os.fsync", 7),
    "while old checkpoints are dropped": ("ravan_flwr.runs.checkpoint._drop", 1),
    "at the end": ("ravan_flwr.server_app.make_summary", 1),
}

KILLER = """
import json, os, pkgutil, signal, sys
from ravan_flwr import simulate
import ravan_flwr.server_app, ravan_flwr.client.answers

where, number, settings, clients = json.loads(sys.argv[1])
place, _, name = where.rpartition(".")
owner = pkgutil.resolve_name(place)
real, calls = getattr(owner, name), 0

def last(*given, **named):
    global calls
    calls += 1
    if calls == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given, **named)

setattr(owner, name, last)
simulate(settings, clients)
"""


def final_of(run_dir):
    last = load_checkpoint(run_dir / "checkpoints")
    assert last.round == 4
    tensors = last.state | last.memory
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    return simulate(SETTINGS | {"output-dir": str(folder)}, CLIENTS)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_server_resumes_to_the_same_bits(moment, python, uninterrupted, tmp_path):
    settings = SETTINGS | {"output-dir": str(tmp_path)}
    given = json.dumps([*MOMENTS[moment], settings, CLIENTS])
    ended = python.run(["-c", KILLER, given])
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (run_dir,) = tmp_path.iterdir()
    if not list((run_dir / "checkpoints").glob("round-*.safetensors")):
        with pytest.raises(ValueError, match="no usable checkpoint .* start a new run"):
            simulate(settings | {"resume": str(run_dir)}, CLIENTS)
        return
    resumed = simulate(settings | {"resume": str(run_dir)}, CLIENTS)
    assert resumed.run_dir == run_dir
    assert final_of(run_dir) == final_of(uninterrupted.run_dir)
    assert records_without_times(resumed) == records_without_times(uninterrupted)
    assert resumed.summary["rounds"] == 4
    temporary = [path.name for path in run_dir.rglob("*.tmp")]
    assert len(temporary) <= 1  # the file that was being written


LIMITED = """
import json, resource, sys
from ravan_flwr.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
main(["simulate", *sys.argv[2:]])
"""


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(python, uninterrupted, tmp_path):
    """A limit on the size of files below a checkpoint's size gives the system's own error."""
    settings = SETTINGS | {"output-dir": str(tmp_path)}
    run_dir = simulate(settings | {"num-rounds": 2}, CLIENTS).run_dir
    size = (run_dir / "checkpoints" / "round-000002.safetensors").stat().st_size
    words = as_key_values(settings)
    words += [f"resume={run_dir}", f"num-clients={CLIENTS}"]
    ended = python.run(["-c", LIMITED, str(size - 1), *words])
    assert ended.returncode == 1
    assert "File too large" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list((run_dir / "checkpoints").glob(".*.tmp"))
    assert load_checkpoint(run_dir / "checkpoints").round == 2
    resumed = simulate(settings | {"resume": str(run_dir)}, CLIENTS)
    assert final_of(run_dir) == final_of(uninterrupted.run_dir)
    assert records_without_times(resumed) == records_without_times(uninterrupted)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "fedit"}, {"seed": 1}, {"heads": 2}, {"partition": "dirichlet:1"},
        {"learning-rate": 0.5}, {"weighting": "examples"}, {"backbone-dtype": "4bit"},
    ],
)  # fmt: skip
def test_a_run_with_other_settings_is_not_resumed(change, uninterrupted, tmp_path):
    (key,) = change
    settings = SETTINGS | change | {"resume": str(uninterrupted.run_dir), "num-rounds": 5}
    with pytest.raises(ValueError, match=f"the run differs from this one in.* {key}: then .* now"):
        simulate(settings, CLIENTS)


@pytest.mark.slow
def test_two_runs_at_once_are_independent(python, uninterrupted, tmp_path):
    """Two processes write into one output folder, in the same second."""
    words = as_key_values(SETTINGS)
    words += [f"output-dir={tmp_path / 'runs'}", f"num-clients={CLIENTS}"]
    command = ["-m", "ravan_flwr", "simulate", *words]
    logs = [tmp_path / name for name in ("one", "other")]
    both = [python.start(command, log=log) for log in logs]
    for process, log in zip(both, logs, strict=True):
        assert process.wait() == 0, log.read_text()
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert final_of(folder) == final_of(uninterrupted.run_dir)
