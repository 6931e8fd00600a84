"""The app bundle, and runs of it through Flower's own simulation runtime."""

import json
import os
import shlex
import subprocess
import sys
import zipfile

import pytest
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr import simulate
from ravan_flwr.cli import main
from ravan_flwr.config.keys import KEYS, read_settings
from ravan_flwr.launch.sharing import Sharing
from ravan_flwr.launch.submit import as_toml, in_toml
from ravan_flwr.launch.superlink import LocalSuperLink
from ravan_flwr.messages.fingerprint import NOT_IN_APPS
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar
from tests import ROOT, short_runs
from tests.commands import error_of
from tests.support.checkout import copy_checkout
from tests.support.deployment import copy_app

NODES = 3
FEDERATION = (
    f"num-supernodes={NODES} client-resources-num-cpus={os.cpu_count()}"  # one actor imports once
)

SHORT = short_runs.SHORT | {"local-steps": 3, "clients-per-round": 2}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("fab")
    flwr = python.scripts / "flwr"  # the environment need not be activated
    app = copy_checkout(tmp_path_factory.mktemp("checkout") / "ravan-flwr")
    subprocess.run([flwr, "build", "--app", app], cwd=folder, check=True)
    (path,) = folder.glob("*.fab")
    return path


@pytest.mark.slow
def test_the_bundle_can_be_published(bundle):
    assert bundle.stat().st_size < 2_200_000
    with zipfile.ZipFile(bundle) as archive:
        for entry in archive.infolist():
            assert entry.file_size < 1_000_000, entry.filename
            archive.read(entry).decode("utf-8")
        names = set(archive.namelist())
    needed = [*ROOT.glob("conf/*.yaml"), *ROOT.glob("ravan_flwr/training/backbones/*.json")]
    assert {str(path.relative_to(ROOT)) for path in needed} <= names
    assert {"LICENSE", "pyproject.toml", "ravan_flwr/server_app.py"} <= names
    top_level = {name.split("/")[0] for name in names}
    subpackages = {name.split("/")[1] for name in names if name.startswith("ravan_flwr/")}
    subpackages_here = {
        path.name for path in (ROOT / "ravan_flwr").iterdir() if any(path.glob("*.py"))
    }
    assert subpackages_here - subpackages == set(NOT_IN_APPS)
    assert top_level == {".info", "LICENSE", "README.md", "conf", "pyproject.toml", "ravan_flwr"}


@pytest.fixture(scope="module")
def superlink(python):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python.executable)
        link = LocalSuperLink()
    with link:
        yield link
    assert link._process is not None
    with pytest.raises(ProcessLookupError):  # no process is left
        os.killpg(link._process.pid, 0)


@pytest.mark.slow
def test_the_bundle_gives_the_results_of_simulate_outside_the_checkout(bundle, superlink, tmp_path):
    """The run config passes through Flower's command line."""
    app = tmp_path / "ravan-flwr"
    with zipfile.ZipFile(bundle) as archive:
        archive.extractall(app)
    # A preset that only this copy has proves that the bundle runs, not the checkout.
    preset = (app / "conf" / "digits-vit.yaml").read_text()
    shorter = preset.replace("local-steps: 50", "local-steps: 2")
    (app / "conf" / "only-here.yaml").write_text(shorter)
    runs = tmp_path / 'it\'s "there" $a_b$'
    settings: dict[str, Scalar] = {"num-rounds": 2, "budgets": "uniform"}
    bundle_settings = settings | {"preset": "only-here", "output-dir": str(runs)}
    assert superlink.run(app, in_toml(bundle_settings), FEDERATION) == "finished:completed"

    (directory,) = runs.iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["preset"], summary["num-clients"], summary["rounds"]) == ("only-here", 3, 2)
    for line in (directory / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["rejected"] == []
        assert [client["partition-id"] for client in record["clients"]] == [0, 1, 2]
    assert (directory / "report" / "index.html").is_file()

    here: dict[str, Scalar] = {
        "local-steps": 2,
        "tracking": "none",
        "output-dir": str(tmp_path / "here"),
    }
    expected = simulate(settings | here, NODES).summary
    keys = ("method", "rounds", "rejected", "bytes-up", "bytes-down", "rank")
    assert_same(summary, expected, keys)


def assert_same(summary, expected, keys):
    assert {key: summary[key] for key in keys} == {key: expected[key] for key in keys}
    assert summary["metrics"]["final"] == pytest.approx(expected["metrics"]["final"], abs=0.02)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return copy_app(tmp_path_factory.mktemp("app") / "ravan-flwr")


@pytest.fixture(scope="module")
def runs_of_all_methods(tmp_path_factory, python):
    """Run each method under Ray, in one simulation, since Ray takes half a minute to start."""
    folder = tmp_path_factory.mktemp("methods")
    settings = {key: spec.default for key, spec in KEYS.items()} | SHORT
    runs = [settings | {"method": name, "output-dir": str(folder / name)} for name in METHODS]
    done = python.run(["-m", "tests.flower.in_turn", "ravan_flwr", str(NODES), json.dumps(runs)])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_in_flowers_runtime(method, runs_of_all_methods, tmp_path):
    (directory,) = (runs_of_all_methods / method).iterdir()
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["method"], summary["rounds"], summary["rejected"]) == (method, 2, 0)
    in_process = short_runs.run(tmp_path, NODES, SHORT, method=method).summary
    keys = ("bytes-up", "bytes-down", "trainable-parameters", "rank")
    assert_same(summary, in_process, keys)


@pytest.mark.slow
def test_a_failed_run_with_gpu_shares_has_status_failed(superlink, app, tmp_path, capfd):
    """Ray gets a GPU by configuration: it divides it without using it, and PyTorch uses the CPU."""
    federation = f"{Sharing(3).federation(3)} init-args-num-gpus=1"
    assert "client-resources-num-gpus=0.3333 " in federation
    config = (
        f"output-dir='{tmp_path}' num-rounds=1 local-steps=1 device='cpu' "
        "limits='max-update-norm=1e-9'"
    )
    assert superlink.run(app, config, federation) == "finished:failed"
    output = capfd.readouterr().out
    assert "3 nodes with" in output
    assert "3 nodes, and the preset has 20 clients; for as many use flwr run . --stream" in output
    assert "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" not in output
    (directory,) = tmp_path.iterdir()
    assert "got no valid reply" in json.loads((directory / "failure.json").read_text())["error"]


@pytest.mark.slow
def test_a_wrong_value_is_reported_in_one_line(superlink, app, capfd):
    assert superlink.run(app, "method='hetlra'", FEDERATION) == "finished:failed"
    output = capfd.readouterr().out
    (line,) = [line for line in output.splitlines() if "hetlra" in line]
    assert "method 'hetlra' is unknown: did you mean 'hetlora'? Expected one of: ravan" in line
    assert "Traceback" not in output


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8")) | st.text("'\"\\ \t\n=.$#") | st.just("a.toml"))
def test_flower_parses_every_text_unchanged(text):
    """Its parser splits at spaces and does not support a quote within quotes of the same kind."""
    words = f"before=1 key={as_toml(text)} after='x'"
    assert parse_config_args([words]) == {"before": 1, "key": text, "after": "x"}
    assert parse_config_args([f"key={as_toml(text)}"]) == {"key": text}


@pytest.mark.parametrize("name", ["it's here", "'", '"', "a b", "$x$", "back\\slash", "ends'"])
def test_a_path_reaches_flower_unchanged(name, tmp_path, monkeypatch, capsys):
    configs = []

    def run(_, app, config, federation):
        configs.append(config)
        return "finished:completed"

    monkeypatch.setattr(LocalSuperLink, "run", run)
    monkeypatch.setattr(LocalSuperLink, "__enter__", lambda link: link)
    monkeypatch.chdir(ROOT)
    main(["simulate", "--engine=flower", f"output-dir={tmp_path}/{name}"])
    assert parse_config_args(configs)["output-dir"] == f"{tmp_path}/{name}"
    printed = next(line for line in capsys.readouterr().out.splitlines() if "flwr run" in line)
    words = shlex.split(printed)  # the printed command, pasted into a shell
    assert parse_config_args([words[words.index("-c") + 1]])["output-dir"] == f"{tmp_path}/{name}"


@given(st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False))
def test_flower_parses_every_number_unchanged(value):
    read = parse_config_args([f"before=1 key={as_toml(value)} after='x'"])
    assert read == {"before": 1, "key": value, "after": "x"}
    assert type(read["key"]) is type(value)


def test_quotes_around_a_value_are_taken_off_in_pairs():
    settings = ["a='x'", 'b="x"', "c='", "d=it's'", "e=''"]
    assert read_settings(settings)[0] == {"a": "x", "b": "x", "c": "'", "d": "it's'", "e": ""}


@pytest.mark.slow
def test_a_folder_without_the_app_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "found no pyproject.toml in" in error_of(capsys, "simulate", "--engine=flower")
