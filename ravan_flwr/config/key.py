"""Describe a key of a configuration, and check its values.

The flat settings of a run and of a node are dataclasses of `Key`, nested YAML files pydantic models
(yaml_file.py): importing pydantic takes 0.25 s of processor time, and a model of all keys 0.08 s
more, where `--help` needs 0.1 s for its keys. Nor does a pydantic field have a syntax such as
`dirichlet:0.3`. So a file's field that a key has, too, takes its bounds from the key.
"""

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
    value_type: type[Scalar] = str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    above: float = -math.inf  # in place of `low`, if the bound itself is not allowed
    high: float = math.inf
    below: float = math.inf  # in place of `high`
    # First word of a text -> the parameters that may follow it. A parameter's `help` is its name.
    variants: Mapping[str, tuple["Key", ...]] = field(default_factory=dict)
    pattern: str = ""  # a regular expression that the whole text must match
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
        variants = (":".join([word, *(parameter.help.upper() for parameter in parameters)])
                 for word, parameters in self.variants.items())  # fmt: skip
        words = ", ".join([*self.choices, *variants])
        if words and self.value_type is str:
            return f"one of {words}"
        if self.value_type is bool:
            return "true or false"
        if self.value_type is str:
            return self.in_words or "a text"
        noun = "a whole number" if self.value_type is int else "a number"
        bounds = (("at least", self.low), ("above", self.above), ("at most", self.high),
                  ("below", self.below))  # fmt: skip
        limits = [f"{word} {_plain(bound)}" for word, bound in bounds if math.isfinite(bound)]
        number = " ".join([noun, " and ".join(limits)]).strip()
        return f"{words}, or {number}" if words else number

    def checked(self, name: str, value: Scalar) -> Scalar:
        """Return the value in the key's type; raise ValueError if it is not allowed."""
        if value == AUTO and self.default == AUTO:
            return value
        problem = f"{name} = {value!r}: expected {self.allowed}"
        if self.value_type is float and type(value) is int and abs(value) < 2**1023:
            value = float(value)
        if self.default == AUTO and AUTO not in self.allowed:
            problem += ', or "auto"'
        if isinstance(value, str) and self.value_type is not str:  # a word in place of a number
            if value in self.choices:
                return value
            if value.partition(":")[0] in self.variants:
                return self._joined(self.parse(name, value))
        if not isinstance(value, self.value_type) or isinstance(value, bool) != (
            self.value_type is bool
        ):
            got = _TYPE_NAMES.get(type(value), type(value).__name__)  # a file may hold a list
            raise ValueError(f"{problem}; got a {got}")
        if isinstance(value, str) and self.choices:
            check_choice(name, value, self.choices)
        if isinstance(value, str) and self.variants:
            return self._joined(self.parse(name, value))
        if self.pattern and not re.fullmatch(self.pattern, str(value)):
            raise ValueError(problem)
        if not isinstance(value, str) and not (
            math.isfinite(value) and self.above < value < self.below
            and self.low <= value <= self.high
        ):  # fmt: skip
            raise ValueError(problem)
        return value

    def parse(self, name: str, text: str) -> dict[str, Scalar]:
        """Return the parameters of `WORD:VALUE:VALUE` by name, the word as ""."""
        word, *rest = text.split(":")
        check_choice(name, word, self.variants)
        parameters = self.variants[word]
        if len(rest) > len(parameters):
            form = ":".join([word, *(parameter.help.upper() for parameter in parameters)])
            raise ValueError(
                f"{name} = {text!r}: got {len(rest)} parameters, expected {form}; leave the "
                "others out"
            )
        read: dict[str, Scalar] = {"": word}
        for parameter, value in zip(
            parameters, rest + [""] * (len(parameters) - len(rest)), strict=True
        ):
            where = f"{name} = {text!r}: {parameter.help}"
            read[parameter.help] = (
                parameter.checked(where, parameter.typed(value)) if value else parameter.default
            )
        return read

    def _joined(self, read: Mapping[str, Scalar]) -> str:
        """Return parameters as text, as `parse` reads it, without empty defaults at the end."""
        words = [str(read[""])]
        for parameter in self.variants[words[0]]:
            value = read[parameter.help]
            omitted = value == parameter.default and value in ("", AUTO, 0)
            is_float = isinstance(value, float)
            words.append("" if omitted else str(value).removesuffix(".0" if is_float else ""))
        return ":".join(words).rstrip(":")

    def typed(self, text: str) -> Scalar:
        """Return a typed text as the key's number or truth value, if it is one, else unchanged."""
        if self.value_type is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if self.value_type is not str:
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
    word = _plain_word(value)
    others = OTHER_NAMES.get(word) or [EARLIER.get(word, "")]
    meant = [name for name in others if name.partition("=")[0] in choices or "data." in name]
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
        "local-steps=epochs:1": "num-epochs num-local-epochs num-train-epochs epochs epoch e",
        "local-steps": "num-steps max-steps",
        "num-rounds": "comm-rounds communication-rounds global-rounds num-server-rounds",
        "num-clients": "num-users n-clients num-supernodes client-num-in-total",
        "clients-per-round": "fraction-fit participation join-ratio sample-fraction frac",
        "batch-size": "bs b local-bs per-device-train-batch-size",
        "micro-batch-size": "mbs",
        "max-length": "max-seq-length max-seq-len seq-len",
        "optimizer=adam:0:1": "max-grad-norm grad-clip",
        "optimizer=adam:0.01": "wd",
        "optimizer=fedprox:0.01": "mu fedprox fedprox-mu",
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

# Keys of earlier versions -> a setting that has their place.
EARLIER = {
    "partition-alpha": "partition=dirichlet:0.3", "partition-by": "partition=dirichlet:0.3:COLUMN",
    "classes-per-client": "partition=pathological:2", "shards-per-client": "partition=shards:2",
    "final-learning-rate": "learning-rate-schedule=cosine:0.0001",
    "warm-up-rounds": "learning-rate-schedule=cosine:0.0001:5",
    "server-learning-rate": "server-optimizer=adam:0.01", "packing": "batching=packed",
    "server-momentum": "server-optimizer=momentum:1:0.9", "quantize": "backbone-dtype=4bit",
    "robust": "weighting=median", "calibration-steps": "init=data-aware:8",
    "local-epochs": "local-steps=epochs:1", "parameter-budget": "lora-rank=higher",
    "weight-decay": "optimizer=adam:0.01", "max-gradient-norm": "optimizer=adam:0:1",
    "proximal-mu": "optimizer=fedprox:0.01", "report": "tracking=none",
    "beta": "the field data.beta of a preset",
}  # fmt: skip
