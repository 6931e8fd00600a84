"""Write a text data set: one-line descriptions of Debian packages, and their section as the label.

Twenty sections with a topic are kept. Words that name a section are removed from the
descriptions, since they reveal the label. A source package is either in the training split or in
the test split, so that no source has packages in both.

    python -m scripts.make_packages_data FOLDER      # reads `apt-cache dumpavail`

The texts differ between Debian releases. The script prints a hash of both splits; the study
`conf/studies/packages-minilm.yaml` has the hash of its data.
"""

import argparse
import hashlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LABELS = """
    admin database devel editors electronics fonts games gnome graphics kde
    mail math net science sound text utils video web x11
""".split()
# Every word that names a section, in the forms that occur.
_NAMES = """
    admin admins administration administrative administrator administrators administering
    database databases devel development developer developers editor editors editing electronic
    electronics font fonts typeface typefaces game games gaming gnome graphic graphics graphical
    kde plasma mail mails email emails e-mail e-mails math maths mathematic mathematics
    mathematical net nets network networks networking science sciences scientific sound sounds
    text texts textual util utils utility utilities video videos web www x11 xorg x.org
""".split()
_GIVEN_AWAY = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, _NAMES)) + r")(?![\w-])", re.I)
MOST = 1000  # packages of a section: the largest would have 3,500
SHORTEST = 3  # remaining words of a description
TEST = 5  # a fifth of the sources

Row = tuple[str, str, str]  # source, text, label


def packages(dump: str) -> Iterator[Row]:
    """Read the stanzas of a package index: each package once, in the order of the names."""
    found: dict[str, Row] = {}
    for stanza in dump.split("\n\n"):
        fields: dict[str, str] = dict(re.findall(r"^([\w-]+): (.*)$", stanza, re.M))
        if fields.get("Section") in LABELS and "Description" in fields:
            source = fields.get("Source", fields["Package"]).split()[0]
            found.setdefault(
                fields["Package"], (source, cleaned(fields["Description"]), fields["Section"])
            )
    yield from (row for _, row in sorted(found.items()))


def cleaned(text: str) -> str:
    """Remove the words that name a section from a description."""
    return re.sub(r"\s+", " ", _GIVEN_AWAY.sub(" ", text)).strip(" ,;:-")


def hash_order(text: str) -> bytes:
    """Order by a hash: at random, and the same on every machine."""
    return hashlib.sha256(text.encode()).digest()


def selected(rows: Iterator[Row]) -> list[Row]:
    """Keep each text once, drop too short ones, and keep at most `MOST` of a section."""
    by_text: dict[str, Row] = {}
    for source, text, label in rows:
        if len(text.split()) >= SHORTEST:
            by_text.setdefault(text.lower(), (source, text, label))
    counts: Counter[str] = Counter()
    result = []
    for row in sorted(by_text.values(), key=lambda row: hash_order(f"{row[0]} {row[1]}")):
        counts[row[2]] += 1
        if counts[row[2]] <= MOST:
            result.append(row)
    return result


def write(rows: list[Row], folder: Path) -> str:
    """Write `train.jsonl` and `test.jsonl`; return the hash of both."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for part in ("train", "test"):
        part_rows = [row for row in rows if (hash_order(row[0])[0] % TEST == 0) == (part == "test")]
        lines = "".join(
            json.dumps({"text": text, "label": label}) + "\n" for _, text, label in part_rows
        )
        (folder / f"{part}.jsonl").write_text(lines)
        digest.update(lines.encode())
        counts = sorted(Counter(label for *_, label in part_rows).items())
        print(f"{part}: {len(part_rows)} texts;", ", ".join(f"{name} {n}" for name, n in counts))  # noqa: T201
    return digest.hexdigest()


def main() -> None:
    """Write the folder and print its hash."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dump", type=Path, help="a package index; default: apt-cache dumpavail")
    options = parser.parse_args()
    dump = (
        options.dump.read_text()
        if options.dump
        else subprocess.run(
            ["apt-cache", "dumpavail"], check=True, text=True, stdout=subprocess.PIPE
        ).stdout
    )
    print("hash:", write(selected(packages(dump)), options.folder))  # noqa: T201


if __name__ == "__main__":
    main()
