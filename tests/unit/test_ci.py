"""CI runs every test: what tests need is installed, and a skip that is not listed fails."""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT

SKIPS = """
import pytest

@pytest.mark.skip(reason="nginx is not installed")
def test_needs_a_program(): ...

def test_skips_itself(): pytest.skip("needs Chromium")

@pytest.mark.skip(reason="PyTorch finds no CUDA GPU")
def test_has_no_marker(): ...

@pytest.fixture
def program(): pytest.skip("no program")

def test_has_a_fixture_that_skips(program): ...

@pytest.mark.gpu
@pytest.mark.skip(reason="PyTorch finds no CUDA GPU")
def test_of_a_gpu(): ...

@pytest.mark.skip(reason="root may write anywhere")
def test_of_permissions(): ...

@pytest.mark.xfail
def test_expected_to_fail(): assert False

def test_passes(): ...
"""
MODULE = "import pytest\npytest.importorskip('no_such_library')\n\ndef test_passes(): ...\n"


def run_tests(folder, number, *, ci):
    """Run the tests of a folder in that many processes, with the hooks; return code and output."""
    command = [
        sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-rA", "-n", number,
        "-p", "tests.skips", "-p", "no:cacheprovider", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"CI": ci, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"], ids=["one process", "xdist"])
def test_a_skip_that_is_not_listed_fails_in_ci(processes, tmp_path):
    (tmp_path / "test_a.py").write_text(SKIPS)
    code, out = run_tests(tmp_path, processes, ci="true")
    assert code == 1
    lines = out.splitlines()
    failed = "".join(line for line in lines if line.startswith(("ERROR", "FAILED")))
    for name in ("needs_a_program", "skips_itself", "has_no_marker", "has_a_fixture_that_skips"):
        assert f"::test_{name}" in failed
    assert "skipped with CI=true: nginx is not installed; expected that it runs" in out
    assert "skipped with CI=true: needs Chromium" in out
    assert "PASSED" in out
    assert "XFAIL" in out
    skipped = {line.rpartition(": ")[2] for line in lines if line.startswith("SKIPPED")}
    assert skipped == {"PyTorch finds no CUDA GPU", "root may write anywhere"}


@pytest.mark.slow
def test_a_file_that_is_skipped_fails_in_ci_and_no_skip_fails_elsewhere(tmp_path):
    (tmp_path / "test_b.py").write_text(MODULE)
    code, out = run_tests(tmp_path, "0", ci="true")
    assert code != 0
    assert "skipped with CI=true: could not import 'no_such_library'" in out
    (tmp_path / "test_a.py").write_text(SKIPS)
    code, out = run_tests(tmp_path, "0", ci="")
    assert code == 0
    assert "CI=true" not in out


def test_the_checks_of_this_repository_have_the_hooks():
    from tests import conftest, skips

    for hook in ("pytest_runtest_makereport", "pytest_make_collect_report"):
        assert getattr(conftest, hook) is getattr(skips, hook)


@pytest.fixture
def run_ci(tmp_path):
    """Return a function that runs .ci/run with that apt-get, and a make that prints its call."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "rm"):
        (programs / name).symlink_to(str(shutil.which(name)))

    def run(apt_get):
        for name, script in (("apt-get", apt_get), ("make", 'echo "make $*, CI=$CI"')):
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        return subprocess.run(
            ["bash", str(tmp_path / ".ci" / "run")],
            env={"PATH": str(programs)}, capture_output=True, text=True,
        )  # fmt: skip

    return run


def test_ci_installs_what_tests_need_or_fails(run_ci):
    done = run_ci('echo "apt-get $*"')
    assert done.returncode == 0
    assert "nginx-light" in done.stdout
    assert done.stdout.splitlines()[-1] == "make check, CI=true"
    done = run_ci("exit 100")
    assert done.returncode != 0
    assert "make" not in done.stdout


PROGRAM = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [ "$2" = pip ]; then echo "pip: $*"; fi
"""  # stands in for Python, also in the environment that it makes


@pytest.mark.parametrize("terminal", [True, False])
def test_make_says_what_it_installs_and_pip_shows_its_progress_in_a_terminal(terminal, tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "python").write_text(PROGRAM)
    (tmp_path / "python").chmod(0o755)
    command = ["make", "PYTHON=./python", ".venv/.installed"]
    reader, writer = os.openpty() if terminal else os.pipe()
    subprocess.run(command, cwd=tmp_path, stdout=writer, check=True)
    os.close(writer)
    with open(reader, closefd=True, errors="replace") as file:  # noqa: PTH123 (a descriptor)
        lines: list[str] = []
        with contextlib.suppress(OSError):  # of a terminal at its end
            lines += file
    out = "".join(lines)
    assert "Step 1 of 2: " in out
    assert "PyTorch" in out.partition("Step 2 of 2: pip installs")[2]
    (pip,) = (line for line in out.splitlines() if line.startswith("pip: "))
    assert ("--quiet" in pip) == (not terminal)
    assert "-c constraints.txt -e .[dev,docs]" in pip
