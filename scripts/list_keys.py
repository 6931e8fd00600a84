"""List the keys of a run config, as docs/settings.md has them.

python -m scripts.list_keys           print the tables
python -m scripts.list_keys --write   put them into docs/settings.md, and defaults in pyproject.toml
"""

import json
import re
import sys
from pathlib import Path

from ravan_flwr.config.keys import KEYS, TOPICS, as_typed

ROOT = Path(__file__).resolve().parent.parent
PAGE, PROJECT = ROOT / "docs" / "settings.md", ROOT / "pyproject.toml"
SECTION = re.compile(r"(?<=\[tool\.flwr\.app\.config\]\n)(?:.+\n)*")
# The keys that a version added. Keys of no version are as old as 0.2.0.
SINCE = {
    "0.4.0": "clients-per-pass cuda-graphs float32-matmul optimizer".split(),
    "0.3.0": """aggregation backbone-dtype batching buffer-size clip-norm concurrency deliver
    delta devices epsilon head-mean learning-rate-schedule limits
    max-bytes max-staleness micro-batch-size noise-cohort noise-multiplier privacy
    processes secure-aggregation secure-minimum sparsity until-metric until-time""".split(),
}
BEGIN, END = "<!-- keys: made by scripts/list_keys.py -->\n", "<!-- end of keys -->\n"


def tables() -> str:
    """Write a table for each topic."""
    lines: list[str] = []
    if unknown := {name for new in SINCE.values() for name in new} - set(KEYS):
        raise ValueError(f"SINCE has {sorted(unknown)}, expected keys")
    for name, key in KEYS.items():
        if name in TOPICS:
            head = TOPICS[name]
            lines += ["", f"## {head[0].upper()}{head[1:]}", "| key | default | takes | meaning |"]
            lines += ["| --- | --- | --- | --- |"]
        preset = "" if key.preset is None else f", else {as_typed(key.preset)}"
        default = f"`{as_typed(key.default)}`{preset}" if key.default != "" else ""
        since = "".join(f" (since {version})" for version, new in SINCE.items() if name in new)
        lines.append(f"| `{name}` | {default} | {key.allowed} | {key.help}{since} |")
    return "\n".join([*lines[1:], ""])


def defaults() -> str:
    """Write the defaults in TOML, whose texts, numbers and booleans are those of JSON."""
    return "".join(f"{name} = {json.dumps(key.default)}\n" for name, key in KEYS.items())


def main() -> None:
    """Print the tables, or write them into the page, and the defaults into the project's file."""
    if "--write" not in sys.argv:
        sys.stdout.write(tables())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    project = PROJECT.read_text(encoding="utf-8")
    PROJECT.write_text(SECTION.sub(lambda _: defaults(), project), encoding="utf-8")
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
