"""Count the words of the documents, and find those that shared vocabulary replaces.

    python -m scripts.check_words            list pages, words, and what is wrong
    python -m scripts.check_words --quiet    list what is wrong alone

It ends with 1 if a document, or a comment or docstring of a folder of `FOLDERS`, has a word of
`REPLACED`. Prose and hand-written tables are counted, without code and without tables that a
program wrote between marks.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("ravan_flwr", "tests", "benchmarks", "scripts", "examples")  # of code
HOUSE = r"\bthe house\b|\brooms?\b(?! for)|\bfloors?\b(?!\()"
MEMBER = r"\broster\b|\bmembers?\b"
# Private vocabulary -> the field's.
REPLACED = {
    r"(?<!to )told apart|tells? (?:the )?\w+ apart": "significantly different",
    r"to be told apart": "significantly different",
    r"(?:points?|is|are|ends?) (?:ahead|behind)\b": "higher, lower",
    r"held[- ]back examples|examples (?:that are )?held back|hold back": "validation split",
    r"as it is, the network|pretrained as it is|network as it is": "without training (zero-shot)",
    r"classifiers? (?:only|alone)\b": "linear probe",
    r"deal(?:s|t|ing)? (?:\w+ ){0,3}out\b|\bdealing\b|who has what": "partition, partition report",
    r"own part\b": "personal parameters",
    MEMBER: "client registry, registered client",
    r"\bledger\b": "round log",
    r"\bto fold\b|\bfold(?:s|ed|ing)?\b": "accumulate",
    r"\bresting\b|silent(?:ly)?\b": "skipped, unresponsive",
    r"\bpatience\b|\bgrace period\b": "deadline, straggler timeout",
    r"\bfences?\b": "reverse proxy",
    r"\binsists?\b|\binsisting\b": "require",
    r"\bdrafts?\b|\bdrafting\b": "create a preset, preset wizard",
    r"\blive page\b|\blive view\b": "dashboard",
    HOUSE: "package, subpackage, layer",
    r"\blaws?\b": "property",
    r"\bsceptics?\b|\benem(?:y|ies)\b|\bnewcomers?\b": "(leave it out)",
    r"\bsomebody\b|\bnobody\b": "the noun that is meant",
    r"\bgoes on\b|\bgoes with\b|\bcomes of\b": "continues, belongs to, results from",
}
# For comments and docstrings, where an enum may have members.
IN_CODE = {old: new for old, new in REPLACED.items() if old not in (HOUSE, MEMBER)} | {
    r"\b(?:any|every)body\b|\bwhoever\b|\bwhom\b": "the noun that is meant",
    r"\btell(?:s|ing)?\b|\btold\b|\bsay(?:s|ing)? (?:so|why|whether|which|what)\b":
        "return, log, report, raise, state",
}  # fmt: skip
# The changelog has earlier names; pages of generated keys are not prose.
NOT_PROSE = {"CHANGELOG.md"}
REFERENCE = {"docs/settings.md", "docs/api.md"}
MADE = re.compile(r"^<!-- (?!end of)[^\n]* -->\n.*?^<!-- end of [^\n]* -->$", re.M | re.S)
CODE = re.compile(r"^(`{3,}).*?^\1$", re.M | re.S)


def prose(text: str) -> str:
    """Blank all but prose, line for line."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = CODE.sub(blank, text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"`[^`\n]*`", "`code`", text)  # code names are not prose
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def words(text: str) -> int:
    """Count words, including hand-written tables."""
    return sum(bool(re.search(r"[^\W\d]", word)) for word in prose(MADE.sub("", text)).split())


def pages(root: Path = ROOT) -> dict[str, str]:
    """Return path -> text of every document that a user reads."""
    folders = ("docs", "examples", "benchmarks/results")
    found = [*root.glob("*.md"), *(page for x in folders for page in root.glob(f"{x}/**/*.md"))]
    names = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in found}
    return {name: text for name, text in sorted(names.items()) if name not in NOT_PROSE}


def comments(source: str) -> str:
    """Return the comments and docstrings of a module, each in its line."""
    written = source.splitlines()
    lines = [""] * len(written)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.string
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node):
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            lines[first:last] = written[first:last]
    return "\n".join(lines)


def replaced(text: str, table: Mapping[str, str] = REPLACED) -> Iterator[tuple[int, str, str]]:
    """Find words that the shared vocabulary replaces: line, word, replacement."""
    for number, line in enumerate(prose(text).splitlines(), 1):
        for pattern, better in table.items() if line else ():
            for match in re.finditer(pattern, line, re.IGNORECASE):
                yield number, match[0], better


def wrong(root: Path = ROOT) -> list[str]:
    """List every word to replace."""
    documents = pages(root)
    found = [
        f"{name}:{line}: {word!r}, write: {better}"
        for name, text in documents.items()
        for line, word, better in replaced(text)
    ]
    for path in (path for folder in FOLDERS for path in sorted(root.glob(f"{folder}/**/*.py"))):
        source = comments(path.read_text(encoding="utf-8"))
        found += [
            f"{path.relative_to(root)}:{line}: {word!r}, write: {better}"
            for line, word, better in replaced(source, IN_CODE)
        ]
    return found


def main() -> None:
    """Print words by page, then all findings."""
    lines = found = wrong()
    if "--quiet" not in sys.argv:
        counts = {name: words(text) for name, text in pages().items()}
        total = sum(count for name, count in counts.items() if name not in REFERENCE)
        rows = [
            *sorted((count, name) for name, count in counts.items()),
            (total, "all but reference"),
        ]
        lines = [*(f"{count:6,}  {name}" for count, name in rows), *lines]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
