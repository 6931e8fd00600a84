"""The examples run unchanged, in another folder and offline."""

import base64
import inspect
import json
import os
import re
import tomllib

import nbformat
import pytest
from nbclient import NotebookClient

from scripts import notebook_page
from tests import ROOT

SCRIPT = ROOT / "examples" / "peft_script.py"
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
PAGE = ROOT / "docs" / "library.md"


@pytest.mark.slow
def test_the_script_has_forty_lines_at_most_and_learns(tmp_path, python):
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 40
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = python.run([str(SCRIPT)], folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^accuracy (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) > 0.9
    assert (tmp_path / "digits-adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_the_comparison_of_methods_writes_its_files(tmp_path, python):
    script = ROOT / "examples" / "compare_methods.py"
    words = [str(tmp_path), "num-rounds=2", "local-steps=2", "num-clients=4", "tracking=none"]
    ended = python.run([str(script), *words])
    assert ended.returncode == 0, ended.stderr
    for name in ("report/index.html", "spectra/spectrum.csv", "model/config.json"):
        assert (tmp_path / name).is_file()
    # The model from the run's directory has the run's final accuracy.
    final = re.findall(r"'accuracy': ([\d.]+)", ended.stdout)
    assert float(final[0]) == pytest.approx(float(final[2]))


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed_by(cell):
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_is_stored_with_outputs_that_do_not_change(notebook):
    """`python -m scripts.notebook_page` stores it."""
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in code_of(notebook):
        assert cell.execution_count is None
        assert not cell.metadata
        assert {output.output_type for output in cell.outputs} <= {"stream", "display_data"}
        changing = r"/tmp|/home|run directory|\d{8}-\d{6}|\d s\b|\bmin\b|clients at a time"
        assert not re.search(changing, printed_by(cell)), cell.id
    drawn = [cell.id for cell in code_of(notebook) if "image/png" in str(cell.outputs)]
    assert drawn == ["head-picture", "curves", "budgets", "use"]


def test_the_notebooks_page_shows_its_cells_and_outputs(notebook):
    """`python -m scripts.notebook_page` writes it again."""
    page = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")
    for cell in code_of(notebook):
        assert f"```python\n{cell.source}\n```\n" in page, cell.id
        if printed := printed_by(cell):
            assert f"```text\n{printed}```\n" in page, cell.id
        for output in cell.outputs:
            if "data" in output:
                picture = ROOT / "docs" / "pictures" / f"notebook-{cell.id}.png"
                assert picture.read_bytes() == base64.b64decode(output.data["image/png"])
                assert f"(pictures/{picture.name})" in page
    for cell in notebook.cells[1:]:
        assert cell.source in page, cell.id


@pytest.fixture
def _forked_kernel(tmp_path, monkeypatch, python):
    """Run the notebook's kernel in a fork that has imported the libraries."""
    spec = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [python.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    command += ["--matplotlib=inline"]  # as the kernel itself would set it too late
    spec.write_text(json.dumps({"argv": command, "display_name": "", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


MEASURED = re.compile(r"\d\.\d{3,}")  # losses and accuracies


def assert_alike(printed, stored):
    """Check texts that may differ in what is measured, by what another processor changes."""
    assert MEASURED.sub("x", printed) == MEASURED.sub("x", stored)
    measured, expected = ([float(x) for x in MEASURED.findall(text)] for text in (printed, stored))
    assert measured == pytest.approx(expected, abs=0.03)


@pytest.mark.slow
@pytest.mark.usefixtures("_forked_kernel")
def test_the_notebook_runs_and_prints_and_draws_what_is_stored(notebook, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    executed = NotebookClient(
        nbformat.from_dict(notebook), timeout=None, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = {
        cell.id: [output.data for output in cell.outputs if "data" in output]
        for cell in code_of(executed)
    }
    pictures = {name for name, data in shown.items() if any("image/png" in kinds for kinds in data)}
    assert pictures == {"head-picture", "curves", "budgets", "use"}
    for cell, stored in zip(code_of(executed), code_of(notebook), strict=True):
        assert_alike(notebook_page.printed(cell), printed_by(stored))
    printed = {cell.id: printed_by(cell) for cell in code_of(executed)}
    assert "260 trained numbers, 9216 in the layer" in printed["head-picture"]
    found = re.findall(r"accuracy (\d\.\d+), ([\d,]+) bytes up", printed["budgets"])
    (full, bytes_of_full), (unequal, bytes_of_unequal) = found
    assert float(full) > 0.5
    assert float(unequal) > 0.4
    assert int(bytes_of_unequal.replace(",", "")) < int(bytes_of_full.replace(",", ""))
    assert "4 heads" in printed["use"]


def test_the_printed_configurations_train_and_save_the_classifier():
    for page in (PAGE, ROOT / "README.md"):
        printed = re.findall(
            r"RavanConfig\((?=[^)]*target_modules)[^)]*\)", page.read_text(encoding="utf-8")
        )
        assert printed
        assert all('task_type="SEQ_CLS"' in call for call in printed)


def test_the_page_lists_every_field_with_its_default_and_help():
    from dataclasses import fields

    from ravan_flwr import RavanConfig

    page, docstring = PAGE.read_text(encoding="utf-8"), inspect.getdoc(RavanConfig) or ""
    arguments = re.sub(r"\n {8}", " ", docstring)  # each in one line
    for field in fields(RavanConfig):
        if field.name in RavanConfig.__annotations__:
            pattern = rf"^    {field.name} \(.*, default {field.default!r}\): (.*)\.$"
            (meaning,) = re.findall(pattern, arguments, re.MULTILINE)
            assert f"| `{field.name}` | `{field.default!r}` | {meaning} |" in page


def test_the_extra_admits_the_oldest_release_that_is_tested():
    from tests.runs.test_peft_training import OLDEST

    project_file = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project_file["project"]["optional-dependencies"]["peft"] == [
        f"peft>={OLDEST.rpartition('.')[0]}"
    ]
