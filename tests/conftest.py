"""Settings for every test: no network, one thread, examples that are the same every time."""

import functools
import gc
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # tests run side by side, and start processes
os.environ["RAVAN_FLWR_CORES"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (one for each core, for nothing)
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (15 starves it beside the other tests)
os.environ["RAY_ADDRESS"] = "local"  # and no cluster that this machine happens to be part of

import hypothesis
import pytest

from testing import ROOT
from tests.fork_server import ALL, HAS_GPU, WITHOUT_HUB, WORKER, ForkServer, Python

# Compiled modules are kept, whatever the person's shell says: each process of the tests would
# compile all tests, or the whole package, anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under nohup, or in the background of a script, these are ignored, and so by what tests start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Most laws are tried with each method, so that one is tried some hundred times. A test that gives
# a number of examples of its own has that many in both.
hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, max_examples=15)
hypothesis.settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=30)
hypothesis.settings.load_profile("thorough" if os.environ.get("CI") else "quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is imported, neither now nor while the tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests on the pretended accelerator first, and next the files that fork.

    PyTorch takes another kind of device only before the first backward pass of a process, and a
    process with that device cannot fork: pytest-xdist gives the two to different processes.
    """
    forking = {item.path for item in items if item.get_closest_marker("forks")}
    items.sort(key=lambda item: (item.path.stem != "test_accelerator", item.path not in forking))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let files that wait and files that compute run side by side."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.two_queues import TwoQueues

    return TwoQueues(config, log)


ALONE = "RAVAN_FLWR_TEST_ALONE"  # in the environment of a test that has a process of its own


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of forks in a process of its own, where another one has left an accelerator here.

    A process that has computed on an accelerator, be it a pretended one, cannot fork.
    """
    if not pyfuncitem.get_closest_marker("forks"):
        return None
    import torch

    if not torch.accelerator.is_available():
        return None
    if ALONE in os.environ:
        pytest.skip("this machine has an accelerator, where no worker is forked")
    command = [sys.executable, "-m", "pytest", "-n", "0", pyfuncitem.nodeid]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {ALONE: "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    return True


@pytest.fixture(scope="session", autouse=True)
def _read_once():
    """Read the bundled digits and backbone once: half of a short run's time goes there.

    Nobody changes them: each reader gets tables and tensors of its own.
    """
    import datasets

    from ravan_flwr.data import examples
    from ravan_flwr.training import bundled

    read = functools.cache(examples.SOURCES["sklearn-digits"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            examples.SOURCES, "sklearn-digits", lambda spec: datasets.DatasetDict(read(spec))
        )
        patch.setattr(bundled, "_unpacked", functools.lru_cache(1)(bundled._unpacked))
        yield


@pytest.fixture(scope="session", autouse=True)
def _unflushed():
    """Leave it to the system when files get to the disk: they are gone after the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


SHARED = pytest.StashKey[dict[str, str]]()  # their folders, where pytest-xdist is


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let all processes of pytest-xdist have the same fork servers, and be forks themselves."""
    base = ForkServer(WITHOUT_HUB)
    servers = {"python_without_hub": base, "python": ForkServer(ALL, base)}
    for server in servers.values():  # the last of them is the first to end
        config.add_cleanup(functools.partial(server.__exit__, None, None, None))
    config.stash[SHARED] = {name: str(server.scripts) for name, server in servers.items()}
    if sys.platform == "linux" and not HAS_GPU:
        for spec in specs:
            spec.python = shlex.quote(str(servers["python"].scripts / WORKER))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist, also one that takes the place of another, where they are."""
    node.workerinput["fork servers"] = node.config.stash[SHARED]


def _shared(config: pytest.Config, name: str) -> Python | None:
    """Find the server that all processes have in common; None where this is the only process."""
    if not hasattr(config, "workerinput"):
        return None
    return Python(Path(config.workerinput["fork servers"][name]))


@pytest.fixture(scope="session")
def python_without_hub(pytestconfig):
    """Start commands in processes that read the hub's settings from their own environment."""
    with _shared(pytestconfig, "python_without_hub") or ForkServer(WITHOUT_HUB) as server:
        yield server


@pytest.fixture(scope="session")
def python(pytestconfig, python_without_hub):
    """Start commands in processes that have imported every library."""
    with _shared(pytestconfig, "python") or ForkServer(ALL, python_without_hub) as server:
        yield server


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out what pictures show, where a test reads the rest of a page: they take most time.

    Their data are collected and laid out all the same, and each has its file.
    """
    from markupsafe import Markup

    from ravan_flwr.reports.charts import Chart

    empty = Markup('<svg role="img" aria-label="{}"></svg>')
    monkeypatch.setattr(Chart, "png", lambda *_: b"\x89PNG\r\n\x1a\n")
    monkeypatch.setattr(Chart, "svg", lambda chart: empty.format(chart.about))


@pytest.fixture
def shallow(monkeypatch):
    """Plan with two blocks of each kind, where a test reads nothing that the others would change.

    What a plan takes grows with the blocks, which are equal but for their number.
    """
    from ravan_flwr.training import network
    from ravan_flwr.training.cost import step_memory

    configured = network._config

    def with_two_blocks(*given: Any) -> Any:
        config = configured(*given)
        for name in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
            if hasattr(config, name):
                setattr(config, name, 2)
        return config

    monkeypatch.setattr(network, "_config", with_two_blocks)
    step_memory.cache_clear()
    yield
    step_memory.cache_clear()
