"""Refuse settings under which a private run's account would not hold, before anything is loaded.

docs/privacy.md has a reason for each in more words.
"""

from collections.abc import Mapping

from ravan_flwr.config.adapter_keys import BASES_OF_DATA
from ravan_flwr.config.key import AUTO
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

OF_PRIVACY = ("epsilon", "noise-multiplier", "delta", "clip-norm", "noise-cohort")

Only = tuple[str, Scalar, str]  # a key, the only value that a private run takes, and why

_ON_SERVER = (
    "evaluate-on",
    "server",
    "what clients measure on their examples would be told as it is",
)
_ONLY: dict[str, tuple[Only, ...]] = {
    "client": (
        ("weighting", "uniform", "a client's number of examples would say how much it counts"),
        ("robust", "none", "what one client sends would decide which others count"),
        ("max-update-norm", AUTO, "clip-norm already bounds what a client changes"),
        ("over-sample", 1.0, "a cohort is drawn client by client, so that it has no size to fill"),
        ("straggler-grace", AUTO, "how fast one client is would decide whether others count"),
        ("min-replies", 1, "a run that stops would tell how many clients took part"),
        ("max-bytes", AUTO, "when the run ends would tell how many clients took part"),
        _ON_SERVER,
    ),
    "example": (
        ("local-epochs", AUTO, "batches are drawn at random, so that there are no passes"),
        ("batching", "random", "which examples meet in a batch would follow from their lengths"),
        ("packing", False, "an example's gradient would depend on which others it meets"),
        ("noise-cohort", AUTO, "noise is added on each client, whatever the others do"),
        _ON_SERVER,
    ),
}
_METHOD_SAYS = {
    "client": "its next state, or a round before the first, uses more of the clients than the sum "
    "of their changes",
    "example": "it trains what has no known gradients of single examples, or uses a client's data "
    "for more than these",
}


def check_private(values: Mapping[str, Scalar]) -> None:
    """Raise ValueError if a private run was asked for that could not account for what it tells."""
    if values["privacy"] == "none":
        return
    _check_noise(values)
    _check_method(values)
    _check_heads(values)
    if values["privacy"] == "example" and values["precision"] == "float16":
        why = "whether a step is left out for its large numbers would tell of the examples"
        raise _refused(values, "precision", "'float32' or 'bfloat16'", why)
    # A study's noise protects nobody, and what its clients measure chooses its clip norms.
    free = "evaluate-on" if values["noise-cohort"] != AUTO else None
    for key, only, why in _ONLY[str(values["privacy"])]:
        if values[key] != only and key != free:
            raise _refused(values, key, repr(only), why)


def _check_noise(values: Mapping[str, Scalar]) -> None:
    if values["epsilon"] == AUTO and values["noise-multiplier"] == AUTO:
        raise ValueError(
            f"privacy = {values['privacy']!r}: got neither epsilon nor noise-multiplier, expected "
            "one of them at least, since noise follows from it; set epsilon=8, say"
        )
    cohort, clients = values["noise-cohort"], int(values["clients-per-round"])
    if values["privacy"] == "client" and cohort != AUTO and int(cohort) < clients:
        raise ValueError(
            f"noise-cohort = {cohort}: got clients-per-round = {clients}, expected at most as "
            "many, since it stands for a larger federation; raise the one or lower the other"
        )


def _check_method(values: Mapping[str, Scalar]) -> None:
    """Refuse methods that use the data otherwise than the account knows."""
    of_clients = values["privacy"] == "client"
    able = [n for n, m in METHODS.items() if (m.sums_changes if of_clients else m.by_example)]
    if values["method"] not in able:
        why = _METHOD_SAYS[str(values["privacy"])]
        raise _refused(values, "method", f"one of {', '.join(able)}", why)


def _check_heads(values: Mapping[str, Scalar]) -> None:
    """Refuse bases, and ways of choosing heads, that use the data."""
    if not METHODS[str(values["method"])].has_heads:
        return
    if values["scoring"] == "gradient":
        why = "the heads that a client chooses by its examples would tell of them"
        raise _refused(values, "scoring", "'random' or 'weight'", why)
    by_weight = values["scoring"] == "weight" and values["selection"] == "global"
    if by_weight and values["privacy"] == "client":
        why = "which heads clients will train must be known before the round"
        raise _refused(values, "selection", "'layer' with scoring=weight", why)
    if values["init"] in BASES_OF_DATA:
        why = "bases are made of the clients' examples, without noise"
        raise _refused(values, "init", "another", why)


def _refused(values: Mapping[str, Scalar], key: str, expected: str, why: str) -> ValueError:
    return ValueError(
        f"privacy = {values['privacy']!r}: got {key} = {values[key]!r}, expected {expected}, since "
        f"{why}; set that, or privacy=none"
    )
