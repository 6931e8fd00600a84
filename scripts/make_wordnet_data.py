"""Write a text data set: WordNet's definitions of nouns, and their lexicographer's class.

"a freeware browser for Linux" is an artifact, "a relation of mutual dependence" a relation. Of each
group of synonyms the first definition is taken, without parts in brackets and without the words
that it defines. Shorter ones than three words, and repeated ones, are left out, as are classes with
fewer than 400 definitions. A definition is in the training or the test split by a hash of its first
word, so that no word has definitions in both.

    apt-get install wordnet-base     # WordNet 3.0; or --nouns FILE, its data.noun
    python -m scripts.make_wordnet_data FOLDER
    python -m scripts.make_wordnet_data FOLDER --conversations --most 100 12

`--conversations` writes them for a language model, which is asked to define a noun and learns the
definition as its answer. There definitions keep the words that they define. The nouns are in lower
case, and the same ones are held out. `--most` limits the definitions of a class in both splits.

The script prints the number of texts by class, and a hash of both splits.
"""

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.make_packages_data import hash_order

NOUNS = Path("/usr/share/wordnet/data.noun")
FIRST_FILE = 3  # the number of the first class in WordNet's list of lexicographer files
CLASSES = """
    Tops act animal artifact attribute body cognition communication event feeling food group
    location motive object person phenomenon plant possession process quantity relation shape
    state substance time
""".split()
LEAST = 400  # definitions of a class
SHORTEST = 3  # remaining words of a definition
MOST = {"train": 1000, "test": 100}  # definitions of a class
TEST = 10  # a tenth of the words

Row = tuple[str, str, str]  # word, text, label


def definitions(lines: Iterable[str], *, whole: bool = False) -> Iterator[Row]:
    """Read WordNet's data.noun: the first word, cleaned definition and class of each group.

    `whole` definitions keep the words that they define.
    """
    for line in lines:
        if line.startswith(" "):  # the licence
            continue
        head, _, gloss = line.partition("|")
        fields = head.split()
        # Offset, number of the class, part of speech, number of words in base 16, words and senses.
        words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
        definition = cleaned(gloss, () if whole else words)
        yield words[0].lower(), definition, CLASSES[int(fields[1]) - FIRST_FILE]


def cleaned(gloss: str, words: Iterable[str]) -> str:
    """Return the first definition of a gloss, without brackets and the words that it defines."""
    definition = re.sub(r"\([^)]*\)", " ", re.split('[;"]', gloss, maxsplit=1)[0])
    defined = {part.lower() for word in words for part in word.split("_")}
    kept = (word for word in definition.split() if word.strip(".,:'-").lower() not in defined)
    return " ".join(kept).strip(" ,:-")


def splits(rows: Iterable[Row], most: Mapping[str, int] | None = None) -> dict[str, list[Row]]:
    """Return the rows of each split, `most` of a class, in an order by hash."""
    most = MOST if most is None else most
    by_text: dict[str, Row] = {}
    for word, text, label in rows:
        if len(text.split()) >= SHORTEST:
            by_text.setdefault(text.lower(), (word, text, label))
    counts = Counter(label for *_, label in by_text.values())
    found: dict[str, list[Row]] = {"train": [], "test": []}
    taken: Counter[tuple[str, str]] = Counter()
    for row in sorted(by_text.values(), key=lambda row: hash_order(f"{row[0]} {row[1]}")):
        split = "train" if hash_order(row[0])[0] % TEST else "test"
        taken[split, row[2]] += 1
        if counts[row[2]] >= LEAST and taken[split, row[2]] <= most[split]:
            found[split].append(row)
    return found


def as_text(row: Row) -> dict[str, Any]:
    """Return a row as a text with its label."""
    _, text, label = row
    return {"text": text, "label": label}


def as_conversation(row: Row) -> dict[str, Any]:
    """Return a row as a question for the definition of its word, with the answer and the label."""
    word, text, label = row
    asked = f"Define the noun '{word.replace('_', ' ')}'."
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
    return {"messages": turns, "label": label}


def write(
    found: dict[str, list[Row]], folder: Path, form: Callable[[Row], dict[str, Any]] = as_text
) -> str:
    """Write `train.jsonl` and `test.jsonl`; return the hash of both."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for split, rows in found.items():
        lines = "".join(json.dumps(form(row)) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines)
        digest.update(lines.encode())
        counts = sorted(Counter(label for *_, label in rows).items())
        listed = ", ".join(f"{name} {number}" for name, number in counts)
        sys.stdout.write(f"{split}: {len(rows)} texts in {len(counts)} classes; {listed}\n")
    return digest.hexdigest()


def main() -> None:
    """Write the folder and print its hash."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--conversations", action="store_true", help="questions and answers for a language model"
    )
    parser.add_argument(
        "--most", type=int, nargs=2, metavar=("TRAIN", "TEST"), default=[*MOST.values()],
        help="definitions of a class in each split (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--nouns", type=Path, default=NOUNS, help=f"WordNet's file ({NOUNS})")
    options = parser.parse_args()
    if not options.nouns.is_file():
        sys.exit(
            f"error: {options.nouns} is not there, expected WordNet's nouns; install Debian's "
            "wordnet-base, or name data.noun of WordNet 3.0 with --nouns"
        )
    with options.nouns.open(encoding="utf-8") as lines:
        rows = [*definitions(lines, whole=options.conversations)]
    found = splits(rows, dict(zip(MOST, options.most, strict=True)))
    form = as_conversation if options.conversations else as_text
    digest = write(found, options.folder, form)
    sys.stdout.write(f"hash: {digest}\n")


if __name__ == "__main__":
    main()
