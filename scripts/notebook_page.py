"""Run examples/notebook.ipynb, store it with its outputs, and write docs/notebook.md from it.

    python -m scripts.notebook_page       # some minutes; needs nbclient and ipykernel

What differs from one execution to the next is left out of the outputs: times, paths, progress bars.
Pictures of the page are docs/pictures/notebook-CELL.png.
"""

import base64
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK, PAGE = ROOT / "examples" / "notebook.ipynb", ROOT / "docs" / "notebook.md"
# Whole lines on the run's directory and on this machine's cores; durations of rounds and of runs.
CHANGING = re.compile(
    r"^(?:run directory: |\d+ clients at a time).*\n"
    r"|  [\d.]+ s  left (?:[\d.]+ (?:s|min|h) ?)+$"
    r"| in (?:\d+ (?:s|min|h) ?)+(?=;)",
    re.MULTILINE,
)
NOTE = """
This page is [the notebook](../examples/notebook.ipynb) with its outputs, without times and paths.
To run it yourself:
```
pip install -e ".[peft]" jupyter
jupyter lab examples/notebook.ipynb
```"""


def printed(cell: Any) -> str:
    """Return what a cell printed that is the same in each execution."""
    text = "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
    return CHANGING.sub("", text)


def keep_what_repeats(cell: Any) -> None:
    """Leave of a cell's outputs what it printed and drew, without counts of executions."""
    drawn = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    text, cell.execution_count, cell.metadata = printed(cell), None, {}
    new_output: Any = nbformat.v4.new_output
    cell.outputs = [new_output("stream", name="stdout", text=text)] if text else []
    for output in drawn:
        data = {"image/png": output.data["image/png"]}
        cell.outputs.append(new_output("display_data", data=data))


def as_markdown(cell: Any) -> str:
    """Return a cell as Markdown."""
    if cell.cell_type == "markdown":
        text, *_ = str(cell.source).split("\n\nInstall it with", maxsplit=1)
        return text + "\n" + NOTE if cell.id == "title" else text
    shown = [f"```python\n{cell.source}\n```"]
    if text := printed(cell).rstrip():
        shown.append(f"```text\n{text}\n```")
    shown += [
        f"![Output of the cell `{cell.id}`](pictures/{picture_name(cell)})"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    return "\n\n".join(shown)


def picture_name(cell: Any) -> str:
    """Return the name of the file with a cell's picture."""
    return f"notebook-{cell.id}.png"


def page_of(notebook: Any) -> str:
    """Return the page that shows a notebook."""
    return "\n\n".join(map(as_markdown, notebook.cells)) + "\n"


def main() -> None:
    """Run the notebook in a folder of its own; write it, its page and the page's pictures."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}})
        client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            keep_what_repeats(cell)
            for output in cell.outputs:
                if "data" in output:
                    picture = base64.b64decode(output.data["image/png"])
                    (PAGE.parent / "pictures" / picture_name(cell)).write_bytes(picture)
    nbformat.write(notebook, NOTEBOOK)  # type: ignore[no-untyped-call]
    PAGE.write_text(page_of(notebook), encoding="utf-8")


if __name__ == "__main__":
    main()
