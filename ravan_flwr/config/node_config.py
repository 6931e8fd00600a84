"""Check a node config: a device's own settings, and its requirements for the runs that it joins.

It is read for every message, so this module imports nothing heavy and reads no preset.
"""

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ravan_flwr.config.key import AUTO, Key
from ravan_flwr.config.keys import KEYS, read_keys
from ravan_flwr.specs import RESULT_FOLDERS, Scalar

if TYPE_CHECKING:
    from ravan_flwr.config.keys import Config

MAX_DELTA = 1e-5


def _key(text: str, default: Any = MISSING, *, auto: bool = False, **options: Any) -> Any:
    """Declare a key as a field; without `default` the key is required."""
    return field(default=default, metadata={"key": Key(AUTO if auto else "", text, **options)})


def _folder(text: str) -> Any:
    return _key(text, None, pattern="/.*", in_words="the absolute path of a folder as text")


# fmt: off
@dataclass(frozen=True)
class Node:
    """A node config, checked."""

    partition_id: int = _key("number of this node, from 0", low=0)
    num_partitions: int = _key("number of nodes", low=1)
    data_path: str | None = _key("folder of its own examples; none: a partition of the preset's",
        None, in_words="the path of a folder as text")
    budget: float | str | None = _key("its budget fraction, or auto; none: drawn from the run's "
        "distribution", None, auto=True, above=0, high=1)
    device: str | None = _key("where it computes; none: the run's", None,
        pattern=KEYS["device"].pattern, in_words=KEYS["device"].in_words)
    cache_dir: str | None = _folder("cache of the hub; none: the user's")
    warm_worker: bool = _key("keep a process with the model between messages", False)
    result_path: str | None = _folder("folder for delivered results; none: it keeps none")
    result_form: str | None = _key("form of results that it keeps; none: that of the server", None,
        choices=tuple(RESULT_FOLDERS.values()))
    secure_keys: str | None = _folder("its key and all public keys, for secure-aggregation")
    require_secure_aggregation: bool = _key("take part only in runs with masked uploads", False)
    max_epsilon: float | None = _key("take part only in private runs, up to this epsilon",
        None, above=0)
    max_delta: float = _key("delta that belongs to max-epsilon", MAX_DELTA, above=0, below=1)
# fmt: on


NODE_KEYS = read_keys(Node)
_MIN_PREFIX = 6  # letters; a name at least this long that begins a key counts as the key cut short


def read_node(settings: Mapping[str, Scalar]) -> Node:
    """Return the checked node config of a SuperNode."""
    _check_names(settings)
    values: dict[str, Any] = {}
    for name, key in NODE_KEYS.items():
        if name in settings:
            try:
                values[name] = key.checked(f"node config: {name}", settings[name])
            except ValueError as error:
                raise ValueError(
                    f"{error}; change it in the node config, without quotes if it is no text"
                ) from None
        elif name in ("partition-id", "num-partitions"):
            raise ValueError(
                f"node config: {name} is missing, expected a whole number; start the SuperNode "
                'with --node-config "partition-id=0 num-partitions=2"'
            )
    number, parts = values["partition-id"], values["num-partitions"]
    if number >= parts:
        raise ValueError(
            f"node config: partition-id = {number}: expected 0 to {parts - 1} (num-partitions - "
            "1); change it in the node config"
        )
    if "max-delta" in settings and "max-epsilon" not in settings:
        raise ValueError(
            f"node config: max-delta = {settings['max-delta']:g}: got it without max-epsilon, "
            "expected both: alone it refuses no run; set max-epsilon, or leave it out"
        )
    if settings.get("require-secure-aggregation") and "max-epsilon" in settings:
        raise ValueError(
            "node config: got require-secure-aggregation = true and max-epsilon, expected one of "
            "them, since no run is masked and private; leave one out"
        )
    return Node(**{name.replace("-", "_"): value for name, value in values.items()})


def _check_names(settings: Mapping[str, Scalar]) -> None:
    """Raise ValueError for a misspelt key of this app; other apps may have keys of their own."""
    for key in settings.keys() - NODE_KEYS.keys():
        name = key.replace("_", "-").lower()
        longer = [word for word in NODE_KEYS if len(name) >= _MIN_PREFIX and word.startswith(name)]
        if meant := longer or difflib.get_close_matches(name, NODE_KEYS, 1, 0.75):
            raise ValueError(
                f"node config: got {key}, expected {meant[0]} perhaps; the keys of this app are "
                f"{', '.join(NODE_KEYS)}; change it in the node config"
            )


def check_node_requirements(node: Node, config: "Config") -> None:
    """Raise ValueError unless a run has what this device requires.

    A device can check the run's settings and its own work: masking, or noise on its gradients. It
    cannot check how much noise the server adds. docs/operating.md explains this.
    """
    if node.require_secure_aggregation and not config.secure_aggregation:
        raise ValueError(
            "require-secure-aggregation = true: got a run with secure-aggregation = false; this "
            "device takes part in runs with masked uploads alone"
        )
    max_epsilon = node.max_epsilon
    if max_epsilon is None:
        return
    problem = ""
    if config.privacy == "none":
        problem = "privacy = 'none'; this device takes part in private runs alone"
    elif config.delta > node.max_delta:
        problem = f"delta = {config.delta:g}, expected {node.max_delta:g} (max-delta) at most"
    elif config.noise_cohort is not None:
        problem = (
            f"noise-cohort = {config.noise_cohort}, whose epsilon is that of a larger federation; "
            "this device takes part in runs without it alone"
        )
    elif config.privacy == "client" and (config.epsilon is None or config.epsilon > max_epsilon):
        problem = (
            f"privacy = 'client' and epsilon = {config.epsilon or 'auto'}, expected epsilon = "
            f"{max_epsilon:g} at most, which the server then keeps to"
        )
    if problem:
        raise ValueError(f"max-epsilon = {max_epsilon:g}: got a run with {problem}")


def epsilon_limit(node: Node, epsilon: float | None) -> float | None:
    """Return the lower of two limits: the run's epsilon and the device's, if there are any."""
    limits = [limit for limit in (node.max_epsilon, epsilon) if limit is not None]
    return min(limits, default=None)


def use_cache(folder: str | None) -> None:
    """Set the cache folder of the hub's libraries, before they are imported."""
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
