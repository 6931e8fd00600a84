"""Reject settings that contradict each other, before anything is loaded.

docs/privacy.md explains the reasons of the rules for privacy and masks in detail.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import KEYS, KRUM, ROBUST, as_typed, densities
from ravan_flwr.methods import METHODS, MIXES, MethodInfo
from ravan_flwr.specs import MAX_MASKED_CLIENTS, Scalar

Values = Mapping[str, Scalar]
# A key, whether its value is valid, what is expected, and why.
Rule = tuple[str, bool, str, str]

PRIVACY_KEYS = ("epsilon", "noise-multiplier", "delta", "clip-norm", "noise-cohort")


def check_together(values: Values) -> None:
    """Raise ValueError if values that are valid by themselves contradict each other."""
    _check_method(values)
    _check_replies(values)
    _check_sparsity(values)
    _check_asynchronous(values)
    _check_training(values)
    if values["secure-aggregation"]:
        _require("secure-aggregation = true", "secure-aggregation=false", values, _masked(values))
    _check_evaluation(values)
    if values["privacy"] != "none":
        rules = _private_clients if values["privacy"] == "client" else _private_examples
        _require(f"privacy = {values['privacy']!r}", "privacy=none", values, rules(values))
        _check_noise(values)


def trains_backbone(values: Values) -> bool:
    """Return whether pretrained weights are trained, in any round or in a calibration round."""
    method = METHODS[str(values["method"])]
    return not method.frozen_backbone or (method.has_heads and values["init"] == "first-round")


def without_effect(run_config: Values) -> list[str]:
    """Return a line for each reason why some of the given settings have no effect."""
    values = {name: key.default for name, key in KEYS.items()} | dict(run_config)
    unused: dict[str, Iterable[str]] = {}
    if values["privacy"] == "none":
        unused[", and no client is protected, without privacy=client or privacy=example"] = (
            PRIVACY_KEYS
        )
    if not values["secure-aggregation"]:
        reason = ", and no client is protected, without secure-aggregation=true"
        unused[reason] = ("secure-minimum",)
    if values["aggregation"] == "sync":
        unused[" with aggregation=sync"] = ("buffer-size", "concurrency", "max-staleness")
    if 1 in (values["batch-size"], values["micro-batch-size"]):
        unused[" with one example at a time"] = ("batching",)
    optimizer = KEYS["optimizer"].parse("optimizer", str(values["optimizer"]))
    if optimizer.get("mu") == 0:
        unused[" of the proximal term without MU, as in optimizer=fedprox:0.01"] = ("optimizer",)
    if method := METHODS.get(str(values["method"])):
        unused[f" with method={values['method']}"] = method.ignored
    lines = []
    for reason, keys in unused.items():
        pairs = [f"{key}={values[key]}" for key in sorted(keys) if values[key] != KEYS[key].default]
        if pairs:
            lines.append(f"no effect{reason}: {', '.join(pairs)}")
    return lines


def _conflict(values: Values, key: str, conflict: str, expected: str, remedy: str) -> ValueError:
    value = values[key]
    text = as_typed(value) if isinstance(value, bool) else repr(value)
    return ValueError(f"{key} = {text}: got {conflict}, expected {expected}; {remedy}")


def _check_order(values: Values, small: str, large: str, reason: str = "") -> None:
    """Raise ValueError if the value of `small` is above that of `large`, unless one is "auto"."""
    low, high = values[small], values[large]
    if AUTO not in (low, high) and float(low) > float(high):
        raise _conflict(
            values, small, f"{large} = {high}", f"at least as many{reason}",
            "lower the one or raise the other",
        )  # fmt: skip


def _check_method(values: Values) -> None:
    """Raise ValueError for options that the method does not support."""
    name = str(values["method"])
    frozen = [name for name, method in METHODS.items() if method.frozen_backbone]
    averaging = [name for name, method in METHODS.items() if method.averages]
    no_mean = "does not compute its next state as a mean"
    changes = "changes pretrained weights, which few bits cannot hold"
    for key, supported, reason, no_support_needed in (
        ("backbone-dtype", frozen, changes, ("float32", AUTO)),
        ("server-optimizer", averaging, no_mean, ("none",)),
        ("weighting", averaging, no_mean, ("uniform", "examples")),
    ):
        if values[key] in no_support_needed:
            continue
        remedy = f"choose one, or set {key}={no_support_needed[0]}"
        if name not in supported:
            one_of = f"one of {', '.join(supported)}"
            raise _conflict(values, key, f"method {name!r}, which {reason}", one_of, remedy)
        if supported is frozen and trains_backbone(values):
            conflict = f"init = {values['init']!r}, whose first round {changes}"
            raise _conflict(values, key, conflict, "another init", remedy)
    if METHODS[name].mixes and values["deliver"]:
        raise _conflict(values, "deliver", f"method {name!r}", "false", f"{MIXES}; leave it out")
    if METHODS[name].pools and isinstance(values["local-steps"], str):
        conflict = f"method {name!r}, with which one client trains on the examples of all"
        raise _conflict(values, "local-steps", conflict, "a number of steps", "set that")


def _check_robust(values: Values, key: str, replies: int) -> None:
    """Raise ValueError for a robust statistic of too few replies."""
    needed = ROBUST.get(str(values["weighting"]), 0)
    if replies < needed:
        expected = f"at least {needed}, since fewer replies do not outvote a false one"
        raise _conflict(values, "weighting", f"{key} = {replies}", expected, f"raise {key}")


def _check_replies(values: Values) -> None:
    if values["aggregation"] == "sync":  # else `buffer-size` is compared
        _check_order(values, "min-replies", "clients-per-round")
        _check_robust(values, "clients-per-round", int(values["clients-per-round"]))
    has_heads = METHODS[str(values["method"])].has_heads
    weighting = values["weighting"]
    by_coordinate = weighting in ROBUST and weighting not in KRUM
    if by_coordinate and values["head-mean"] != "trained" and has_heads:
        reason = "clients that leave a head unchanged would outvote the clients that trained it"
        raise _conflict(
            values, "weighting", "head-mean = 'all'", f"'trained', since {reason}",
            "leave one of them out",
        )  # fmt: skip
    if weighting in KRUM:
        reason = "it compares whole updates, and clients with small budgets leave out parts"
        rules = [_only(values, "budgets", "full", reason), _only(values, "max-share", 1.0, reason)]
        _require(f"weighting = {weighting!r}", "weighting=median", values, rules)


def _check_sparsity(values: Values) -> None:
    """Raise ValueError for densities out of range, or not supported by method or weighting."""
    sent = densities(str(values["sparsity"]))
    if not all(0 < density <= 1 for density in sent):
        expected = KEYS["sparsity"].allowed
        raise _conflict(values, "sparsity", "a density out of range", expected, "change it")
    name = str(values["method"])
    method = METHODS[name]
    dense_down = "1:UP" if method.sparse_up else "1:1"
    for density, supported, reason, form in (
        (sent[0], method.sparse_down, "clients need all numbers of its state", dense_down),
        (sent[1], method.sparse_up, "clients need all of their change in its state", "1:1"),
    ):
        if density < 1 and not supported:
            conflict = f"method {name!r}, whose {reason}"
            raise _conflict(values, "sparsity", conflict, repr(form), "set that, or another method")
    if sent[1] < 1 and values["weighting"] in ROBUST and values["weighting"] not in KRUM:
        raise _conflict(
            values, "sparsity", f"weighting = {values['weighting']!r}", "'DOWN:1', since a number "
            "that most clients do not send would never change", "leave one of them out",
        )  # fmt: skip


def _check_asynchronous(values: Values) -> None:
    if values["aggregation"] == "sync":
        return
    account = "sums over a buffer need another account"
    adds_up = "changes relative to an older state must add up"
    rules = (
        _supported(values, lambda method: method.asynchronous, adds_up),
        _only(values, "privacy", "none", account),
        _only(values, "secure-aggregation", False, account),
        _only(values, "over-sample", 1.0, "`concurrency` sets how many clients train"),
    )
    _require("aggregation = 'async'", "aggregation=sync", values, rules)
    default = int(values["clients-per-round"])
    buffer, concurrency = (
        default if values[key] == AUTO else int(values[key])
        for key in ("buffer-size", "concurrency")
    )
    settings = {**values, "buffer-size": buffer, "concurrency": concurrency}
    _check_order(settings, "buffer-size", "concurrency", ", since no more updates are under way")
    _check_order(settings, "min-replies", "buffer-size", ", since that many close a round")
    _check_robust(values, "buffer-size", buffer)
    min_staleness, max_staleness = -(-concurrency // buffer) - 1, values["max-staleness"]
    if max_staleness != AUTO and int(max_staleness) < min_staleness:
        raise _conflict(
            values, "max-staleness", f"concurrency = {concurrency} and buffer-size = {buffer}, "
            "with which updates of equally fast clients are that old", f"at least {min_staleness}",
            "raise it or buffer-size, or lower concurrency",
        )  # fmt: skip


def _check_training(values: Values) -> None:
    """Raise ValueError for contradicting settings of devices, batches or learning rates."""
    if str(values["budgets"]).startswith("by-speed") and values["devices"] == AUTO:
        raise _conflict(
            values, "budgets", "devices = 'auto', whose speeds are not known",
            "devices of a profile or a file", "set devices=edge-gpus, say, or on each device of a "
            "deployment its own budget",
        )  # fmt: skip
    _check_order(values, "micro-batch-size", "batch-size")
    schedule = KEYS["learning-rate-schedule"].parse("learning-rate-schedule", str(
        values["learning-rate-schedule"]))  # fmt: skip
    start, end = float(values["learning-rate"]), schedule.get("end", AUTO)
    if end != AUTO and float(end) > start:
        raise _conflict(
            values, "learning-rate-schedule", f"learning-rate = {start:g}",
            "at least as much as its end, since the learning rate falls",
            "lower the one or raise the other",
        )  # fmt: skip


def _check_evaluation(values: Values) -> None:
    method = str(values["method"])
    if values["evaluate-on"] == "server" and not METHODS[method].serves:
        conflict = (
            f"method {method!r}, with which each client has a model of its own and the server none"
        )
        raise _conflict(values, "evaluate-on", conflict, "'clients'", "leave evaluate-on out")
    if values["evaluate-on"] == "clients" and not values["validation-share"]:
        raise ValueError(
            "evaluate-on = 'clients' needs examples to evaluate on: got validation-share = 0, "
            "expected above 0; set validation-share=0.1, say"
        )


def _check_noise(values: Values) -> None:
    if values["epsilon"] == AUTO and values["noise-multiplier"] == AUTO:
        expected = "one of them at least, since noise follows from it"
        conflict = "neither epsilon nor noise-multiplier"
        raise _conflict(values, "privacy", conflict, expected, "set epsilon=8, say")
    if values["privacy"] == "client":
        reason = ", since it stands for a larger federation"
        _check_order(values, "clients-per-round", "noise-cohort", reason)


def _require(setting: str, without: str, values: Values, rules: Iterable[Rule]) -> None:
    """Raise ValueError for the first value that breaks one of a setting's rules."""
    for key, valid, expected, reason in rules:
        if not valid:
            raise ValueError(
                f"{setting}: got {key} = {values[key]!r}, expected {expected}, since {reason}; "
                f"set that, or {without}"
            )


def _only(values: Values, key: str, value: Scalar, reason: str) -> Rule:
    return key, values[key] == value, repr(value), reason


def _supported(values: Values, supports: Callable[[MethodInfo], bool], reason: str) -> Rule:
    names = [name for name, method in METHODS.items() if supports(method)]
    return "method", values["method"] in names, f"one of {', '.join(names)}", reason


# The rules of each setting. From clients, or their examples, only the sum of changes is used.


def _masked(values: Values) -> Iterator[Rule]:
    only = partial(_only, values)
    sums = "its next state, or a calibration round, uses more than the sum of changes"
    yield _supported(values, lambda method: method.sums_changes, sums)
    yield from _heads(values, known_before=True)
    yield only("weighting", "uniform", "the server could choose weights that reveal one client")
    yield only("max-update-norm", AUTO, "the server cannot measure a masked update")
    yield only("over-sample", 1.0, "a reply that is not used would still have to be unmasked")
    yield only("wire", "float32", "masked numbers have a format of their own, of 3 bytes each")
    yield only("sparsity", "1:1", "the places of the largest numbers depend on a client's examples")
    yield only("evaluate-on", "server", _REPORTS)
    yield only("privacy", "none", "the server clips and counts updates, which masks hide")
    minimum, clients = int(values["secure-minimum"]), int(values["clients-per-round"])
    reason = "a smaller sum reveals too much of each client, a larger one exceeds 3 bytes a number"
    expected = f"{minimum} (secure-minimum) to {MAX_MASKED_CLIENTS}"
    yield "clients-per-round", minimum <= clients <= MAX_MASKED_CLIENTS, expected, reason


def _private_clients(values: Values) -> Iterator[Rule]:
    only, number = partial(_only, values), "the run's end would reveal how many clients took part"
    sums = "it uses more than the sum of changes, or all clients train in every round"
    yield _supported(values, lambda method: method.sums_changes and not method.all_clients, sums)
    yield from _heads(values, known_before=True)
    yield only(
        "weighting", "uniform", "a client's weight would depend on its examples or others' replies"
    )
    yield only("max-update-norm", AUTO, "clip-norm already bounds what a client changes")
    yield only("over-sample", 1.0, "each client is drawn by itself, so a cohort has no fixed size")
    yield only("straggler-grace", AUTO, "one client's speed would decide whether others count")
    yield only("min-replies", 1, number)
    yield only("max-bytes", AUTO, number)
    # With noise-cohort, in studies, no client is protected, and clients' metrics choose clip norms.
    if values["noise-cohort"] == AUTO:
        yield only("evaluate-on", "server", _REPORTS)


def _private_examples(values: Values) -> Iterator[Rule]:
    only = partial(_only, values)
    reason = "it uses more of a client's data than its known per-example gradients"
    yield _supported(values, lambda method: method.by_example, reason)
    yield from _heads(values, known_before=False)
    overflow = "whether a step is skipped for an overflow would depend on single examples"
    yield "precision", values["precision"] != "float16", "'float32' or 'bfloat16'", overflow
    lengths = "which examples share a batch, or a row, would depend on their lengths"
    yield only("batching", "random", lengths)
    passes = "batches are drawn at random, so that there are no passes"
    yield "local-steps", not isinstance(values["local-steps"], str), "a number of steps", passes
    yield only("noise-cohort", AUTO, "each client adds its own noise, whatever the others do")
    yield only("evaluate-on", "server", _REPORTS)


_REPORTS = "clients would report what they measure on their examples"


def _heads(values: Values, *, known_before: bool) -> Iterator[Rule]:
    """Yield rules: no heads or bases that depend on examples, and heads known before a round."""
    if not METHODS[str(values["method"])].has_heads:
        return
    reveals = "heads that a client chooses by its examples would reveal something of them"
    yield "scoring", values["scoring"] != "gradient", "'random' or 'weight'", reveals
    late = known_before and values["scoring"] == "weight" and values["selection"] == "global"
    reason = "which heads clients train must be known before the round"
    yield "selection", not late, "'layer' with scoring=weight", reason
    bases = "these bases are computed from the clients' examples, in a calibration round"
    of_data = str(values["init"]).startswith(("data-aware", "first-round"))
    yield "init", not of_data, "another", bases
