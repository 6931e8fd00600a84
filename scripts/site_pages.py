"""Add to the site of mkdocs.yml what is not in docs/: README, commands, the Python API.

The records of benchmarks/results/ and docs/appendix/ are pages that are not in the navigation.

    make docs        build/site/, offline; a warning is an error

A link from a page to another file of the repository leads to a copy of that file.
"""

import contextlib
import io
import os
import posixpath
import re
from pathlib import Path
from typing import Any
from unittest import mock

import ravan_flwr
from ravan_flwr import cli, strategies

ROOT = Path(__file__).resolve().parent.parent
RECORDS = {str(path.relative_to(ROOT)) for path in ROOT.glob("benchmarks/results/*.md")}
APPENDIX = "appendix/"
# Page of the site -> file of the repository.
BESIDE = {"index.md": "README.md"} | {
    name: name
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md",
                 "examples/own_app/README.md", "examples/own_trainer/README.md",
                 "examples/own_sft/README.md", *RECORDS)
}  # fmt: skip
PAGES = {file: page for page, file in BESIDE.items()}
LIST, IN_LIST = re.compile(r"(?:[-*]|1\.) "), re.compile(r"(?:[-*]|\d+\.)? ")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


def help_of(*words: str) -> str:
    """Return the output of a command with `--help`, in 80 columns."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "80"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        cli.main([*words, "--help"])
    return printed.getvalue()


def reference() -> str:
    """Write the commands from their own help, and the names that mkdocstrings fills."""
    text = [""]
    for name in re.findall(r"^    ([a-z]+)  ", help_of(), re.MULTILINE):
        about = help_of(name).split("\nKeys and defaults")[0].rstrip()
        text.append(f"## ravan-flwr {name}\n```text\n{about}\n```")
    for package in (ravan_flwr, strategies):
        text.append(f"## {package.__name__}")
        for name in package.__all__:
            thing = getattr(package, name)
            text.append(f"::: {thing.__module__}.{thing.__qualname__}")
    return "\n\n".join(text) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages, and the files that pages link to."""
    from mkdocs.structure.files import File, InclusionLevel  # installed by the extra `docs`

    pages = {page: (ROOT / file).read_text(encoding="utf-8") for page, file in BESIDE.items()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for file in files:
        if file.src_uri in RECORDS or file.src_uri.startswith(APPENDIX):
            file.inclusion = InclusionLevel.NOT_IN_NAV
    linked = set()
    for page in [file.src_uri for file in files if file.src_uri.endswith(".md")]:
        text = pages.get(page) or (ROOT / "docs" / page).read_text(encoding="utf-8")
        linked |= {target for target, _ in map(place, LINK.findall(text), [page] * len(text))}
    for target in linked:
        inside = (ROOT / "docs" / target).exists() or target in PAGES or target in pages
        if not inside and (ROOT / target).is_file() and not target.endswith(".md"):
            source = str(ROOT / target)
            files.append(File.generated(config, f"files/{target}", abs_src_path=source))
    return files


def place(link: tuple[str, str], page: str) -> tuple[str, str]:
    """Return the file of the repository or page of docs/ that a link on a page means."""
    source = BESIDE.get(page, f"docs/{page}")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[0]))
    return target.removeprefix("docs/"), link[1]


def separate_lists(markdown: str) -> str:
    """Put an empty line before each list: for Python's Markdown a list begins after one alone."""
    lines, in_code = list[str](), False
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        before = lines[-1] if lines else ""
        if not in_code and LIST.match(line) and before.strip() and not IN_LIST.match(before):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Complete the page of commands, and rewrite links to the places of their files."""
    here = page.file.src_uri
    if here == "api.md":
        markdown += reference()

    def moved(match: re.Match[str]) -> str:
        target, anchor = place((match[1], match[2] or ""), here)
        target = PAGES.get(target, target)
        if not (ROOT / "docs" / target).exists() and target not in BESIDE:
            is_file = (ROOT / target).is_file() and not target.endswith(".md")
            target = f"files/{target}" if is_file else "index.md"
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(moved, separate_lists(markdown))
