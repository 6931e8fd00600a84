"""Refuse settings that do not go together, before anything is loaded."""

from collections.abc import Mapping, Sequence

from ravan_flwr.config.keys import AUTO, KEYS
from ravan_flwr.config.private import OF_PRIVACY, check_private
from ravan_flwr.config.secure import check_secure
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar

STEPS = ("local-steps", "local-epochs")  # one of which says how long a client trains

# Which partitions read a key.
OF_PARTITION = {
    "partition-alpha": ("dirichlet", "dirichlet-by-client"),
    "partition-by": ("dirichlet", "dirichlet-by-client", "natural", "pathological", "shards"),
    "classes-per-client": ("pathological",),
    "shards-per-client": ("shards",),
}

# Keys by which nobody is protected alone.
OF_PROTECTION = (*OF_PRIVACY, "secure-minimum")


def check_together(values: Mapping[str, Scalar]) -> None:
    """Raise ValueError if values that are right by themselves contradict each other."""
    _check_method(values)
    _check_pooled(values)
    check_secure(values)
    _check_replies(values)
    _check_form(values)
    _check_evaluation(values)
    _check_steps(values)
    check_private(values)


def check_steps(values: Mapping[str, Scalar], where: str = "") -> None:
    """Raise ValueError if both steps and passes are given: one says how long a client trains."""
    if all(values[key] != AUTO for key in STEPS):
        raise ValueError(
            f"{where}local-epochs = {values['local-epochs']!r}: got {where}local-steps = "
            f"{values['local-steps']!r} beside it, expected one of them, since each says how long "
            "a client trains; leave one out"
        )


def without_effect(run_config: Mapping[str, Scalar], schedule: str = "constant") -> list[str]:
    """List the keys that were given and change nothing, each as `key=value`.

    `schedule` is what the preset says of learning-rate-schedule.
    """
    values = {name: key.default for name, key in KEYS.items()} | dict(run_config)
    method = METHODS.get(str(values["method"]))
    idle = set(method.ignored) if method else set()
    if values["server-optimizer"] == "none":
        idle |= {"server-learning-rate", "server-momentum"}
    for key, kinds in OF_PARTITION.items():
        if values["partition"] not in (*kinds, AUTO):
            idle.add(key)
    chosen = values["learning-rate-schedule"]
    if (schedule if chosen == AUTO else chosen) == "constant":
        idle.add("final-learning-rate")
    if 1 in (values["batch-size"], values["micro-batch-size"]):
        idle.add("packing")
    if values["privacy"] == "none":
        idle |= set(OF_PRIVACY)
    if not values["secure-aggregation"]:
        idle.add("secure-minimum")
    if values["init"] != "data-aware":
        idle.add("calibration-steps")
    return [f"{key}={values[key]}" for key in sorted(idle) if values[key] != KEYS[key].default]


def told_without_effect(run_config: Mapping[str, Scalar], method: str, schedule: str) -> list[str]:
    """Say which settings change nothing, first those that somebody may mean for protection."""
    idle = without_effect(run_config, schedule)
    told = _protecting_nobody(idle)
    if others := [one for one in idle if one.partition("=")[0] not in OF_PROTECTION]:
        told.append(f"no effect with method={method}: {', '.join(others)}")
    return told


def _protecting_nobody(idle: Sequence[str]) -> list[str]:
    told = []
    for keys, protected_by in (
        (OF_PRIVACY, "privacy=client or privacy=example"),
        (("secure-minimum",), "secure-aggregation=true"),
    ):
        if alone := [one for one in idle if one.partition("=")[0] in keys]:
            told.append(
                f"no effect, and nobody is protected: {', '.join(alone)}; expected {protected_by} "
                "beside it"
            )
    return told


def _check_replies(values: Mapping[str, Scalar]) -> None:
    least, clients = int(values["min-replies"]), int(values["clients-per-round"])
    if least > clients:
        raise ValueError(
            f"min-replies = {least}: got clients-per-round = {clients}, expected at least as many; "
            "lower the one or raise the other"
        )
    if values["robust"] != "none" and clients < 3:
        raise ValueError(
            f"robust = {values['robust']!r}: got clients-per-round = {clients}, expected at least "
            "3, since of two replies none outvotes the other; raise clients-per-round"
        )
    heads = METHODS[str(values["method"])].has_heads
    if heads and values["robust"] != "none" and values["head-mean"] != "trained":
        raise ValueError(
            f"robust = {values['robust']!r}: got head-mean = {values['head-mean']!r}, expected "
            "'trained', since clients that leave a head as it was would outvote those that "
            "trained it; leave one of them out"
        )
    if values["robust"] != "none" and values["weighting"] != "uniform":
        raise ValueError(
            f"robust = {values['robust']!r}: got weighting = {values['weighting']!r}, expected "
            "'uniform', since a weight that a client claims is no more to be trusted than the "
            "rest; leave one of them out"
        )


def _check_method(values: Mapping[str, Scalar]) -> None:
    """Refuse options that do not go with the method."""
    frozen = [name for name, method in METHODS.items() if method.frozen_backbone]
    averaging = [name for name, method in METHODS.items() if method.averages]
    no_mean = "makes its next state otherwise than by a mean"
    changes = "changes pretrained weights, which few bits cannot hold"
    for key, able, otherwise, without in (
        ("quantize", frozen, changes, "none"),
        ("backbone-dtype", frozen, changes, "float32"),
        ("server-optimizer", averaging, no_mean, "none"),
        ("robust", averaging, no_mean, "none"),
    ):
        if values[key] not in (without, AUTO) and values["method"] not in able:
            raise ValueError(
                f"{key} = {values[key]!r}: got method {values['method']!r}, which {otherwise}; "
                f"expected one of {', '.join(able)}; choose one, or set {key}={without}"
            )
    for key, without in (("quantize", "none"), ("backbone-dtype", "float32")):
        if trains_backbone(values) and values[key] not in (without, AUTO):
            raise ValueError(
                f"{key} = {values[key]!r}: got init = {values['init']!r}, whose first round "
                f"{changes}; expected another init; choose one, or set {key}={without}"
            )


def trains_backbone(values: Mapping[str, Scalar]) -> bool:
    """Tell whether pretrained weights are trained, be it in a round before the first."""
    method = METHODS[str(values["method"])]
    return not method.frozen_backbone or (method.has_heads and values["init"] == "first-round")


def _check_pooled(values: Mapping[str, Scalar]) -> None:
    """Refuse passes where one client has the examples of all."""
    if METHODS[str(values["method"])].pools and isinstance(values["local-epochs"], int | float):
        raise ValueError(
            f"local-epochs = {values['local-epochs']!r}: got method {values['method']!r}, with "
            "which one client trains on the examples of all, expected local-steps; set that"
        )


def _check_form(values: Mapping[str, Scalar]) -> None:
    """Refuse a merged weight of few bits, which would lose small updates."""
    for key, whole in (("precision", "float32"), ("quantize", "none")):
        if values["layer-form"] == "merged" and values[key] != whole:
            raise ValueError(
                f"layer-form = 'merged': got {key} = {values[key]!r}, expected {whole!r}, since a "
                "weight of few bits loses small updates; leave layer-form out"
            )


def _check_steps(values: Mapping[str, Scalar]) -> None:
    """Refuse parts of a step that are larger than it, and rates that contradict the schedule."""
    part, whole = values["micro-batch-size"], int(values["batch-size"])
    if part != AUTO and int(part) > whole:
        raise ValueError(
            f"micro-batch-size = {part}: got batch-size = {whole}, expected at least as many; "
            "lower the one or raise the other"
        )
    start, end = float(values["learning-rate"]), float(values["final-learning-rate"])
    if values["learning-rate-schedule"] == "cosine" and end > start:
        raise ValueError(
            f"final-learning-rate = {end:g}: got learning-rate = {start:g}, expected at least as "
            "much, since the rate falls; lower the one or raise the other"
        )


def _check_evaluation(values: Mapping[str, Scalar]) -> None:
    if values["evaluate-on"] == "server" and METHODS[str(values["method"])].personalised:
        raise ValueError(
            f"evaluate-on = 'server': got method {values['method']!r}, with which each client has "
            "a model of its own and the server none, expected 'clients'; leave evaluate-on out"
        )
    if values["evaluate-on"] == "clients" and not values["validation-share"]:
        raise ValueError(
            "evaluate-on = 'clients' needs examples to evaluate on: got validation-share = 0, "
            "expected above 0; set validation-share=0.1, say"
        )
