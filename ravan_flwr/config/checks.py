"""Refuse settings that do not go together, before anything is loaded.

docs/privacy.md and docs/secure-aggregation.md have the reasons of theirs in more words.
"""

from collections.abc import Mapping

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import KEYS, ROBUST, shares_sent
from ravan_flwr.methods import METHODS, MIXES
from ravan_flwr.specs import Scalar

Values = Mapping[str, Scalar]

STEPS = ("local-steps", "local-epochs")  # one of which says how long a client trains

OF_PRIVACY = ("epsilon", "noise-multiplier", "delta", "clip-norm", "noise-cohort")
MOST_CLIENTS = 256  # in a secure round: the sum of so many numbers of 16 bits has 24

# The only value of a key that goes with a setting, and why.
Only = tuple[str, Scalar, str]
_ON_SERVER = (
    "evaluate-on", "server", "clients would report what they measure on their examples",
)  # fmt: skip
_ONLY: dict[str, tuple[Only, ...]] = {
    "client": (
        (
            "weighting",
            "uniform",
            "a client's number of examples, or what others send, would say how much it counts",
        ),
        ("max-update-norm", AUTO, "clip-norm already bounds what a client changes"),
        ("over-sample", 1.0, "a cohort is drawn client by client, so that it has no size to fill"),
        ("straggler-grace", AUTO, "how fast one client is would decide whether others count"),
        ("min-replies", 1, "a run that stops would tell how many clients took part"),
        ("max-bytes", AUTO, "when the run ends would tell how many clients took part"),
        _ON_SERVER,
    ),
    "example": (
        ("local-epochs", AUTO, "batches are drawn at random, so that there are no passes"),
        ("noise-cohort", AUTO, "noise is added on each client, whatever the others do"),
        _ON_SERVER,
    ),
    "secure": (
        (
            "weighting",
            "uniform",
            "a weight that the server names could make a sum that of one, "
            "and to compare uploads it would have to see them",
        ),
        ("max-update-norm", AUTO, "the server cannot see how far a reply moves what was sent"),
        ("over-sample", 1.0, "a reply that came and is not used would still have to be unmasked"),
        ("wire", "float32", "masked numbers have a form of their own, of 3 bytes each"),
        ("sparsity", "1:1", "which numbers of a client are largest would tell of its examples"),
        ("privacy", "none", "the server clips and counts updates, and masks hide each of them"),
        _ON_SERVER,
    ),
}
_METHOD_SAYS = {
    "client": "its next state, or a round before the first, uses more of the clients than the sum "
    "of their changes, or all clients train in every round",
    "example": "it trains what has no known gradients of single examples, or uses a client's data "
    "for more than these",
    "secure": "its next state, or a round before the first, is not made of the sum of changes",
}
_HEADS_SAY = {
    "client": "which heads clients will train must be known before the round",
    "example": "the heads that a client chooses by its examples would tell of them",
    "secure": "who trains which heads must be known before the round",
}


def check_together(values: Values) -> None:
    """Raise ValueError if values that are right by themselves contradict each other."""
    _check_method(values)
    _check_replies(values)
    _check_sparsity(values)
    _check_asynchronous(values)
    if str(values["budgets"]).startswith("by-speed") and values["devices"] == AUTO:
        raise _refused(
            values, "budgets", "devices = 'auto', whose speeds are not known",
            "devices of a profile or a file", "set devices=edge-gpus, say, or on each device of a "
            "deployment its own budget",
        )  # fmt: skip
    _check_steps(values)
    if values["secure-aggregation"]:
        _check_sums("secure-aggregation = true", "secure-aggregation=false", "secure", values)
    _check_evaluation(values)
    if values["privacy"] != "none":
        kind = str(values["privacy"])
        _check_sums(f"privacy = {kind!r}", "privacy=none", kind, values)
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
    """List the keys that were given and change nothing, each as `key=value`."""
    values = {name: key.default for name, key in KEYS.items()} | dict(run_config)
    method = METHODS.get(str(values["method"]))
    idle = set(method.ignored) if method else set()
    if 1 in (values["batch-size"], values["micro-batch-size"]):
        idle.add("batching")
    if values["privacy"] == "none":
        idle |= set(OF_PRIVACY)
    if not values["secure-aggregation"]:
        idle.add("secure-minimum")
    if values["aggregation"] == "sync":
        idle |= {"buffer-size", "concurrency", "max-staleness"}
    return [f"{key}={values[key]}" for key in sorted(idle) if values[key] != KEYS[key].default]


def told_without_effect(run_config: Values) -> list[str]:
    """Say which settings change nothing, first those that somebody may mean for protection."""
    others, told = without_effect(run_config), []
    method = run_config.get("method", KEYS["method"].default)
    for keys, protected_by in (
        (OF_PRIVACY, "privacy=client or privacy=example"),
        (("secure-minimum",), "secure-aggregation=true"),
    ):
        if alone := [one for one in others if one.partition("=")[0] in keys]:
            told.append(
                f"no effect, and no client is protected: {', '.join(alone)}; expected "
                f"{protected_by} beside it"
            )
            others = [one for one in others if one not in alone]
    return told + ([f"no effect with method={method}: {', '.join(others)}"] if others else [])


def _refused(values: Values, key: str, got: str, expected: str, do: str) -> ValueError:
    return ValueError(f"{key} = {values[key]!r}: got {got}, expected {expected}; {do}")


def _check_order(values: Values, small: str, large: str, why: str = "") -> None:
    """Refuse a number above the one that bounds it, where both are known."""
    low, high = values[small], values[large]
    if AUTO not in (low, high) and float(low) > float(high):
        raise _refused(
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
            raise _refused(values, key, f"method {name!r}, which {otherwise}", one_of, do)
        if able is frozen and trains_backbone(values):
            got = f"init = {values['init']!r}, whose first round {changes}"
            raise _refused(values, key, got, "another init", do)
    if METHODS[name].mixes and values["deliver"]:
        raise _refused(values, "deliver", f"method {name!r}", "false", f"{MIXES}; leave it out")
    if METHODS[name].pools and values["local-epochs"] != AUTO:
        got = f"method {name!r}, with which one client trains on the examples of all"
        raise _refused(values, "local-epochs", got, "local-steps", "set that")


def _check_outvoting(values: Values, got: str, replies: int, do: str) -> None:
    """Refuse a median or trimmed mean over fewer replies than have a middle."""
    if replies < 3:
        least = "at least 3, since of two replies none outvotes the other"
        raise _refused(values, "weighting", got, least, do)


def _check_replies(values: Values) -> None:
    _check_order(values, "min-replies", "clients-per-round")
    if values["weighting"] not in ROBUST:
        return
    clients = int(values["clients-per-round"])
    _check_outvoting(values, f"clients-per-round = {clients}", clients, "raise clients-per-round")
    if values["head-mean"] != "trained" and METHODS[str(values["method"])].has_heads:
        why = "clients that leave a head as it was would outvote those that trained it"
        raise _refused(
            values, "weighting", "head-mean = 'all'", f"'trained', since {why}",
            "leave one of them out",
        )  # fmt: skip


def _check_sparsity(values: Values) -> None:
    """Refuse shares out of range, and what needs all numbers of the state or of a change."""
    shares = shares_sent(str(values["sparsity"]))
    if not all(0 < share <= 1 for share in shares):
        expected = KEYS["sparsity"].allowed
        raise _refused(values, "sparsity", "a share out of range", expected, "correct it")
    name = str(values["method"])
    method = METHODS[name]
    for share, able, why, form in (
        (shares[0], method.sparse_down, "clients need all numbers of its state", "1:UP"),
        (shares[1], method.sparse_up, "clients count on all of their change in its state", "1:1"),
    ):
        if share < 1 and not able:
            got = f"method {name!r}, whose {why}"
            raise _refused(values, "sparsity", got, repr(form), "set that, or another method")
    if shares[1] < 1 and values["weighting"] in ROBUST:
        raise _refused(
            values, "sparsity", f"weighting = {values['weighting']!r}", "'DOWN:1', since a number "
            "that most clients do not send would stay as it is", "leave one of them out",
        )  # fmt: skip


def _check_asynchronous(values: Values) -> None:
    if values["aggregation"] == "sync":
        if str(values["server-optimizer"]).startswith("fadas"):
            raise _refused(
                values, "server-optimizer", "aggregation = 'sync'", "'async', since updates of one "
                "round are of one age", "set that, or server-optimizer=adam",
            )  # fmt: skip
        return
    able = [name for name, method in METHODS.items() if method.asynchronous]
    name, whole = str(values["method"]), "sums over a buffer need another account"
    for key, good, expected in (
        ("method", name in able, f"one of {', '.join(able)}, where changes against an older state "
         "add up"),
        ("privacy", values["privacy"] == "none", f"'none', since {whole}"),
        ("secure-aggregation", not values["secure-aggregation"], f"false, since {whole}"),
        ("over-sample", values["over-sample"] == 1, "1, since `concurrency` says who trains"),
    ):  # fmt: skip
        if not good:
            got, do = f"{key} = {values[key]!r}", "set that, or aggregation=sync"
            raise _refused(values, "aggregation", got, expected, do)
    usual = int(values["clients-per-round"])
    buffer, out = (
        usual if values[key] == AUTO else int(values[key]) for key in ("buffer-size", "concurrency")
    )
    known = {**values, "buffer-size": buffer, "concurrency": out}
    _check_order(known, "buffer-size", "concurrency", ", since no more updates are under way")
    _check_order(known, "min-replies", "buffer-size", ", since that many close a round")
    if values["weighting"] in ROBUST:
        do = "raise buffer-size and concurrency"
        _check_outvoting(values, f"buffer-size = {buffer}", buffer, do)
    least, most = -(-out // buffer) - 1, values["max-staleness"]
    if most != AUTO and int(most) < least:
        raise _refused(
            values, "max-staleness", f"concurrency = {out} and buffer-size = {buffer}, with which "
            "an update of a client as fast as all others is so old", f"at least {least}",
            "raise it or buffer-size, or lower concurrency",
        )  # fmt: skip


def _check_steps(values: Values) -> None:
    """Refuse parts of a step that are larger than it, and rates that contradict the schedule."""
    _check_order(values, "micro-batch-size", "batch-size")
    schedule = KEYS["learning-rate-schedule"].parts("learning-rate-schedule", str(
        values["learning-rate-schedule"]))  # fmt: skip
    start, end = float(values["learning-rate"]), schedule.get("end", AUTO)
    if end != AUTO and float(end) > start:
        raise _refused(
            values, "learning-rate-schedule", f"learning-rate = {start:g}",
            "at least as much as its end, since the rate falls", "lower the one or raise the other",
        )  # fmt: skip


def _check_evaluation(values: Values) -> None:
    method = str(values["method"])
    if values["evaluate-on"] == "server" and not METHODS[method].serves:
        got = (
            f"method {method!r}, with which each client has a model of its own and the server none"
        )
        raise _refused(values, "evaluate-on", got, "'clients'", "leave evaluate-on out")
    if values["evaluate-on"] == "clients" and not values["validation-share"]:
        raise ValueError(
            "evaluate-on = 'clients' needs examples to evaluate on: got validation-share = 0, "
            "expected above 0; set validation-share=0.1, say"
        )


def _check_noise(values: Values) -> None:
    if values["epsilon"] == AUTO and values["noise-multiplier"] == AUTO:
        expected = "one of them at least, since noise follows from it"
        got = "neither epsilon nor noise-multiplier"
        raise _refused(values, "privacy", got, expected, "set epsilon=8, say")
    if values["privacy"] == "client":
        why = ", since it stands for a larger federation"
        _check_order(values, "clients-per-round", "noise-cohort", why)


def _check_sums(what: str, without: str, kind: str, values: Values) -> None:
    """Refuse what uses clients, or examples, for more than the sum of their changes."""

    def check(key: str, good: bool, expected: str, why: str) -> None:
        if not good:
            raise ValueError(
                f"{what}: got {key} = {values[key]!r}, expected {expected}, since {why}; set that, "
                f"or {without}"
            )

    method = METHODS[str(values["method"])]
    drawn = kind == "client"  # a cohort, by chance
    able = [
        n
        for n, m in METHODS.items()
        if (m.by_example if kind == "example" else m.sums_changes and not (drawn and m.everyone))
    ]
    check("method", values["method"] in able, f"one of {', '.join(able)}", _METHOD_SAYS[kind])
    if method.has_heads:
        score, why = values["scoring"], _HEADS_SAY[kind]
        tells = why if kind == "secure" else _HEADS_SAY["example"]
        check("scoring", score != "gradient", "'random' or 'weight'", tells)
        public = kind == "example" or score != "weight" or values["selection"] != "global"
        check("selection", public, "'layer' with scoring=weight", why)
        bases = "bases are made of the clients' examples, in a round before the first"
        of_data = str(values["init"]).startswith(("data-aware", "first-round"))
        check("init", not of_data, "another", bases)
    if kind == "example":
        leaves = "whether a step is left out for its large numbers would tell of the examples"
        whole = values["precision"] != "float16"
        check("precision", whole, "'float32' or 'bfloat16'", leaves)
        meet = "which examples meet in a batch, or in a row, would follow from their lengths"
        check("batching", str(values["batching"]).startswith("random"), "'random'", meet)
    # A study's noise protects nobody, and what its clients measure chooses its clip norms.
    free = "evaluate-on" if kind != "secure" and values["noise-cohort"] != AUTO else None
    for key, only, why in _ONLY[kind]:
        check(key, values[key] == only or key == free, repr(only), why)
    if kind == "secure":
        least, clients = int(values["secure-minimum"]), int(values["clients-per-round"])
        room = "a sum of fewer reveals too much of each, and one of more does not fit into 3 bytes"
        some = f"{least} (secure-minimum) to {MOST_CLIENTS}"
        check("clients-per-round", least <= clients <= MOST_CLIENTS, some, room)
