"""Describe a key of a configuration, and check its values."""

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
    """A key's default, help and allowed values.

    Code that compares runs reads the flags `of_result` and `may_change`.
    """

    default: Scalar
    help: str
    kind: type[Scalar] = str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    above: float = -math.inf  # in place of `low`, if the bound itself is not allowed
    high: float = math.inf
    below: float = math.inf  # in place of `high`
    # First word of a text -> the parts that may follow it. A part's `help` is its name.
    forms: Mapping[str, tuple["Key", ...]] = field(default_factory=dict)
    # A regular expression that a whole text must match. A key of numbers may be such a text, too.
    pattern: str = ""
    in_words: str = ""  # `pattern` in words

    # The value of "auto" if the preset's `run` has none. None: "auto" does not refer to the preset.
    preset: Scalar | None = None
    # Does the value affect a run's result? Runs with different values are then different runs.
    # Other keys set where a run computes, how long it waits, or what it reports and where.
    of_result: bool = True
    # May a resumed run have another value, although later rounds depend on it?
    may_change: bool = False
    # Is it a part of the key `limits`, and no key of its own?
    is_limit: bool = False

    @property
    def allowed(self) -> str:
        """Return a description of the allowed values."""
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
        number = " ".join([noun, " and ".join(limits)]).strip()
        return f"{number}, or {self.in_words}" if self.pattern else number

    def checked(self, name: str, value: Scalar) -> Scalar:
        """Return the value in the key's type; raise ValueError if it is not allowed."""
        if value == AUTO and self.default == AUTO:
            return value
        problem = f"{name} = {value!r}: expected {self.allowed}"
        if isinstance(value, str) and self.pattern and re.fullmatch(self.pattern, value):
            return value
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
        if self.pattern and isinstance(value, str):
            raise ValueError(problem)
        if not isinstance(value, str) and not (
            math.isfinite(value) and self.above < value < self.below
            and self.low <= value <= self.high
        ):  # fmt: skip
            raise ValueError(problem)
        return value

    def parts(self, name: str, text: str) -> dict[str, Scalar]:
        """Return the parts of `WORD:PART:PART` by name, the word as "", empty parts' defaults."""
        word, *rest = text.split(":")
        check_choice(name, word, self.forms)
        parts = self.forms[word]
        if len(rest) > len(parts):
            form = ":".join([word, *(part.help.upper() for part in parts)])
            raise ValueError(
                f"{name} = {text!r}: got {len(rest)} parts, expected {form}; leave the others out"
            )
        read: dict[str, Scalar] = {"": word}
        for part, value in zip(parts, rest + [""] * (len(parts) - len(rest)), strict=True):
            where = f"{name} = {text!r}: {part.help}"
            read[part.help] = part.checked(where, part.typed(value)) if value else part.default
        return read

    def _joined(self, read: Mapping[str, Scalar]) -> str:
        """Return the parts as text, the inverse of `parts`; trailing empty defaults are omitted."""
        words = [str(read[""])]
        for part in self.forms[words[0]]:
            value = read[part.help]
            omitted = value == part.default and value in ("", AUTO, 0)
            is_float = isinstance(value, float)
            words.append("" if omitted else str(value).removesuffix(".0" if is_float else ""))
        return ":".join(words).rstrip(":")

    def typed(self, text: str) -> Scalar:
        """Return a typed text as the key's number or truth value, if it is one, else unchanged."""
        if self.kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if self.kind is not str:
            for number in (int, float):
                with suppress(ValueError):
                    return number(text)
        return text


def _plain(bound: float) -> str:
    """Return a bound with all its digits: 281474976710656, not 2.8e+14."""
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
    """Return the end of a sentence: a question with what may be meant, or a full stop."""
    choices = tuple(choices)
    others = OTHER_NAMES.get(_plain_word(value), ())
    meant = [name for name in others if name.partition("=")[0] in choices]
    meant = meant or [near for near in [nearest(value, choices)] if near]
    return f": did you mean {' or '.join(map(repr, meant))}?" if meant else "."


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """Return the shortest choice that has the value's words, or one that is spelt like it."""
    plain = {choice.lower(): choice for choice in sorted(choices, key=len)}
    word = _plain_word(value)
    plural = [choice for choice in plain if choice in (f"{word}s", word.removesuffix("s"))]
    longer = [choice for choice in plain if len(word) > 2 and f"-{word}" in f"-{choice}"]
    whole = [choice for choice in longer if f"-{word}-" in f"-{choice}-"]
    swapped = [choice for choice in plain if sorted(choice) == sorted(word)]
    near = plural or whole or longer or swapped or difflib.get_close_matches(word, plain, 1, 0.82)
    return plain[near[0]] if near else None


def _plain_word(value: object) -> str:
    return str(value).lower().replace("_", "-")


# What other programs and papers call a key or a method -> what may be meant by it, with a value if
# that is a part of the answer.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    name: tuple(meant.split())
    for meant, names in {
        "learning-rate": "lr client-lr eta step-size",
        "local-epochs": "num-epochs num-local-epochs num-train-epochs epoch e",
        "local-steps": "num-steps max-steps",
        "num-rounds": "comm-rounds communication-rounds global-rounds num-server-rounds",
        "num-clients": "num-users n-clients num-supernodes client-num-in-total",
        "clients-per-round": "fraction-fit participation join-ratio sample-fraction frac",
        "batch-size": "bs b local-bs per-device-train-batch-size",
        "micro-batch-size": "mbs",
        "max-length": "max-seq-length max-seq-len seq-len",
        "max-gradient-norm": "max-grad-norm grad-clip",
        "weight-decay": "wd",
        "proximal-mu": "mu fedprox-mu",
        "partition=dirichlet:0.3 lora-scale": "alpha",
        "partition=dirichlet:0.3": "dirichlet dirichlet-alpha dir-alpha non-iid",
        "partition=iid": "iid",
        "heads": "num-heads n-heads nheads",
        "rank": "r",
        "rank lora-rank": "lora-r lora-dim",
        "lora-scale": "lora-alpha",
        "targets": "target-modules",
        "method": "algorithm algo strategy fl-algorithm",
        "model": "model-name model-name-or-path backbone",
        "data": "dataset dataset-name data-path data-dir",
        "device=cuda": "gpu gpus use-gpu num-gpus cuda",
        "device=cpu": "cpu no-cuda",
        "processes": "workers num-workers n-jobs",
        "precision=bfloat16": "bf16",
        "precision=float16": "fp16",
        "backbone-dtype=4bit": "load-in-4bit",
        "backbone-dtype=8bit": "load-in-8bit",
        "server-optimizer=adam:0.01": "server-lr",
        "server-optimizer=momentum:1:0.9": "momentum",
        "tracking=wandb": "wandb use-wandb report-to",
        "tracking=mlflow": "mlflow",
        "tracking=tensorboard": "tensorboard",
        "output-dir": "save-dir log-dir logdir",
        "fedit full": "fedavg fed-avg",
        "fedit": "lora fedlora fed-lora",
        "full": "fft fine-tuning finetuning full-fine-tuning",
    }.items()
    for name in names.split()
}
