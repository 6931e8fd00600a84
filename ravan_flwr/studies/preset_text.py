"""Edit one learning rate in a preset's text, and leave every other character as it is.

YAML is read for the places of its parts only. What comes out is read again: it must be the same
preset but for this rate. A file that is written otherwise than these edits expect is refused.
"""

import copy
from collections.abc import Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

FIELD = "learning-rate"


def with_rate(text: str, method: str, rate: float, notes: Sequence[str]) -> str:
    """Return the text with a method's rate, and notes above it in place of earlier ones.

    ValueError, which says why, where that cannot be done in this file.
    """
    expected = copy.deepcopy(_loaded(text))
    found = expected.get(FIELD) or {}
    if not isinstance(found, dict) or "by" in found or isinstance(found.get(method), dict):
        raise ValueError(f"it has a {FIELD} by other keys (`by:`), and keeps its numbers")
    expected[FIELD] = found | {method: rate}
    try:
        edited = _edited(text, method, rate, notes)
        if _loaded(edited) == expected:
            return edited
    except (ValueError, yaml.YAMLError):  # it is not read as it looks
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


def _edited(text: str, method: str, rate: float, notes: Sequence[str]) -> str:
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, MappingNode)
    notes = [f"# tune of {method}: {note}" for note in notes]
    entry = f"{method}: {as_written(rate)}"
    indented = [f"  {line}" for line in (*notes, entry)]
    if (field := _entry(root, FIELD)) is None:
        return _with_lines(text, len(text), [f"{FIELD}:", *indented])
    key, value = field
    if not isinstance(value, MappingNode):  # empty: `learning-rate:` alone
        return _with_lines(text, key.end_mark.index, indented)
    there = _entry(value, method)
    if value.flow_style:
        edited = _replaced(text, there[1], rate) if there else _with_item(text, value, entry)
        return _noted(edited, key, method, notes)
    if there:
        return _noted(_replaced(text, there[1], rate), there[0], method, notes)
    indent = " " * value.start_mark.column
    last = value.value[-1][1].end_mark.index
    return _with_lines(text, last, [indent + line for line in (*notes, entry)])


def _entry(mapping: MappingNode, name: str) -> tuple[Node, Node] | None:
    """Find the key of that name, and its value."""
    entries: list[tuple[Node, Node]] = mapping.value
    named = ((k, v) for k, v in entries if isinstance(k, ScalarNode) and k.value == name)
    return next(named, None)


def _replaced(text: str, value: Node, rate: float) -> str:
    """Put a rate in the place of a value."""
    return text[: value.start_mark.index] + as_written(rate) + text[value.end_mark.index :]


def _with_item(text: str, mapping: MappingNode, entry: str) -> str:
    """Add an entry before the brace that ends a mapping in braces."""
    brace = mapping.end_mark.index - 1
    head = text[:brace].rstrip()
    joint = {"{": "", ",": " "}.get(head[-1], ", ")
    return f"{head}{joint}{entry}{text[brace:]}"


def _noted(text: str, key: Node, method: str, notes: Sequence[str]) -> str:
    """Write notes above the line of a key, in place of those that stood there."""
    start = key.start_mark.index - key.start_mark.column
    before = text[:start].split("\n")[:-1]
    while before and before[-1].lstrip().startswith(f"# tune of {method}: "):
        before.pop()
    indent, end = " " * key.start_mark.column, _line_end(text)
    added = "".join(f"{indent}{note}{end}" for note in notes)
    return "".join(f"{line}\n" for line in before) + added + text[start:]


def _with_lines(text: str, index: int, lines: Sequence[str]) -> str:
    """Put lines after the one that holds this place."""
    after, end = text.find("\n", index) + 1 or len(text), _line_end(text)
    head = text[:after] if not after or text[after - 1] == "\n" else text[:after] + end
    return head + "".join(f"{line}{end}" for line in lines) + text[after:]


def _line_end(text: str) -> str:
    """Return what the file ends its lines with."""
    return "\r\n" if "\r\n" in text else "\n"
