"""Check a node config: what a device decides for itself.

It is read for every message, so that nothing heavy is imported here, and no preset is read.
"""

import dataclasses
import difflib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ravan_flwr.config.key import Key
from ravan_flwr.config.keys import AUTO, check_key
from ravan_flwr.specs import RESULT_FOLDERS, Scalar

MAX_DELTA = 1e-5


@dataclass(frozen=True)
class Node:
    """Hold a node config, checked."""

    partition_id: int
    num_partitions: int
    data_path: str | None = None  # its own examples; None: a share of the preset's
    budget: float | str | None = None  # a share, or AUTO; None: drawn from the run's distribution
    device: str | None = None  # None: the run's
    cache_dir: str | None = None  # of the hub; None: the user's
    warm_worker: bool = False
    result_path: str | None = None  # where it keeps results that are delivered; None: it wants none
    result_form: str | None = None  # the folder that it keeps; None: the one that the server writes
    secure_keys: str | None = None  # its key and everybody's public ones, for secure-aggregation
    require_secure_aggregation: bool = False  # it takes part in such runs alone
    max_epsilon: float | None = None  # it takes part in private runs alone, and up to that
    max_delta: float = MAX_DELTA  # that goes with max-epsilon


def read_node(settings: Mapping[str, Scalar]) -> Node:
    """Check the node config that a SuperNode was started with."""
    _check_names(settings)
    number, parts = (_whole(settings, key) for key in ("partition-id", "num-partitions"))
    if not 0 <= number < parts:
        raise ValueError(
            f"node config: partition-id is {number}, expected 0 to {parts - 1} (num-partitions - "
            "1); correct it"
        )
    device = settings.get("device")
    return Node(
        partition_id=number,
        num_partitions=parts,
        data_path=_folder(settings, "data-path"),
        budget=_budget(settings.get("budget")),
        device=None if device is None else str(check_key("device", device)),
        cache_dir=_absolute_folder(settings, "cache-dir"),
        warm_worker=_switch(settings, "warm-worker"),
        result_path=_absolute_folder(settings, "result-path"),
        result_form=_result_form(settings.get("result-form")),
        secure_keys=_absolute_folder(settings, "secure-keys"),
        require_secure_aggregation=_switch(settings, "require-secure-aggregation"),
        max_epsilon=_above_zero(settings, "max-epsilon", None, math.inf),
        max_delta=_max_delta(settings),
    )


_BEGINNING = 6  # letters: what begins as one of our keys, and ends early, is one cut short
_KEYS = tuple(field.name.replace("_", "-") for field in dataclasses.fields(Node))


def _check_names(settings: Mapping[str, Scalar]) -> None:
    """Refuse what looks like one of ours misspelt; other apps may have keys of their own."""
    for key in settings.keys() - set(_KEYS):
        name = key.replace("_", "-").lower()
        begun = [known for known in _KEYS if len(name) >= _BEGINNING and known.startswith(name)]
        if meant := begun or difflib.get_close_matches(name, _KEYS, 1, 0.75):
            raise ValueError(
                f"node config: got {key}, expected {meant[0]} perhaps; the keys of this app are "
                f"{', '.join(_KEYS)}; correct it"
            )


def _whole(settings: Mapping[str, Scalar], key: str) -> int:
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"node config: {key} is {value!r}, expected a whole number; start the SuperNode with "
            '--node-config "partition-id=0 num-partitions=2"'
        )
    return value


def _switch(settings: Mapping[str, Scalar], key: str) -> bool:
    """Read it as run keys are read: TOML's booleans, and the yes and no of earlier versions."""
    value = Key(bool, False, "").converted(settings.get(key, False))
    if not isinstance(value, bool):
        raise ValueError(
            f"node config: {key} is {value!r}, expected true or false, without quotation marks; "
            "correct it"
        )
    return value


def _above_zero(
    settings: Mapping[str, Scalar], key: str, default: float | None, below: float
) -> float | None:
    value = settings.get(key, default)
    if value is None:
        return None
    below = min(below, sys.float_info.max)  # a whole number may be larger than that
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
        most = f" and below {below:g}" if below < sys.float_info.max else ""
        raise ValueError(
            f"node config: {key} is {value!r}, expected a number above 0{most}; correct it"
        )
    return float(value)


def _max_delta(settings: Mapping[str, Scalar]) -> float:
    delta = _above_zero(settings, "max-delta", MAX_DELTA, 1.0) or MAX_DELTA
    if "max-delta" in settings and "max-epsilon" not in settings:
        raise ValueError(
            f"node config: max-delta is {delta:g} without max-epsilon, expected both: alone it "
            "refuses no run; set max-epsilon, or leave it out"
        )
    return delta


def _folder(settings: Mapping[str, Scalar], key: str) -> str | None:
    path = settings.get(key)
    if path is not None and not isinstance(path, str):
        raise ValueError(
            f"node config: {key} is {path!r}, expected the path of a folder as text; write it in "
            "quotation marks"
        )
    return path


def _budget(budget: Scalar | None) -> float | str | None:
    if budget is None or budget == AUTO:
        return budget
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
        raise ValueError(
            f"node config: budget is {budget!r}, expected a number above 0 and at most 1, or "
            "'auto'; correct it"
        )
    return float(budget)


def _absolute_folder(settings: Mapping[str, Scalar], key: str) -> str | None:
    path = _folder(settings, key)
    if path is not None and not Path(path).is_absolute():
        raise ValueError(
            f"node config: {key} is {path!r}, expected the absolute path of a folder; correct it"
        )
    return path


def _result_form(form: Scalar | None) -> str | None:
    folders = RESULT_FOLDERS.values()
    if form is not None and form not in folders:
        raise ValueError(
            f"node config: result-form is {form!r}, expected one of {', '.join(folders)}; correct "
            "it, or leave it out for what the server writes"
        )
    return None if form is None else str(form)


def use_cache(folder: str | None) -> None:
    """Let the hub's libraries keep models and data in that folder; before they are imported."""
    if folder is None or os.environ.get("HF_HOME") == folder:
        return
    if "huggingface_hub" in sys.modules:
        raise ValueError(
            f"node config: cache-dir is {folder!r}, but this process has another cache already; "
            "it is for SuperNodes, whose clients have processes of their own: set HF_HOME instead"
        )
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"node config: cache-dir {folder!r} cannot be made ({error.strerror}); let this "
            "SuperNode's user write there"
        ) from None
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE"):
        os.environ.pop(name, None)  # each would take precedence
    os.environ["HF_HOME"] = folder
