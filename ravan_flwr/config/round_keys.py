"""List the keys of rounds: who takes part, what becomes of replies, what if they fail."""

from ravan_flwr.config.key import AUTO, Key
from ravan_flwr.methods.budgets import BUDGETS

ROUNDS: dict[str, Key] = {
    "num-rounds": Key(
        int, AUTO, "number of rounds", low=1, high=1_000_000, from_preset=True, may_change=True
    ),
    "clients-per-round": Key(
        int, AUTO, "clients that train in each round", low=1, high=1_000_000, from_preset=True
    ),
    "max-bytes": Key(
        float,
        AUTO,
        "bytes that a run's rounds may send, up and down: the last round that fits ends it; what "
        "deliver=true sends afterwards comes on top; auto: the preset's, or any",
        above=0,
        from_preset=True,
        may_change=True,
    ),
    "until-metric": Key(
        float,
        0.0,
        "end the run with the round whose evaluation reaches this value of the task's metric, "
        "from below, or of a perplexity from above; 0: hold all rounds",
        low=0,
        may_change=True,
    ),
    "budgets": Key(
        str,
        "full",
        "distribution of the clients' budgets, the shares of the adapters that each can train",
        tuple(BUDGETS),
    ),
    "eval-every": Key(
        int,
        AUTO,
        "number of rounds from one evaluation to the next",
        low=1,
        high=1_000_000,
        from_preset=True,
        may_change=True,
    ),
    "evaluate-on": Key(
        str,
        AUTO,
        "examples to evaluate on: the server's test examples, or those that clients hold back; "
        "auto: the clients' where each has a model of its own (fedsa-lora, local), or the "
        "server's",
        (AUTO, "server", "clients"),
    ),
    "evaluate-samples": Key(
        int,
        0,
        "answers that the model writes at each evaluation, to the same few test examples, for "
        "a person to read",
        low=0,
        high=50,
        of_result=False,
    ),
    "validation-share": Key(
        float,
        AUTO,
        "share of its examples that each client holds back; auto: 0.2 where each client has a "
        "model of its own, or 0",
        low=0,
        high=0.9,
    ),
}

AGGREGATION: dict[str, Key] = {
    "wire": Key(
        str,
        "float32",
        "numbers in which tensors travel, both ways",
        ("float32", "float16", "bfloat16", "int8"),
    ),
    "weighting": Key(
        str,
        "uniform",
        "how replies are weighted in the mean: alike, or by numbers of examples",
        ("uniform", "examples"),
    ),
    "server-optimizer": Key(
        str,
        "none",
        "server's optimiser of the mean update: FedAvgM is momentum, FedAdam is adam",
        ("none", "momentum", "adam"),
    ),
    "server-learning-rate": Key(
        float,
        AUTO,
        "learning rate of the server's optimiser; auto: 1, or 0.01 for adam",
        above=0,
        high=1e3,
    ),
    "server-momentum": Key(
        float, 0.9, "beta of momentum, or beta 1 of adam, on the server", low=0, high=0.9999
    ),
}

PRIVACY: dict[str, Key] = {
    "privacy": Key(
        str,
        "none",
        "client: differential privacy for each client, against all who see the model; example: "
        "for each example of a client, against the server as well",
        ("none", "client", "example"),
    ),
    "epsilon": Key(
        float,
        AUTO,
        "privacy that a run may spend, after which it ends; without noise-multiplier the noise "
        "follows from it; auto: any",
        above=0,
        high=1e4,
    ),
    "noise-multiplier": Key(
        float,
        AUTO,
        "noise on the sum of clipped changes, or of clipped gradients, by clip-norm; auto: by "
        "epsilon",
        low=0.1,
        high=1000,
    ),
    "delta": Key(float, 1e-5, "delta that goes with epsilon", above=0, high=0.1),
    "clip-norm": Key(
        float,
        AUTO,
        "norm to which a client's change, or an example's gradient, is clipped; auto: of changes "
        "0.1 at first, then half of them are within it, and of gradients 1",
        above=0,
        high=1e6,
    ),
    "noise-cohort": Key(
        int,
        AUTO,
        "for studies alone: the noise of as many clients a round, of which fewer are "
        "simulated; auto: of those there are",
        low=1,
        high=100_000_000,
    ),
}

SECURE: dict[str, Key] = {
    "secure-aggregation": Key(
        bool,
        False,
        "clients mask what they upload, and the server sees sums alone; devices need secure-keys",
    ),
    "secure-minimum": Key(
        int,
        4,
        "clients that a head needs in a round, and whose numbers a sum has at least; with fewer "
        "it is not trained",
        low=3,
        high=256,
    ),
}

FAULTS: dict[str, Key] = {
    "round-timeout": Key(
        float, 3600.0, "seconds to wait for the replies of a round", above=0, of_result=False
    ),
    "straggler-grace": Key(
        float,
        AUTO,
        "seconds that a round stays open after min-replies good replies; auto: after half of "
        "the replies, ten times as long as they took, at least 60",
        low=0,
        may_change=True,
    ),
    "over-sample": Key(
        float,
        1.0,
        "ask this many times clients-per-round, and use the first clients-per-round replies",
        low=1,
        high=10,
    ),
    "min-replies": Key(
        int,
        1,
        "stop the run when a round has fewer good replies",
        low=1,
        high=1_000_000,
        may_change=True,
    ),
    "robust": Key(
        str,
        "none",
        "combine replies by this in place of the mean, against a few false ones",
        ("none", "median", "trimmed-mean"),
    ),
    "max-update-norm": Key(
        float,
        AUTO,
        "refuse a reply whose change has a larger norm; auto: a limit from learning-rate and "
        "from what is usual",
        above=0,
        may_change=True,
    ),
    "max-share": Key(
        float,
        1.0,
        "largest budget that a client is granted, whatever it claims",
        above=0,
        high=1,
        may_change=True,
    ),
    "max-examples": Key(
        int,
        AUTO,
        "as how many examples a device's own data counts at most; auto: ten times the median",
        low=1,
        high=2**48,
    ),
}
