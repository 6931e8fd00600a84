"""Run examples/notebook.ipynb, and write it with its outputs as docs/notebook.md.

    python -m scripts.notebook_page       # some minutes; needs nbclient and ipykernel

The notebook itself is stored without outputs. Pictures are docs/pictures/notebook-CELL.png.
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
RUN_FOLDER = re.compile(r"/\S*/(?=\d{8}-\d{6}-)")  # a temporary one
NOTE = """
This page is [the notebook](../examples/notebook.ipynb) with its outputs. To run it yourself:
```
pip install -e ".[peft]" jupyter
jupyter lab examples/notebook.ipynb
```"""


def write_cell(cell: Any, pictures: Path) -> str:
    """Return a cell as Markdown, and write its pictures."""
    if cell.cell_type == "markdown":
        text, *_ = str(cell.source).split("\n\nInstall it with", maxsplit=1)
        return text + "\n" + NOTE if cell.id == "title" else text
    shown = [f"```python\n{cell.source}\n```"]
    printed = [output.text for output in cell.outputs if output.get("name") == "stdout"]
    if text := RUN_FOLDER.sub("", "".join(printed)).rstrip():
        shown.append(f"```text\n{text}\n```")
    for output in cell.outputs:
        if "image/png" in output.get("data", {}):
            name = f"notebook-{cell.id}.png"
            (pictures / name).write_bytes(base64.b64decode(output.data["image/png"]))
            shown.append(f"![Output of the cell `{cell.id}`](pictures/{name})")
    return "\n\n".join(shown)


def main() -> None:
    """Run the notebook in a folder of its own, and write the page."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}})
        client.execute()
    cells = [write_cell(cell, PAGE.parent / "pictures") for cell in notebook.cells]
    PAGE.write_text("\n\n".join(cells) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
