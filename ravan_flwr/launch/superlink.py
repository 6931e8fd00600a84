"""Call `flwr run` in Flower's simulation runtime, with a local SuperLink that ends with it.

`flwr run .` starts a SuperLink that stays up, keeps its working directory and environment, and
serves all later runs that connect to its port. The SuperLink here has its own ports and folder,
does not install the app's dependencies a second time, and is ended by its process id. `flwr run`
also ends with status 0 when the run failed; this module raises an error.
"""

import math
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import cast

import psutil

from ravan_flwr.config.presets import preset_in_app
from ravan_flwr.launch.sharing import share_gpus
from ravan_flwr.launch.start import Start
from ravan_flwr.launch.submit import COMPLETED, app_folder, in_toml, search_path, submit
from ravan_flwr.runs.console import write_stdout
from ravan_flwr.runs.directory import check_writable

START_TIMEOUT = 300.0  # for a busy machine; a SuperLink that ends is noticed at once
END_TIMEOUT = 5.0  # for the processes that the SuperLink started, after its end
# Settings of Ray, with the value 0: how it treats GPUs, and how far its workers give way.
RAY_LEAVES_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
RAY_NICENESS = "RAY_worker_niceness"


class LocalSuperLink(AbstractContextManager["LocalSuperLink"]):
    """A context manager that runs a SuperLink for simulations on free ports of this machine.

    `environment` is the environment in which a `flwr` command finds this SuperLink.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ravan-flwr-")
        self.home = Path(self._folder.name)
        port, control = _free_ports(2)
        self.environment = os.environ | {
            "FLWR_HOME": str(self.home),
            "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(port),
            "FLWR_LOCAL_CONTROL_API_PORT": str(control),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            # Scripts of this environment first: the SuperLink starts its scripts by name.
            "PATH": search_path(),
            # Ray must not hide the GPUs from a process that asks for no share of one. The variable
            # also avoids Ray's warning about that. Users who want no GPU set device=cpu.
            RAY_LEAVES_GPUS: os.environ.get(RAY_LEAVES_GPUS, "0"),
            # By default clients would be 15 steps nicer than other processes, and so would hardly
            # train while the machine is busy.
            RAY_NICENESS: os.environ.get(RAY_NICENESS, "0"),
            "RAY_ADDRESS": "local",  # not a cluster that this machine happens to be part of
            "PYTHONUNBUFFERED": "1",
        }
        self._port, self._control = port, control
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LocalSuperLink":
        output_file = self.home / "superlink.log"
        with output_file.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "flower-superlink", "--insecure", "--simulation", "--isolation", "subprocess",
                    "--control-api-address", f"127.0.0.1:{self._control}",
                    "--host", "127.0.0.1", "--port", str(self._port),
                ],
                env=self.environment,
                # Ray's actors import from the SuperLink's working directory before the app bundle.
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT
        try:
            while not self._answers():
                status = self._process.poll()
                if status is not None or time.monotonic() > deadline:
                    what = f"ended with status {status}"
                    if status is None:
                        what = f"did not answer within {START_TIMEOUT:g} s on port {self._port}"
                    text = output_file.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"Flower's SuperLink {what}; its output: {text or 'none'}")
                time.sleep(0.1)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=15)
            # Flower's and Ray's processes have their own sessions. Most end within a second after
            # the SuperLink; a process of Ray, or one amid a training step, may not.
            deadline = time.monotonic() + END_TIMEOUT
            while (left := list_processes(self.home)) and time.monotonic() < deadline:
                time.sleep(0.1)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):  # itself, if it hangs
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def _answers(self) -> bool:
        address = f"http://127.0.0.1:{self._port}/health"
        with suppress(OSError), urllib.request.urlopen(address, timeout=1) as reply:
            return bool(reply.status == 200)
        return False

    def run(self, app: Path, run_config: str, federation_config: str) -> str:
        """Call `flwr run --stream`, forward its output, and return the run's final status."""
        options = "--federation-config", federation_config
        return submit(app, "", run_config, self.environment, *options)


def run_in_flower(
    start: Start, clients_per_gpu: int | None = None, runs_at_a_time: int = 1
) -> None:
    """Call `flwr run .` for the app in the working directory, with a SuperNode for each client.

    `share_gpus` decides the GPU share of each client.
    """
    app, config, settings = app_folder(), start.config, dict(start.run_config)
    if "preset" in settings:
        settings["preset"] = preset_in_app(cast(str, settings["preset"]), app)
    check_writable(Path(config.output_dir))
    if start.num_clients > (config.num_clients or math.inf):  # the preset's number fits its data
        from ravan_flwr.data.examples import load_splits  # noqa: PLC0415 (this takes a second)
        from ravan_flwr.data.partition import check_enough_examples  # noqa: PLC0415

        check_enough_examples(start.num_clients, len(load_splits(config.data)["train"]))
    sharing = share_gpus(config, start.num_clients, clients_per_gpu, runs_at_a_time)
    run_config = in_toml(settings)
    federation = sharing.federation(start.num_clients)
    write_stdout(
        f"{sharing.description()}"
        "With Flower's own command:\n"
        "  export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1\n"
        f"  export {RAY_LEAVES_GPUS}=0\n"
        f"  export {RAY_NICENESS}=0\n"
        "  export RAY_ADDRESS=local\n"
        f'  flwr run . --stream --federation-config "{federation}" '
        f"-c {shlex.quote(run_config)}\n"
        "starting Flower's SuperLink; the app then loads PyTorch and the model ...\n"
    )
    with LocalSuperLink() as superlink:
        status = superlink.run(app, run_config, federation)
    if status != COMPLETED:
        raise RuntimeError(f"the run ended as {status!r}, expected {COMPLETED!r}")


def list_processes(home: Path) -> list[int]:
    """Return the ids of all processes whose FLWR_HOME is this folder or within it."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            if Path(process.environ().get("FLWR_HOME", "")).is_relative_to(home):
                pids.append(process.pid)
    return pids


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
