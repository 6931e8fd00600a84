"""Settings for every test: no network, one thread, deterministic examples of hypothesis."""

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
os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (one for each core, unused)
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (15 starves it beside the other tests)
os.environ["RAY_ADDRESS"] = "local"  # not a cluster that this machine belongs to

import hypothesis
import pytest

from tests.fast import fast_ones
from tests.fork_server import ALL, HAS_GPU, WITHOUT_HUB, WORKER, ForkServer, Python
from tests.skips import pytest_make_collect_report, pytest_runtest_makereport
from tests.support import ROOT

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]

# Compiled modules are stored, also if the shell forbids it: else each process of the tests would
# compile all tests, or the whole package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under nohup, or in the background of a script, these signals are ignored, also by child processes.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Most properties are parametrised over the methods, so that each runs some hundred times. A test
# with its own number of examples has the same number in both profiles.
hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, max_examples=15)
hypothesis.settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=30)
hypothesis.settings.load_profile("thorough" if os.environ.get("CI") else "quick")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude imported objects from garbage collection, during collection and the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "without slow tests, and few of many cases: what `make test` runs (tests/fast.py)"
    parser.addoption("--fast", action="store_true", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests on the pretend accelerator first, and next the files that fork.

    PyTorch takes another kind of device only before the first backward pass of a process, and a
    process with that device cannot fork: pytest-xdist gives the two to different processes.
    """
    forking = {item.path for item in items if item.get_closest_marker("forks")}
    if config.getoption("--fast"):
        items[:] = fast_ones(config, items)
    items.sort(key=lambda item: (item.path.stem != "test_accelerator", item.path not in forking))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let files that wait and files that compute run side by side."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.two_queues import TwoQueues

    return TwoQueues(config, log)


ALONE = "RAVAN_FLWR_TEST_ALONE"  # in the environment of a test that runs in its own process


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of forks in a new process, if an earlier test has registered an accelerator here.

    A process that has computed on an accelerator, also on the pretend one, cannot fork.
    """
    if not pyfuncitem.get_closest_marker("forks"):
        return None
    import torch

    if not torch.accelerator.is_available():
        return None
    if ALONE in os.environ:
        pytest.skip("there is a GPU, where no worker is forked")
    command = [sys.executable, "-m", "pytest", "-n", "0", pyfuncitem.nodeid]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {ALONE: "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    return True


@pytest.fixture(scope="session", autouse=True)
def _cached_digits():
    """Cache the bundled digits and backbone: reading them is half of a short run's time.

    Each reader gets new tables and tensors, so that no test changes the cached ones.
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
def _without_fsync():
    """Make fsync a no-op: files of tests need not survive a crash."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


SHARED = pytest.StashKey[dict[str, str]]()  # name -> folder of the fork servers that workers share


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Start the fork servers that all workers of pytest-xdist share; make the workers forks."""
    base = ForkServer(WITHOUT_HUB)
    servers = {"python_without_hub": base, "python": ForkServer(ALL, base)}
    for server in servers.values():  # ended in reverse order
        config.add_cleanup(functools.partial(server.__exit__, None, None, None))
    config.stash[SHARED] = {name: str(server.scripts) for name, server in servers.items()}
    if sys.platform == "linux" and not HAS_GPU:
        for spec in specs:
            spec.python = shlex.quote(str(servers["python"].scripts / WORKER))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the fork servers' folders to a worker of pytest-xdist, also to a replacement."""
    node.workerinput["fork servers"] = node.config.stash[SHARED]


def _shared(config: pytest.Config, name: str) -> Python | None:
    """Return the fork server that all workers share; None without pytest-xdist."""
    if not hasattr(config, "workerinput"):
        return None
    return Python(Path(config.workerinput["fork servers"][name]))


@pytest.fixture(scope="session")
def python_without_hub(pytestconfig):
    """Start commands in forks that read the hub's settings from their own environment."""
    with _shared(pytestconfig, "python_without_hub") or ForkServer(WITHOUT_HUB) as server:
        yield server


@pytest.fixture(scope="session")
def python(pytestconfig, python_without_hub):
    """Start commands in forks that have imported every library."""
    with _shared(pytestconfig, "python") or ForkServer(ALL, python_without_hub) as server:
        yield server


@pytest.fixture
def without_charts(monkeypatch):
    """Replace charts by empty pictures, where a test reads the rest of a page: drawing is slow.

    The charts' data are still collected and laid out, and each chart has its file.
    """
    from markupsafe import Markup

    from ravan_flwr.results.charts import Chart

    empty = Markup('<svg role="img" aria-label="{}"></svg>')
    monkeypatch.setattr(Chart, "png", lambda *_: b"\x89PNG\r\n\x1a\n")
    monkeypatch.setattr(Chart, "svg", lambda chart: empty.format(chart.about))


@pytest.fixture
def untimed(monkeypatch):
    """Plan with a second a step, which is not tried: a large model takes minutes for one."""
    from ravan_flwr.training import plan

    monkeypatch.setattr(plan, "step_seconds", lambda _: 1.0)


@pytest.fixture
def two_blocks(monkeypatch, untimed):
    """Plan with two blocks of each kind, where a test does not depend on the number of blocks.

    A plan's time grows with the number of blocks, which are equal.
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
