"""Refuse settings under which sums cannot be masked, or would tell more than sums.

docs/secure-aggregation.md has a reason for each in more words.
"""

from collections.abc import Mapping

from ravan_flwr.config.adapter_keys import BASES_OF_DATA
from ravan_flwr.config.key import AUTO
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

MOST_CLIENTS = 256  # in a round: the sum of so many numbers of 16 bits has 24

# Key, the only value that a run takes with it, and why.
_ONLY: tuple[tuple[str, Scalar, str], ...] = (
    ("weighting", "uniform", "a weight that the server names could make a sum that of one client"),
    ("robust", "none", "it compares uploads, of which the server sees none"),
    ("max-update-norm", AUTO, "the server cannot see how far a reply moves what was sent"),
    ("over-sample", 1.0, "a reply that came and is not used would still have to be unmasked"),
    ("wire", "float32", "masked numbers have a form of their own, of 3 bytes each"),
    ("evaluate-on", "server", "what clients measure on their examples would be told as it is"),
)


def check_secure(values: Mapping[str, Scalar]) -> None:
    """Raise ValueError if secure aggregation was asked for with what does not go with it."""
    if not values["secure-aggregation"]:
        return
    _check_method(values)
    for key, only, why in _ONLY:
        if values[key] != only:
            raise _refused(key, values[key], repr(only), why)
    _check_private(values)
    clients, least = int(values["clients-per-round"]), int(values["secure-minimum"])
    if not least <= clients <= MOST_CLIENTS:
        why = "a sum of fewer tells too much of each, and of more has no room in 3 bytes"
        raise _refused(
            "clients-per-round", clients, f"{least} (secure-minimum) to {MOST_CLIENTS}", why
        )


def _check_private(values: Mapping[str, Scalar]) -> None:
    """Refuse noise that clients do not add in shares."""
    if values["privacy"] == "example":
        why = "private steps are not masked yet"
        raise _refused("privacy", "example", "'none' or 'client'", why)
    if values["privacy"] == "client" and values["noise-cohort"] != AUTO:
        why = "clients add the noise that protects themselves, and no other federation's"
        raise _refused("noise-cohort", values["noise-cohort"], repr(AUTO), why)


def _check_method(values: Mapping[str, Scalar]) -> None:
    """Refuse methods, and ways of choosing heads, that need more than sums of changes."""
    able = [name for name, method in METHODS.items() if method.sums_changes]
    if values["method"] not in able:
        why = "its next state, or a round before the first, is not made of the sum of changes"
        raise _refused("method", values["method"], f"one of {', '.join(able)}", why)
    if not METHODS[str(values["method"])].has_heads:
        return
    public = "who trains which heads must be known before the round"
    if values["scoring"] == "gradient":
        raise _refused("scoring", "gradient", "'random' or 'weight'", public)
    if values["scoring"] == "weight" and values["selection"] == "global":
        raise _refused("selection", "global", "'layer' with scoring=weight", public)
    if values["init"] in BASES_OF_DATA:
        why = "bases are made of what each client uploads in a round before the first"
        raise _refused("init", values["init"], "another", why)


def _refused(key: str, value: Scalar, expected: str, why: str) -> ValueError:
    return ValueError(
        f"secure-aggregation = true: got {key} = {value!r}, expected {expected}, since {why}; set "
        "that, or secure-aggregation=false"
    )
