"""List the keys of a run config, as docs/settings.md has them.

python -m scripts.list_keys           print the tables
python -m scripts.list_keys --write   put them into docs/settings.md
"""

import sys
from pathlib import Path

from ravan_flwr.config.keys import KEYS, MOVED, TOPICS, as_typed

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
BEGIN, END = "<!-- keys: made by scripts/list_keys.py -->\n", "<!-- end of keys -->\n"


def tables() -> str:
    """Write a table for each topic, and one of the keys of earlier versions."""
    lines: list[str] = []
    for name, key in KEYS.items():
        if name in TOPICS:
            head = TOPICS[name]
            lines += ["", f"## {head[0].upper()}{head[1:]}", "| key | default | takes | meaning |"]
            lines += ["| --- | --- | --- | --- |"]
        preset = "" if key.preset is None else f", else {as_typed(key.preset)}"
        default = f"`{as_typed(key.default)}`{preset}" if key.default != "" else ""
        lines.append(f"| `{name}` | {default} | {key.allowed} | {key.help} |")
    lines += ["", "## Keys of earlier versions", "| key | now |", "| --- | --- |"]
    return "\n".join(
        [
            *lines[1:],
            *(f"| `{old}` | {f'`{new}`' if new else ''} |" for old, new in MOVED.items()),
            "",
        ]
    )


def main() -> None:
    """Print the tables, or write them into the page."""
    if "--write" not in sys.argv:
        sys.stdout.write(tables())
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
