"""Read and write settings as a person types them: KEY=VALUE."""

import textwrap
from collections.abc import Mapping, Sequence

from ravan_flwr.config.key import Key
from ravan_flwr.config.keys import AUTO, KEYS, TOPICS
from ravan_flwr.specs import Scalar

_UNKNOWN = Key("", "", kind=int)  # a number is read as one


def as_key_values(settings: Mapping[str, Scalar]) -> list[str]:
    """Write settings as words that `read_settings` reads."""
    return [f"{key}={as_typed(value)}" for key, value in settings.items()]


def as_typed(value: object) -> object:
    """Write a setting as a person types it."""
    if isinstance(value, bool):
        return str(value).lower()
    return AUTO if value is None else value


def key_table() -> str:
    """List all keys by topic, with their defaults and what they take."""
    lines = [
        "Keys and their defaults. auto: what the preset says, unless the key says otherwise.",
        "",
        *_row("num-clients", AUTO, "clients of the simulation (a whole number at least 1)"),
    ]
    for name, key in KEYS.items():
        if name in TOPICS:
            lines += ["", f"{TOPICS[name]}:"]
        about = key.help if key.allowed == "a text" else f"{key.help} ({key.allowed})"
        lines += _row(name, str(as_typed(key.default)) or "(none)", about)
    return "\n".join(lines)


def _row(name: str, default: str, about: str) -> list[str]:
    head = f"  {name}={default}"
    return textwrap.wrap(
        about,
        96,
        initial_indent=f"{head:<30} ",
        subsequent_indent=" " * 31,
        break_on_hyphens=False,  # names of keys and of choices stay whole
    )


def read_settings(settings: Sequence[str]) -> tuple[dict[str, Scalar], int | None]:
    """Read KEY=VALUE words as (run config, num-clients); of the values only the form is checked."""
    config: dict[str, Scalar] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"got {setting!r}, expected KEY=VALUE, such as seed=1; correct it")
        value = _value(key, text)
        if key in config:
            raise ValueError(
                f"{key}: got it twice, as {config[key]!r} and {value!r}, expected each key "
                "once; leave one out"
            )
        config[key] = value
    num_clients = config.pop("num-clients", None)
    if num_clients is not None and (type(num_clients) is not int or num_clients < 1):
        raise ValueError(
            f"num-clients = {num_clients!r}: expected a whole number at least 1, such as 20"
        )
    return config, num_clients


def _value(key: str, text: str) -> Scalar:
    """Read a text as what its key takes: a folder may be called 2024, and Python writes True."""
    value = KEYS.get(key, _UNKNOWN).typed(text)
    if not isinstance(value, str):
        return value
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text
