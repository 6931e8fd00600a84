"""Call `flwr run`, forward its output, return how the run ended; deliver a result by such a run."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import tomli_w

from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.plain_text import listed
from ravan_flwr.runs.console import write_stdout
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Summary
from ravan_flwr.specs import Scalar

COMPLETED = "finished:completed"


def app_folder() -> Path:
    """Return the working directory, which `flwr run` sends; ValueError if it has no app."""
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
) -> str:
    """Call `flwr run --stream`, and return the run's final status.

    `superlink` names a connection in Flower's configuration, "" the default.
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
                if not re.fullmatch(r"\S*INFO \S*:\s*", line):  # an empty line of Flower's log
                    write_stdout(line)
                if match := re.search(r"Successfully started run (\d+)", line):
                    run_id = match[1]
        except BaseException:
            process.terminate()  # otherwise leaving this block would wait for its stream to end
            raise
    if process.returncode or run_id is None:
        when = "before the run started"
        if run_id is not None:  # such as by a lost connection
            shown = shlex.join(["flwr", "ls", *named, "--run-id", run_id])
            when = f"after run {run_id} had started; `{shown}` shows whether it goes on"
        raise RuntimeError(
            f"`{shlex.join(command)}` ended with status {process.returncode} {when}; its output is "
            "above"
        )
    command = ["flwr", "ls", *named, "--run-id", run_id, "--format", "json"]
    result = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    try:
        return str(json.loads(result.stdout)["runs"][0]["status"])
    except (ValueError, LookupError, TypeError):
        raise RuntimeError(
            f"`{shlex.join(command)}` ended with status {result.returncode} and does not report "
            f"how the run has ended; its log is above. It printed: "
            f"{(result.stderr or result.stdout)[-1000:].strip()}"
        ) from None


def in_toml(settings: Mapping[str, Scalar]) -> str:
    """Return settings for `flwr run -c`, which takes TOML, but no double quote within a text."""
    return " ".join(f"{key}={as_toml(value)}" for key, value in settings.items())


def as_toml(value: Scalar) -> str:
    """Return a value as TOML without a double quote within a text."""
    written = tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
    return re.sub(r"\\(.)", lambda match: r"\u0022" if match[1] == '"' else match[0], written)


RUN_DIRECTORY_HINT = (
    "RUN is a directory on the server's machine, which the process of the ServerApp wrote: call "
    "this command there, as a user who may read it; or submit the run's settings yourself, with "
    "resume='RUN' deliver=true (docs/operating.md)"
)


def deliver(run: Path, superlink: str) -> Summary:
    """Deliver a finished run's result by a SuperLink; return the summary of the run after it.

    The delivery is a Flower run of the same app with the run's settings, `resume=RUN`,
    `deliver=true` and no round left. So RUN is read twice: here for its settings, which are sent to
    the devices, and by the process of the ServerApp for the state.

    `superlink` names a connection in Flower's configuration, as for `flwr run`. RuntimeError if
    the result reaches no device.
    """
    try:
        directory = RunDirectory.open(run, "deliver")
        settings, before = directory.read_settings(), directory.read_summary()
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}. {RUN_DIRECTORY_HINT}") from None
    app = app_folder()
    # The run has at least one round, so none is left.
    settings |= {
        "num-rounds": 1, "resume": str(run.absolute()), "deliver": True, "tracking": "none",
    }  # fmt: skip
    if "preset" in settings:  # its file is in the app, where devices find it by its name
        settings["preset"] = Path(str(settings["preset"])).name.removesuffix(".yaml")
    read_config(with_preset_path(settings))  # raises its errors before anything is sent
    words = in_toml(settings)
    write_stdout(
        f"With Flower's own command:\n  flwr run . {superlink} --stream -c {shlex.quote(words)}\n"
    )
    environment = os.environ | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    status = submit(app, superlink, words, environment)
    if status != COMPLETED:
        raise RuntimeError(
            f"the delivery ended as {status!r}, expected {COMPLETED!r}; its output is "
            f"above. {RUN_DIRECTORY_HINT}"
        )
    after = directory.read_summary()
    if after == before and "delivered" not in before:
        raise RuntimeError(
            f"no delivery was recorded in {run / 'summary.json'}. {RUN_DIRECTORY_HINT}"
        )
    if not after["delivered"]:
        reasons = listed(f"{node['client']}: {node['reason']}" for node in after["not-delivered"])
        raise RuntimeError(f"no device has the result: {reasons or 'none was connected'}")
    return after
