"""Describe one key of a configuration, and check a value for it, with errors that say so."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ravan_flwr.specs import Scalar

AUTO = "auto"
_TYPE_NAMES = {str: "text", int: "whole number", float: "decimal number", bool: "truth value"}


@dataclass(frozen=True)
class Key:
    """Say what one key may hold, and what depends on it.

    Three flags say what makes two runs the same. Everything that compares runs asks them.
    """

    default: Scalar
    help: str
    kind: type[Scalar] = str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    above: float = -math.inf  # in place of `low`, where the bound itself is out of range
    high: float = math.inf
    below: float = math.inf  # in place of `high`
    # By the first word of a text, the parts that follow it: a part's `help` is its name.
    forms: Mapping[str, tuple["Key", ...]] = field(default_factory=dict)
    pattern: str = ""  # of a text: the regular expression that it must match as a whole
    in_words: str = ""  # what `pattern` means

    # "auto" takes the value that the preset's `run` has, or this where it has none.
    preset: Scalar | None = None
    # Two runs with different values are different runs. False: the key says where a run computes,
    # how long it waits or who is told, but not what comes out.
    of_result: bool = True
    # A run that is resumed may get another value, though what follows depends on it.
    may_change: bool = False
    # It is no key of its own: `limits` holds it.
    is_limit: bool = False

    @property
    def allowed(self) -> str:
        """Describe what the key takes."""
        if self.choices or self.forms:
            forms = (":".join([word, *(part.help.upper() for part in parts)])
                     for word, parts in self.forms.items())  # fmt: skip
            return "one of " + ", ".join([*self.choices, *forms])
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return self.in_words or "a text"
        noun = "a whole number" if self.kind is int else "a number"
        bounds = (("at least", self.low), ("above", self.above), ("at most", self.high),
                  ("below", self.below))  # fmt: skip
        limits = [f"{word} {_plain(bound)}" for word, bound in bounds if math.isfinite(bound)]
        return " ".join([noun, " and ".join(limits)]).strip()

    def checked(self, name: str, value: Scalar) -> Scalar:
        """Return the value in the key's own type; ValueError if the key does not take it."""
        if value == AUTO and self.default == AUTO:
            return value
        problem = f"{name} = {value!r}: expected {self.allowed}"
        if self.kind is float and type(value) is int and abs(value) < 2**1023:
            value = float(value)
        if self.default == AUTO and AUTO not in self.allowed:
            problem += ', or "auto"'
        if not isinstance(value, self.kind) or isinstance(value, bool) != (self.kind is bool):
            kind = _TYPE_NAMES.get(type(value), type(value).__name__)  # a file may hold a list
            raise ValueError(f"{problem}; got a {kind}")
        if self.choices:
            check_choice(name, str(value), self.choices)
        if self.forms:
            return self._joined(self.parts(name, str(value)))
        if self.pattern and not re.fullmatch(self.pattern, str(value)):
            raise ValueError(problem)
        if not isinstance(value, str) and not (
            math.isfinite(value) and self.above < value < self.below
            and self.low <= value <= self.high
        ):  # fmt: skip
            raise ValueError(problem)
        return value

    def parts(self, name: str, text: str) -> dict[str, Scalar]:
        """Read `WORD:PART:PART` as its parts by name, the word as ""; an empty part is left out."""
        word, *rest = text.split(":")
        check_choice(name, word, self.forms)
        parts = self.forms[word]
        if len(rest) > len(parts):
            form = ":".join([word, *(part.help.upper() for part in parts)])
            raise ValueError(
                f"{name} = {text!r}: got {len(rest)} parts, expected {form}; correct it"
            )
        read: dict[str, Scalar] = {"": word}
        for part, value in zip(parts, rest + [""] * (len(parts) - len(rest)), strict=True):
            where = f"{name} = {text!r}: {part.help}"
            read[part.help] = part.checked(where, part.typed(value)) if value else part.default
        return read

    def _joined(self, read: Mapping[str, Scalar]) -> str:
        """Write parts as `parts` reads them; those at the end that say nothing are left out."""
        words = [str(read[""])]
        for part in self.forms[words[0]]:
            value = read[part.help]
            silent = value == part.default and value in ("", AUTO, 0)
            number = isinstance(value, float)
            words.append("" if silent else str(value).removesuffix(".0" if number else ""))
        return ":".join(words).rstrip(":")

    def typed(self, text: str) -> Scalar:
        """Read a text as a person types it: numbers as such, and the truth as Python writes it."""
        if self.kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if self.kind is not str:
            for number in (int, float):
                with suppress(ValueError):
                    return number(text)
        return text


def _plain(bound: float) -> str:
    """Write a bound with all its digits: 281474976710656 is not 2.8e+14."""
    return f"{int(bound)}" if bound == int(bound) else f"{bound:.10g}"


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError, with the nearest match, unless the value is among the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"{name} {value!r} is unknown{did_you_mean(value, choices)} "
            f"Expected one of: {', '.join(choices)}"
        )


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """End a sentence with the choice that is spelt most like the value, if one is."""
    near = nearest(value, choices)
    return f": did you mean {near!r}?" if near else "."


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """Find the choice that begins or ends so, or is spelt most like it, whatever its case."""
    plain = {choice.lower(): choice for choice in choices}
    word = str(value).lower().replace("_", "-")
    if word in plain:
        return plain[word]
    begun = [choice for choice in plain if len(word) > 2 and choice.startswith(f"{word}-")]
    ended = [choice for choice in plain if len(word) > 2 and choice.endswith(f"-{word}")]
    near = begun or difflib.get_close_matches(word, list(plain), n=1) or sorted(ended, key=len)
    return plain[near[0]] if near else None
