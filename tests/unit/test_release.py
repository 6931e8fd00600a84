"""Sdist, wheel and app bundle are complete, and all files have the same version.

`make release` also installs and runs each of them.
"""

import re
from pathlib import Path

import pytest
import yaml

from scripts import release
from tests.support.checkout import copy_checkout

ROOT = Path(__file__).resolve().parents[2]
# Flower uses pathspec's old name of a pattern.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    (folder / "dist").mkdir()
    return release.build(copy_checkout(folder / "checkout"), folder / "dist")


@pytest.mark.slow
def test_each_package_has_what_the_app_needs_and_nothing_else(packages):
    release.check_contents(ROOT, *packages)
    wheel = release.members(packages[1])
    for name in ("py.typed", "conf/digits-vit.yaml", "training/backbones/digits-vit.json"):
        assert f"ravan_flwr/{name}" in wheel


def test_untracked_files_are_not_in_an_app_bundle(packages):
    folders = {name.split("/")[0] for name in release.members(packages[2]) if "/" in name}
    assert folders == {".info", "conf", "ravan_flwr"}


def test_missing_and_unexpected_files_are_reported(packages, tmp_path):
    for name in ("conf/new.yaml", "ravan_flwr/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"whl has .*server_app.* too much and lacks .*new\.yaml"):
        release.check_contents(tmp_path, *packages)


@pytest.fixture
def app(tmp_path):
    """Write a folder that Flower Hub accepts."""
    folder = tmp_path / "app"
    folder.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_flower_hub_accepts_the_checkout(tmp_path):
    report = release.check_hub(copy_checkout(tmp_path / "checkout"))
    files, size = (int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", report))
    assert 400 < files < 1000
    assert 2e6 < size < 10e6


@pytest.mark.parametrize(
    ("number", "size", "content", "complaint"),
    [
        (1, 2**20 + 1, b"a", "File too large: .*0.md"),
        (999, 1, b"a", "Too many files: 1001"),
        (11, 2**20, b"a", "Total size of all files is too large"),
        (1, 1, b"\xff", "0.md' is not UTF-8"),
    ],
)
def test_files_that_flower_hub_refuses_are_reported(app, number, size, content, complaint):
    for index in range(number):
        (app / f"{index}.md").write_bytes(content * size)
    with pytest.raises(ValueError, match=f"Flower Hub would refuse .*{complaint}"):
        release.check_hub(app)


def test_file_types_that_flower_hub_skips_are_not_counted(app):
    (app / "picture.png").write_bytes(b"\xff" * 2**21)
    assert release.check_hub(app).startswith("2 files")


def test_all_files_have_the_same_version():
    stated = release.versions(ROOT)
    assert len(set(stated.values())) == 1, stated


def test_hooks_and_the_public_ci_run_the_steps_of_make_check():
    makefile = (ROOT / "Makefile").read_text()
    parts = re.findall(r"^check: (.*)$", makefile, re.MULTILINE)[0].split()
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [
        f"make {part}" for part in parts if "test" not in part
    ]
    workflow = yaml.safe_load((ROOT / ".github/workflows/check.yml").read_text())
    assert "make check" in [step.get("run") for step in workflow["jobs"]["check"]["steps"]]
