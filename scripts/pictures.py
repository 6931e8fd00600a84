"""Make the README's pictures again: a run in a terminal, and its report.

    python -m scripts.pictures              # two minutes; needs chromium

The run is the default one, of `make run`. The terminal is drawn by rich, the page by a browser.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from scripts.draw_house import ROOT

WIDTH, HEIGHT = 1240, 1130  # of the report's first screen
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Run, and draw both."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"error: found none of {', '.join(BROWSERS)}, expected one to draw the report")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ravan_flwr", "run", f"output-dir={folder}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        (run,) = Path(folder).iterdir()
        draw_terminal(done.stdout.replace(folder, "runs"), ROOT / "docs" / "run.svg")
        page, picture = run / "report" / "index.html", ROOT / "docs" / "report.png"
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--hide-scrollbars",
             f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture}", page.as_uri()],
            check=True,
        )  # fmt: skip


def draw_terminal(printed: str, path: Path) -> None:
    """Draw what a command printed, as a terminal would show it."""
    console = Console(record=True, width=120, file=tempfile.TemporaryFile("w"))
    console.print(Text("$ make run", style="bold"))
    for line in printed.splitlines():
        is_end = line.startswith("done:")
        text = Text(re.sub(r"\s+$", "", line), style="bold green" if is_end else "")
        text.highlight_regex(r"accuracy [\d.]+", "cyan")
        console.print(text)
    console.save_svg(str(path), title="make run")


if __name__ == "__main__":
    main()
