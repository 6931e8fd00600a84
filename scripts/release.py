"""Build sdist, wheel and app bundle into dist/, and test each outside of the checkout.

    python -m scripts.release        (make release; some minutes, mostly of pip)

Everything is built from the last commit, so that no other file of the checkout is included.
Each package is installed into an empty environment and runs there: wheel and sdist by the command
`ravan-flwr`, the app bundle by `flwr run` from its unpacked folder. The upload of
`flwr app publish` is checked against Flower's limits for its Hub.
"""

import contextlib
import importlib
import io
import logging
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

import click

from ravan_flwr.launch.submit import COMPLETED
from ravan_flwr.launch.superlink import LocalSuperLink
from ravan_flwr.messages.fingerprint import NOT_IN_APPS

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PACKAGE = "ravan_flwr"
TYPED = f"{PACKAGE}/py.typed"  # unused by a run, and refused by Flower's bundles
# A short run of the app: data, backbone, preset, training, records and report.
SETTINGS = ["clients-per-round=2", "num-rounds=1", "local-steps=2"]
RUN = ["simulate", "num-clients=2", *SETTINGS]
TYPES = """\
from typing import assert_type

from ravan_flwr import Simulation, simulate

assert_type(simulate({"seed": 1}), Simulation)
"""
log = logging.getLogger("release")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without access to the checkout; return its output."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(
            f"release: {' '.join(map(str, command))} in {cwd} ended with {done.returncode}, "
            f"expected 0; it said:\n{done.stdout[-4000:]}"
        )
    return done.stdout


def versions(root: Path) -> dict[str, str]:
    """Read the version in each file that has one; the first section of the changelog counts."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    found = {
        "CHANGELOG.md": re.search(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE),
        "CITATION.cff": re.search(r"^version: (\S+)$", citation, re.MULTILINE),
    }
    return {"pyproject.toml": project["version"]} | {
        name: match[1] if match else "none" for name, match in found.items()
    }


def last_commit(folder: Path) -> Path:
    """Unpack the last commit into a folder; RuntimeError if the checkout has changes."""
    if changes := run("git", "status", "--porcelain", cwd=ROOT):
        raise RuntimeError(
            f"release: the checkout has changes, expected none; commit or stash them:\n{changes}"
        )
    source = folder / "ravan-flwr"
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    return source


def package_files(root: Path) -> set[str]:
    """List the files that an installed app needs: the package's and the presets'."""
    return {
        path.relative_to(root).as_posix()
        for folder in (PACKAGE, "conf")
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def of_apps(files: set[str]) -> set[str]:
    """Select the files of server and clients, without subpackages of commands and studies."""
    commands = (*(f"{PACKAGE}/{name}/" for name in NOT_IN_APPS), "conf/studies/")
    return {name for name in files - {TYPED} if not name.startswith(commands)}


def build(source: Path, folder: Path) -> tuple[Path, Path, Path]:
    """Build the sdist, the wheel and the app bundle of a tree into a folder."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=source)
    run(Path(sys.executable).with_name("flwr"), "build", "--app", source, cwd=folder)
    one = {ending: next(folder.glob(f"*{ending}")) for ending in (".tar.gz", ".whl", ".fab")}
    return one[".tar.gz"], one[".whl"], one[".fab"]


def members(package: Path) -> dict[str, bytes]:
    """Read a wheel, an app bundle or an sdist: path -> content, without an sdist's top folder."""
    if package.name.endswith(".tar.gz"):
        with tarfile.open(package) as archive:
            return {
                member.name.split("/", 1)[1]: content.read()
                for member in archive
                if (content := archive.extractfile(member))
            }
    with zipfile.ZipFile(package) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def check_contents(root: Path, sdist: Path, wheel: Path, bundle: Path) -> None:
    """Compare each package with the tree; ValueError names unexpected and missing files."""
    files = package_files(root)
    extra = {"pyproject.toml", "README.md", "LICENSE"}
    info = re.compile(r"ravan_flwr-[^/]+\.dist-info/")
    packed = {f"{PACKAGE}/{name}" if name.startswith("conf/") else name for name in files}
    for package, found, expected in (
        (wheel, {name for name in members(wheel) if not info.match(name)}, packed),
        (bundle, set(members(bundle)), of_apps(files) | extra | {".info/CONTENT"}),
        (sdist, set(members(sdist)) & (files | extra), files | extra),
    ):
        if wrong := found ^ expected:
            raise ValueError(
                f"release: {package.name} has {sorted(wrong & found) or 'nothing'} too much and "
                f"lacks {sorted(wrong & expected) or 'nothing'}; see [tool.hatch.build] and "
                "fab-include in pyproject.toml"
            )


def check_sdist(sdist: Path, wheel: Path, folder: Path) -> None:
    """Build a wheel from the sdist; ValueError if it differs from the tree's."""
    run(
        sys.executable,
        *"-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir".split(),
        folder,
        sdist,
        cwd=folder,
    )
    again = members(folder / wheel.name)
    first = members(wheel)
    if wrong := sorted(name for name in again | first if again.get(name) != first.get(name)):
        raise ValueError(
            f"release: the sdist's wheel differs in {wrong}, expected {wheel.name}; see "
            "[tool.hatch.build.targets.sdist] in pyproject.toml"
        )


def check_hub(app: Path) -> str:
    """Check the upload of `flwr app publish` for a folder; ValueError names what is refused.

    Flower 1.41 takes files that end in .py, .toml, .md, .yaml, .yml, .json or .jsonl, and LICENSE:
    1,000 files of 1 MiB each, 10 MiB in all, in UTF-8. It checks them only after the login.
    """
    hub = importlib.import_module("flwr.cli.app_cmd.publish")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            hub._validate_files(hub._collect_file_paths(app))
    except click.ClickException as error:
        raise ValueError(
            f"release: Flower Hub would refuse {app}: {error.message} Shorten or remove the file"
        ) from error
    return printed.getvalue().splitlines()[-1]


def install(folder: Path, *packages: str | Path) -> Path:
    """Install packages into an empty environment, with pinned versions; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(
        python,
        *"-m pip install --quiet --disable-pip-version-check --constraint".split(),
        ROOT / "constraints.txt",
        *packages,
        cwd=folder,
    )
    return python


def check_results(folder: Path, output: str) -> None:
    """Check that a run's results are in a folder; RuntimeError if one is missing."""
    for name in ("summary.json", "adapter/adapter_config.json", "report/index.html"):
        if len(list(folder.glob(f"runs/*/{name}"))) != 1:
            raise RuntimeError(f"release: a run left no {name}, expected one; it said:\n{output}")


def check_installed(package: Path, folder: Path) -> None:
    """Install a wheel or an sdist; use the command and the types from an empty folder."""
    folder.mkdir()
    python = install(folder / "environment", package)
    command = python.with_name("ravan-flwr")
    run(command, "--help", cwd=folder)
    check_results(folder, run(command, *RUN, cwd=folder))
    (folder / "uses_types.py").write_text(TYPES, encoding="utf-8")
    run(
        sys.executable,
        *"-m mypy --strict --python-executable".split(),
        python,
        "uses_types.py",
        cwd=folder,
    )


def check_bundle(bundle: Path, folder: Path) -> None:
    """Unpack the app bundle, install its dependencies alone, and call `flwr run` for it."""
    app = folder / "app"
    shutil.unpack_archive(bundle, app, format="zip")
    project = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = install(folder / "environment", *project["dependencies"])
    superlink = LocalSuperLink()
    # Its own scripts alone: neither the package nor the command is installed there.
    superlink.environment["PATH"] = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    settings = " ".join([*SETTINGS, f"output-dir='{folder / 'runs'}'"])
    with superlink:
        status = superlink.run(app, settings, "num-supernodes=2")
    if status != COMPLETED:
        raise RuntimeError(f"release: the bundle's run ended as {status!r}, expected {COMPLETED!r}")
    check_results(folder, "see above")


def release(folder: Path) -> list[Path]:
    """Build and test everything; copy it to dist/ if all tests pass."""
    if len(set((stated := versions(ROOT)).values())) != 1:
        raise ValueError(f"release: versions are {stated}, expected one; correct the files")
    log.info("version %s", stated["pyproject.toml"])
    built = folder / "built"
    built.mkdir()
    source = last_commit(folder)
    sdist, wheel, bundle = build(source, built)
    check_contents(source, sdist, wheel, bundle)
    log.info("built; each has what it must have and nothing else")
    log.info("Flower Hub's limits: %s", check_hub(source))
    (folder / "again").mkdir()
    check_sdist(sdist, wheel, folder / "again")
    log.info("the sdist builds the same wheel")
    for package in (wheel, sdist):
        check_installed(package, folder / "installed")
        shutil.rmtree(folder / "installed")  # gigabytes
        log.info("%s runs in an empty environment, mypy sees its types", package.name)
    check_bundle(bundle, folder / "bundle")
    log.info("%s runs in an empty environment, from where it was unpacked", bundle.name)
    DIST.mkdir(exist_ok=True)
    return [Path(shutil.copy2(package, DIST)) for package in (sdist, wheel, bundle)]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        with tempfile.TemporaryDirectory(prefix="ravan-flwr-release-") as place:
            for package in release(Path(place)):
                log.info("%9d bytes  %s", package.stat().st_size, package.relative_to(ROOT))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
