"""Call `flwr run`, pass its output on, say how the run ended; deliver a result by such a run."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import tomli_w

from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.plain_text import listed
from ravan_flwr.runs.console import say
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Summary
from ravan_flwr.specs import Scalar

COMPLETED = "finished:completed"


def app_folder() -> Path:
    """Return the working directory, which `flwr run` sends; ValueError if no app is there."""
    app = Path.cwd()
    if not (app / "pyproject.toml").is_file():
        raise ValueError(
            f"found no pyproject.toml in {app}, expected the app's folder; change into it"
        )
    return app


def search_path() -> str:
    """Return a PATH on which the scripts of this environment come first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def submit(
    app: Path,
    superlink: str,
    settings: str,
    environment: Mapping[str, str],
    *options: str,
    heard: Callable[[str], None] = lambda _: None,
) -> str:
    """Call `flwr run --stream`, and return the status of the run's end.

    `superlink` names a connection in Flower's configuration, "" the default. `heard` is called
    with each line that is printed.
    """
    named, run_id = [superlink] if superlink else [], None
    command = ["flwr", "run", str(app), *named, "--stream", *options]
    command += ["-c", settings] if settings else []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(line)
                heard(line)
                if match := re.search(r"Successfully started run (\d+)", line):
                    run_id = match[1]
        except BaseException:
            process.terminate()  # it would go on streaming, and be waited for
            raise
    if process.returncode or run_id is None:
        raise RuntimeError(
            f"`{shlex.join(command)}` ended with status {process.returncode} before the run "
            "started; what it printed stands above"
        )
    command = ["flwr", "ls", *named, "--run-id", run_id, "--format", "json"]
    result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    try:
        return str(json.loads(result.stdout)["runs"][0]["status"])
    except (ValueError, LookupError, TypeError):
        raise RuntimeError(
            f"`{shlex.join(command)}` ended with status {result.returncode} and does not say how "
            f"the run has ended; its log stands above. It printed: "
            f"{(result.stderr or result.stdout)[-1000:].strip()}"
        ) from None


def in_toml(settings: Mapping[str, Scalar]) -> str:
    """Write settings for `flwr run -c`, which takes TOML, but no double quote within a text."""
    return " ".join(f"{key}={as_toml(value)}" for key, value in settings.items())


def as_toml(value: Scalar) -> str:
    """Write one value so."""
    written = tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
    return re.sub(r"\\(.)", lambda match: r"\u0022" if match[1] == '"' else match[0], written)


THERE = (
    "RUN is a directory on the server's machine, which the process of the ServerApp wrote: call "
    "this command there, as a user who may read it; or submit the run's settings yourself, with "
    "resume='RUN' deliver=true (docs/deploy.md)"
)


def deliver(run: Path, superlink: str) -> Summary:
    """Deliver a finished run's result by a SuperLink; return the summary of the run after it.

    This is a Flower run of its own, of the same app with the run's settings, `resume=RUN`,
    `deliver=true` and no round left. So RUN is read twice: here for its settings, which travel to
    the devices, and by the process of the ServerApp for the state.

    `superlink` names a connection in Flower's configuration, as for `flwr run`. RuntimeError if
    no device has the result then.
    """
    try:
        directory = RunDirectory.open(run, "deliver")
        settings, before = directory.read_settings(), directory.read_summary()
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}. {THERE}") from None
    app = app_folder()
    # One round was done at least, so that none is left.
    settings |= {
        "num-rounds": 1, "resume": str(run.absolute()), "deliver": True, "tracking": "none",
        "report": False,
    }  # fmt: skip
    if "preset" in settings:  # its file lies in the app, where devices know it by its name
        settings["preset"] = Path(str(settings["preset"])).name.removesuffix(".yaml")
    read_config(settings)  # refused, if at all, before anything is sent
    words = in_toml(settings)
    say(f"This stands for:\n  flwr run . {superlink} --stream -c {shlex.quote(words)}\n")
    environment = os.environ | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    status = submit(app, superlink, words, environment)
    if status != COMPLETED:
        raise RuntimeError(
            f"the delivery ended as {status!r}, expected {COMPLETED!r}; what it printed stands "
            f"above. {THERE}"
        )
    after = directory.read_summary()
    if after == before and "delivered" not in before:
        raise RuntimeError(f"nothing was noted in {run / 'summary.json'}. {THERE}")
    if not after["delivered"]:
        reasons = listed(f"{node['client']}: {node['reason']}" for node in after["not-delivered"])
        raise RuntimeError(f"no device has the result: {reasons or 'none was connected'}")
    return after
