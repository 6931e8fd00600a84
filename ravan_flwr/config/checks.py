"""Refuse settings that do not go together, before anything is loaded.

docs/privacy.md and docs/secure-aggregation.md have the reasons of theirs in more words.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import KEYS, ROBUST, densities
from ravan_flwr.methods import METHODS, MIXES, MethodInfo
from ravan_flwr.specs import Scalar

Values = Mapping[str, Scalar]
# A key, whether its value is right, what is expected, and why.
Rule = tuple[str, bool, str, str]

STEPS = ("local-steps", "local-epochs")  # one of which says how long a client trains

OF_PRIVACY = ("epsilon", "noise-multiplier", "delta", "clip-norm", "noise-cohort")
MOST_CLIENTS = 256  # in a secure round: the sum of so many numbers of 16 bits has 24


def check_together(values: Values) -> None:
    """Raise ValueError if values that are right by themselves contradict each other."""
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


def check_steps(values: Values, where: str = "") -> None:
    """Raise ValueError if both steps and passes are given: one says how long a client trains."""
    if all(values[key] != AUTO for key in STEPS):
        raise ValueError(
            f"{where}local-epochs = {values['local-epochs']!r}: got {where}local-steps = "
            f"{values['local-steps']!r} beside it, expected one of them, since each says how long "
            "a client trains; leave one out"
        )


def trains_backbone(values: Values) -> bool:
    """Tell whether pretrained weights are trained, be it in a round before the first."""
    method = METHODS[str(values["method"])]
    return not method.frozen_backbone or (method.has_heads and values["init"] == "first-round")


def without_effect(run_config: Values) -> list[str]:
    """Say which given settings change nothing, a line for each reason."""
    values = {name: key.default for name, key in KEYS.items()} | dict(run_config)
    idle: dict[str, Iterable[str]] = {}
    if values["privacy"] == "none":
        idle[", and no client is protected, without privacy=client or privacy=example"] = OF_PRIVACY
    if not values["secure-aggregation"]:
        why = ", and no client is protected, without secure-aggregation=true"
        idle[why] = ("secure-minimum",)
    if values["aggregation"] == "sync":
        idle[" with aggregation=sync"] = ("buffer-size", "concurrency", "max-staleness")
    if 1 in (values["batch-size"], values["micro-batch-size"]):
        idle[" with one example at a time"] = ("batching",)
    if method := METHODS.get(str(values["method"])):
        idle[f" with method={values['method']}"] = method.ignored
    lines = []
    for why, keys in idle.items():
        pairs = [f"{key}={values[key]}" for key in sorted(keys) if values[key] != KEYS[key].default]
        if pairs:
            lines.append(f"no effect{why}: {', '.join(pairs)}")
    return lines


def _refusal(values: Values, key: str, conflict: str, expected: str, do: str) -> ValueError:
    return ValueError(f"{key} = {values[key]!r}: got {conflict}, expected {expected}; {do}")


def _check_order(values: Values, small: str, large: str, why: str = "") -> None:
    """Refuse a number above the one that bounds it, where both are known."""
    low, high = values[small], values[large]
    if AUTO not in (low, high) and float(low) > float(high):
        raise _refusal(
            values, small, f"{large} = {high}", f"at least as many{why}",
            "lower the one or raise the other",
        )  # fmt: skip


def _check_method(values: Values) -> None:
    """Refuse options that do not go with the method."""
    name = str(values["method"])
    frozen = [name for name, method in METHODS.items() if method.frozen_backbone]
    averaging = [name for name, method in METHODS.items() if method.averages]
    no_mean = "makes its next state otherwise than by a mean"
    changes = "changes pretrained weights, which few bits cannot hold"
    for key, able, otherwise, without in (
        ("backbone-dtype", frozen, changes, ("float32", AUTO)),
        ("server-optimizer", averaging, no_mean, ("none",)),
        ("weighting", averaging, no_mean, ("uniform", "examples")),
    ):
        if values[key] in without:
            continue
        do = f"choose one, or set {key}={without[0]}"
        if name not in able:
            one_of = f"one of {', '.join(able)}"
            raise _refusal(values, key, f"method {name!r}, which {otherwise}", one_of, do)
        if able is frozen and trains_backbone(values):
            conflict = f"init = {values['init']!r}, whose first round {changes}"
            raise _refusal(values, key, conflict, "another init", do)
    if METHODS[name].mixes and values["deliver"]:
        raise _refusal(values, "deliver", f"method {name!r}", "false", f"{MIXES}; leave it out")
    if METHODS[name].pools and values["local-epochs"] != AUTO:
        conflict = f"method {name!r}, with which one client trains on the examples of all"
        raise _refusal(values, "local-epochs", conflict, "local-steps", "set that")


def _check_outvoting(values: Values, key: str, replies: int) -> None:
    """Refuse a median or trimmed mean over fewer replies than have a middle."""
    if values["weighting"] in ROBUST and replies < 3:
        least = "at least 3, since of two replies none outvotes the other"
        raise _refusal(values, "weighting", f"{key} = {replies}", least, f"raise {key}")


def _check_replies(values: Values) -> None:
    _check_order(values, "min-replies", "clients-per-round")
    _check_outvoting(values, "clients-per-round", int(values["clients-per-round"]))
    has_heads = METHODS[str(values["method"])].has_heads
    if values["weighting"] in ROBUST and values["head-mean"] != "trained" and has_heads:
        why = "clients that leave a head as it was would outvote those that trained it"
        raise _refusal(
            values, "weighting", "head-mean = 'all'", f"'trained', since {why}",
            "leave one of them out",
        )  # fmt: skip


def _check_sparsity(values: Values) -> None:
    """Refuse parts out of range, and what needs all numbers of the state or of a change."""
    sent = densities(str(values["sparsity"]))
    if not all(0 < density <= 1 for density in sent):
        expected = KEYS["sparsity"].allowed
        raise _refusal(values, "sparsity", "a part out of range", expected, "correct it")
    name = str(values["method"])
    method = METHODS[name]
    for density, able, why, form in (
        (sent[0], method.sparse_down, "clients need all numbers of its state", "1:UP"),
        (sent[1], method.sparse_up, "clients count on all of their change in its state", "1:1"),
    ):
        if density < 1 and not able:
            conflict = f"method {name!r}, whose {why}"
            raise _refusal(values, "sparsity", conflict, repr(form), "set that, or another method")
    if sent[1] < 1 and values["weighting"] in ROBUST:
        raise _refusal(
            values, "sparsity", f"weighting = {values['weighting']!r}", "'DOWN:1', since a number "
            "that most clients do not send would stay as it is", "leave one of them out",
        )  # fmt: skip


def _check_asynchronous(values: Values) -> None:
    if values["aggregation"] == "sync":
        return
    account = "sums over a buffer need another account"
    adds_up = "changes against an older state must add up"
    rules = (
        _able(values, lambda method: method.asynchronous, adds_up),
        _only(values, "privacy", "none", account),
        _only(values, "secure-aggregation", False, account),
        _only(values, "over-sample", 1.0, "`concurrency` says who trains"),
    )
    _require("aggregation = 'async'", "aggregation=sync", values, rules)
    usual = int(values["clients-per-round"])
    buffer, out = (
        usual if values[key] == AUTO else int(values[key]) for key in ("buffer-size", "concurrency")
    )
    settings = {**values, "buffer-size": buffer, "concurrency": out}
    _check_order(settings, "buffer-size", "concurrency", ", since no more updates are under way")
    _check_order(settings, "min-replies", "buffer-size", ", since that many close a round")
    _check_outvoting(values, "buffer-size", buffer)
    least, most = -(-out // buffer) - 1, values["max-staleness"]
    if most != AUTO and int(most) < least:
        raise _refusal(
            values, "max-staleness", f"concurrency = {out} and buffer-size = {buffer}, with which "
            "an update of a client as fast as all others is so old", f"at least {least}",
            "raise it or buffer-size, or lower concurrency",
        )  # fmt: skip


def _check_training(values: Values) -> None:
    """Refuse budgets without speeds, parts of a step that are larger than it, and rising rates."""
    if str(values["budgets"]).startswith("by-speed") and values["devices"] == AUTO:
        raise _refusal(
            values, "budgets", "devices = 'auto', whose speeds are not known",
            "devices of a profile or a file", "set devices=edge-gpus, say, or on each device of a "
            "deployment its own budget",
        )  # fmt: skip
    _check_order(values, "micro-batch-size", "batch-size")
    schedule = KEYS["learning-rate-schedule"].parts("learning-rate-schedule", str(
        values["learning-rate-schedule"]))  # fmt: skip
    start, end = float(values["learning-rate"]), schedule.get("end", AUTO)
    if end != AUTO and float(end) > start:
        raise _refusal(
            values, "learning-rate-schedule", f"learning-rate = {start:g}",
            "at least as much as its end, since the rate falls", "lower the one or raise the other",
        )  # fmt: skip


def _check_evaluation(values: Values) -> None:
    method = str(values["method"])
    if values["evaluate-on"] == "server" and not METHODS[method].serves:
        conflict = (
            f"method {method!r}, with which each client has a model of its own and the server none"
        )
        raise _refusal(values, "evaluate-on", conflict, "'clients'", "leave evaluate-on out")
    if values["evaluate-on"] == "clients" and not values["validation-share"]:
        raise ValueError(
            "evaluate-on = 'clients' needs examples to evaluate on: got validation-share = 0, "
            "expected above 0; set validation-share=0.1, say"
        )


def _check_noise(values: Values) -> None:
    if values["epsilon"] == AUTO and values["noise-multiplier"] == AUTO:
        expected = "one of them at least, since noise follows from it"
        conflict = "neither epsilon nor noise-multiplier"
        raise _refusal(values, "privacy", conflict, expected, "set epsilon=8, say")
    if values["privacy"] == "client":
        why = ", since it stands for a larger federation"
        _check_order(values, "clients-per-round", "noise-cohort", why)


def _require(setting: str, without: str, values: Values, rules: Iterable[Rule]) -> None:
    """Raise ValueError for the first value that does not go with a setting."""
    for key, good, expected, why in rules:
        if not good:
            raise ValueError(
                f"{setting}: got {key} = {values[key]!r}, expected {expected}, since {why}; set "
                f"that, or {without}"
            )


def _only(values: Values, key: str, value: Scalar, why: str) -> Rule:
    return key, values[key] == value, repr(value), why


def _able(values: Values, able: Callable[[MethodInfo], bool], why: str) -> Rule:
    names = [name for name, method in METHODS.items() if able(method)]
    return "method", values["method"] in names, f"one of {', '.join(names)}", why


# What a setting requires. Of the clients, or of their examples, only the sum of changes is used.


def _masked(values: Values) -> Iterator[Rule]:
    only = partial(_only, values)
    sums = "its next state, or a round before the first, is not made of the sum of changes"
    yield _able(values, lambda method: method.sums_changes, sums)
    yield from _heads(values, known_before=True)
    yield only("weighting", "uniform", "the server could weight a sum so that it is of one client")
    yield only("max-update-norm", AUTO, "the server cannot see how far a reply moves what was sent")
    yield only("over-sample", 1.0, "a reply that is not used would still have to be unmasked")
    yield only("wire", "float32", "masked numbers have a form of their own, of 3 bytes each")
    yield only("sparsity", "1:1", "which numbers are largest would tell of a client's examples")
    yield only("evaluate-on", "server", _REPORTS)
    yield only("privacy", "none", "the server clips and counts updates, which masks hide")
    least, clients = int(values["secure-minimum"]), int(values["clients-per-round"])
    room = "a sum of fewer reveals too much of each, and one of more does not fit into 3 bytes"
    some = f"{least} (secure-minimum) to {MOST_CLIENTS}"
    yield "clients-per-round", least <= clients <= MOST_CLIENTS, some, room


def _private_clients(values: Values) -> Iterator[Rule]:
    only, number = partial(_only, values), "the run's end would tell how many clients took part"
    sums = "it uses more than the sum of changes, or all clients train in every round"
    yield _able(values, lambda method: method.sums_changes and not method.everyone, sums)
    yield from _heads(values, known_before=True)
    yield only(
        "weighting", "uniform", "numbers of examples, or others' replies, would weight a client"
    )
    yield only("max-update-norm", AUTO, "clip-norm already bounds what a client changes")
    yield only("over-sample", 1.0, "a cohort is drawn client by client, and has no size to fill")
    yield only("straggler-grace", AUTO, "how fast one client is would decide whether others count")
    yield only("min-replies", 1, number)
    yield only("max-bytes", AUTO, number)
    # A study's noise protects nobody, and what its clients measure chooses its clip norms.
    if values["noise-cohort"] == AUTO:
        yield only("evaluate-on", "server", _REPORTS)


def _private_examples(values: Values) -> Iterator[Rule]:
    only = partial(_only, values)
    reason = "it uses more of a client's data than gradients of single examples that are known"
    yield _able(values, lambda method: method.by_example, reason)
    yield from _heads(values, known_before=False)
    leaves = "whether a step is left out for its large numbers would tell of the examples"
    yield "precision", values["precision"] != "float16", "'float32' or 'bfloat16'", leaves
    meet = "which examples meet in a batch, or in a row, would follow from their lengths"
    yield only("batching", "random", meet)
    yield only("local-epochs", AUTO, "batches are drawn at random, so that there are no passes")
    yield only("noise-cohort", AUTO, "noise is added on each client, whatever the others do")
    yield only("evaluate-on", "server", _REPORTS)


_REPORTS = "clients would report what they measure on their examples"


def _heads(values: Values, *, known_before: bool) -> Iterator[Rule]:
    """Require heads and bases that do not depend on examples, or heads known before a round."""
    if not METHODS[str(values["method"])].has_heads:
        return
    tells = "the heads that a client chooses by its examples would tell of them"
    yield "scoring", values["scoring"] != "gradient", "'random' or 'weight'", tells
    late = known_before and values["scoring"] == "weight" and values["selection"] == "global"
    reason = "which heads clients train must be known before the round"
    yield "selection", not late, "'layer' with scoring=weight", reason
    bases = "bases are made of the clients' examples, in a round before the first"
    of_data = str(values["init"]).startswith(("data-aware", "first-round"))
    yield "init", not of_data, "another", bases
