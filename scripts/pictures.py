"""Make the README's pictures: a run in a terminal, and its report.

    python -m scripts.pictures              # two minutes; needs chromium

The run is the default one, of `make run`. The terminal is drawn by rich, the page by a browser.
"""

import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from scripts.draw_layers import ROOT

WIDTH, HEIGHT = 1240, 1290  # of the report's first screen
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Run, and draw both."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"error: found none of {', '.join(BROWSERS)}, expected one to draw the report")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ravan_flwr", "simulate", "--engine", "flower"]
        subprocess.run([*command, f"output-dir={folder}"], cwd=ROOT, check=True)
        (run,) = Path(folder).iterdir()
        printed = (run / "log.txt").read_text(encoding="utf-8").replace(folder, "runs")
        draw_terminal(printed, ROOT / "docs" / "run.svg")
        page, picture = run / "report" / "index.html", ROOT / "docs" / "report.png"
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--hide-scrollbars",
             f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()],
            check=True,
        )  # fmt: skip


def draw_terminal(printed: str, path: Path) -> None:
    """Draw a command's output as in a terminal, in available fonts."""
    console = Console(record=True, width=118, file=io.StringIO())
    console.print(Text("$ make run\n…", style="bold"))
    for dated in printed.splitlines():
        line = re.sub(r"^\S+ \S+ [A-Z]+ +", "", dated)
        text = Text(line, style="bold green" if line.startswith("done:") else "")
        text.highlight_regex(r"accuracy [\d.]+", "cyan")
        console.print(text)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="make run"), flags=re.S)
    path.write_text(drawn.replace("Fira Code", "Menlo"), encoding="utf-8")


if __name__ == "__main__":
    main()
