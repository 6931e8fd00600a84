"""Read the fenced blocks of the documents, and the commands in them.

Bash reads the blocks of commands. In place of each program it records the program's words, so that
loops, comments and quotation marks mean what they mean in a shell, and nothing is started.
"""

import functools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PLACES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "tests/*.md")
PAGES = sorted({page for place in PLACES for page in ROOT.glob(place)})

# A program is not found, so that bash calls the handler. What else would stop a block is replaced.
RECORDER = r"""exec 3>&1 1>&2
PATH=/nowhere
command_not_found_handle() { printf '%s\0' "${BASH_LINENO[0]}" "$#" "$@" >&3; }
cd() { :; }; source() { :; }; ls() { echo RUN; }; id() { echo 1; }; tail() { read -r x; echo "$x"; }
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `line` is its first line."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Return where the block is, as editors find it."""
        return f"{self.page}:{self.line}"


@functools.cache
def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Return the place and the words of each command in a block of a shell."""
    if block.language not in ("", "bash", "sh"):
        return []
    text = RECORDER + re.sub(r"\.venv/bin/(?=\w)", "", block.text)
    folder = Path(__file__).parent
    done = subprocess.run(
        ["bash"], input=text.encode(), env={"HOME": "~"}, cwd=folder, capture_output=True
    )
    if b"syntax error" in done.stderr:
        raise ValueError(f"{block.place}: bash cannot read it: {done.stderr.decode()}")
    found = []
    fields = iter(done.stdout.decode().split("\0")[:-1])
    for number in fields:
        words = [next(fields) for _ in range(int(next(fields)))]
        line = block.line + int(number) - RECORDER.count("\n") - 1
        found.append((f"{block.page}:{line}: {' '.join(words)}", words))
    return found


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, without their indentation."""
    blocks, text = [], page.read_text(encoding="utf-8")
    for fence in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        code = re.sub(rf"^{fence[1]}", "", fence[3], flags=re.MULTILINE)
        line = text.count("\n", 0, fence.start()) + 2
        blocks.append(Block(str(page.relative_to(ROOT)), line, fence[2], code))
    return blocks


def text_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
