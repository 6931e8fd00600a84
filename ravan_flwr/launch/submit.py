"""Call `flwr run`, pass its output on, and say how the run ended: `flwr run` itself does not."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import tomli_w

from ravan_flwr.runs.console import say
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
    listed = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    try:
        return str(json.loads(listed.stdout)["runs"][0]["status"])
    except (ValueError, LookupError, TypeError):
        raise RuntimeError(
            f"`{shlex.join(command)}` ended with status {listed.returncode} and does not say how "
            f"the run has ended; its log stands above. It printed: "
            f"{(listed.stderr or listed.stdout)[-1000:].strip()}"
        ) from None


def in_toml(settings: Mapping[str, Scalar]) -> str:
    """Write settings for `flwr run -c`, which takes TOML, but no double quote within a text."""
    return " ".join(f"{key}={as_toml(value)}" for key, value in settings.items())


def as_toml(value: Scalar) -> str:
    """Write one value so."""
    written = tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
    return re.sub(r"\\(.)", lambda found: r"\u0022" if found[1] == '"' else found[0], written)
