"""Edit one learning rate in a preset's text, and leave every other character as it is.

What comes out is read again: it must be the same preset but for this rate. A file that does not
write its rates as a block, a line for each method, is refused.
"""

import re
from collections.abc import Sequence
from typing import Any

import yaml

FIELD = "learning-rate"


def with_rate(text: str, method: str, rate: float, notes: Sequence[str]) -> str:
    """Return the text with a method's rate, and notes above it in place of earlier ones.

    ValueError, which says why, where that cannot be done in this file.
    """
    expected = _loaded(text)
    found = expected.get(FIELD) or {}
    if not isinstance(found, dict) or "by" in found or isinstance(found.get(method), dict):
        raise ValueError(f"it has a {FIELD} by other keys (`by:`), and keeps its numbers")
    expected[FIELD] = found | {method: rate}
    edited = _edited(text, method, as_written(rate), notes)
    try:
        if _loaded(edited) == expected:
            return edited
    except ValueError:  # it is not read as it looks
        pass
    raise ValueError(f"it writes its {FIELD} in a way that no edit of one line can change")


def as_written(rate: float) -> str:
    """Write a rate so that YAML reads the same number: 3.0e-3, since 3e-3 would be a text."""
    digits = next(n for n in range(1, 18) if float(f"{rate:.{n}e}") == rate)
    mantissa, exponent = f"{rate:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent):+d}"


def _loaded(text: str) -> dict[str, Any]:
    """Read the text as a preset is read; ValueError if it is no mapping."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML any more ({error})") from None
    if not isinstance(content, dict):
        raise ValueError("it is no mapping any more")
    return content


def _edited(text: str, method: str, rate: str, notes: Sequence[str]) -> str:
    """Change the method's line of the block, or add one at the block's end."""
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split(end)
    lines = lines if lines[-1] == "" else [*lines, ""]
    head = re.compile(rf"\ufeff?(['\"]?){FIELD}\1\s*:")
    start = next((number for number, line in enumerate(lines) if head.match(line)), None)
    if start is None:
        start = len(lines) - 1
        lines.insert(start, f"{FIELD}:")
    own = [f"# tune of {method}: {note}" for note in notes]
    of_method = re.compile(rf"(\s+(['\"]?){re.escape(method)}\2\s*:\s*)[^\s#]+(.*)")
    last, indent = start, "  "
    for number in range(start + 1, len(lines)):
        if lines[number].strip() and not lines[number][0].isspace():
            break
        if not lines[number].strip() or lines[number].lstrip().startswith("#"):
            continue
        last, indent = number, re.match(r"\s*", lines[number])[0]  # type: ignore[index]
        if there := of_method.fullmatch(lines[number]):
            lines[number] = f"{there[1]}{rate}{there[3]}"
            before = lines[:number]
            while before[-1].lstrip().startswith(f"# tune of {method}: "):
                before.pop()
            return end.join([*before, *(indent + note for note in own), *lines[number:]])
    new = [indent + line for line in (*own, f"{method}: {rate}")]
    return end.join([*lines[: last + 1], *new, *lines[last + 1 :]])
