"""List the keys of a run config.

A run config is what `[tool.flwr.app.config]` holds and `flwr run . -c "key=value"`
overrides: flat, kebab-case, with bool, int, float and str values. A key that is `"auto"`
takes the preset's value, or where presets have none what its help says.
"""

from ravan_flwr.config.key import AUTO, Key, check_choice, did_you_mean
from ravan_flwr.config.partition_keys import PARTITION_KEYS
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.budgets import BUDGETS
from ravan_flwr.specs import Scalar

__all__ = [
    "AUTO",
    "FREE_ON_RESUME",
    "FROM_PRESET",
    "KEYS",
    "KEYS_BY_TOPIC",
    "NOT_OF_RESULT",
    "check_choice",
    "check_key",
]

# By what they are about, as `--help` lists them. `pyproject.toml` repeats the defaults for
# Flower, and a test compares them.
KEYS_BY_TOPIC: dict[str, dict[str, Key]] = {
    "model, data and method": {
        "preset": Key(
            str,
            "digits-vit",
            "file of conf/, or the path of one: task, model, data, and what a setting is if auto",
        ),
        "model": Key(
            str,
            AUTO,
            "model in place of the preset's: an id of the Hugging Face Hub, id@revision, a folder, "
            "or the name of another one in the preset, such as small",
        ),
        "data": Key(
            str,
            AUTO,
            "data set in place of the preset's, with the same columns: an id of the hub, or a "
            "folder",
        ),
        "glue-task": Key(
            str,
            AUTO,
            "task of preset glue-llama; auto: sst2",
            ("mnli", "qnli", "qqp", "sst2", "rte"),
        ),
        "method": Key(str, "ravan", "federated method", tuple(METHODS)),
        "seed": Key(
            int,
            0,
            "every random choice follows from it and is repeated with it",
            low=0,
            high=2**31 - 1,
        ),
    },
    "rounds and clients": {
        "num-rounds": Key(
            int, AUTO, "number of rounds", low=1, high=1_000_000, from_preset=True, may_change=True
        ),
        "clients-per-round": Key(
            int, AUTO, "clients that train in each round", low=1, high=1_000_000, from_preset=True
        ),
        "max-bytes": Key(
            float,
            AUTO,
            "bytes that a run may send, up and down: the last round that fits ends it; auto: the "
            "preset's, or any",
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
    },
    "how simulated clients share the data": PARTITION_KEYS,
    "training on a client": {
        "local-steps": Key(
            int,
            AUTO,
            "optimiser steps of a client in each round",
            low=1,
            high=1_000_000,
            from_preset=True,
        ),
        "local-epochs": Key(
            float,
            AUTO,
            "in place of local-steps: passes of a client over its examples in each round, so that "
            "who has more takes more steps",
            above=0,
            high=10_000,
            from_preset=True,
        ),
        "batch-size": Key(int, AUTO, "examples in each step", low=1, high=65_536, from_preset=True),
        "micro-batch-size": Key(
            int,
            AUTO,
            "examples of a step at a time, whose gradients are added up, to save memory; auto: all",
            low=1,
            high=65_536,
        ),
        "micro-batch-tokens": Key(
            int,
            AUTO,
            "tokens of a step at a time, padding included, as for micro-batch-size; auto: all",
            low=1,
            high=2**31 - 1,
        ),
        "packing": Key(
            bool,
            False,
            "lay short texts of a language model's batch side by side, with less padding",
        ),
        "batching": Key(
            str,
            "random",
            "examples of a step: drawn at random, or texts of like lengths together, with less "
            "padding",
            ("random", "length"),
        ),
        "learning-rate": Key(float, AUTO, "learning rate of the clients' Adam", above=0, high=10),
        "learning-rate-schedule": Key(
            str,
            AUTO,
            "learning rate by round: the same, or from learning-rate down to final-learning-rate",
            ("constant", "cosine"),
            from_preset=True,
        ),
        "final-learning-rate": Key(
            float,
            AUTO,
            "learning rate of the last round under a cosine; auto: the preset's, or a fiftieth of "
            "learning-rate",
            low=0,
            high=10,
            from_preset=True,
        ),
        "warm-up-rounds": Key(
            int, 0, "first rounds, in which the learning rate rises", low=0, high=1_000_000
        ),
        "weight-decay": Key(
            float, 0.0, "decay of what is trained, as AdamW's, in each step", low=0, high=1e3
        ),
        "max-gradient-norm": Key(
            float, 0.0, "norm to which a step's gradient is cut; 0: none", low=0, high=1e9
        ),
        "proximal-mu": Key(
            float, 0.0, "FedProx: strength of the pull towards the round's start", low=0, high=1e6
        ),
        "max-length": Key(int, AUTO, "tokens that are read of each text", low=1, high=1_048_576),
        "device": Key(
            str,
            AUTO,
            "where to compute; auto: a GPU if there is one",
            pattern=r"(auto|cpu|cuda|mps)(:\d+)?",
            in_words="auto, cpu, cuda, cuda:N or mps",
            of_result=False,
        ),
        "processes": Key(
            int,
            AUTO,
            "clients at work at a time in a run in process, each in a process of its own; auto: "
            "as many as there are cores for, where that pays",
            low=1,
            high=4096,
            of_result=False,
        ),
        "precision": Key(
            str,
            AUTO,
            "numbers in which training steps and evaluations are computed",
            ("float32", "bfloat16", "float16"),
            from_preset=True,
        ),
        "gradient-checkpointing": Key(
            bool,
            AUTO,
            "keep few activations and compute the others twice, to save memory",
            from_preset=True,
        ),
        "backbone-dtype": Key(
            str,
            AUTO,
            "numbers in which the frozen backbone is kept, which changes no result where the "
            "model's files have no more bits; auto: as in the files with CUDA, float32 elsewhere",
            (AUTO, "float32", "bfloat16", "float16"),
        ),
        "quantize": Key(
            str,
            AUTO,
            "bits in which bitsandbytes keeps the frozen backbone, to save memory; auto: the "
            "preset's, or none of a method that changes the backbone",
            ("none", "8bit", "4bit"),
            from_preset=True,
        ),
    },
    "adapters": {
        "targets": Key(
            str,
            AUTO,
            "layers to adapt: the ends of their names, with commas between; auto: query and value",
        ),
        "heads": Key(
            int, AUTO, "RAVAN's heads in each adapted matrix", low=1, high=4_096, from_preset=True
        ),
        "rank": Key(
            int,
            AUTO,
            "rank of an adapter, or of each head; auto: the preset's, or the largest within the "
            "parameter budget",
            low=1,
            high=65_536,
        ),
        "lora-rank": Key(
            int,
            AUTO,
            "parameter budget: as many parameters as a LoRA of this rank has",
            low=1,
            high=65_536,
        ),
        "parameter-budget": Key(
            str,
            "lower",
            "which of the preset's two parameter budgets, with its ranks and learning rates",
            ("lower", "higher"),
        ),
        "lora-scale": Key(
            float, AUTO, "scale of a LoRA's update, alpha / r", above=0, high=1e3, from_preset=True
        ),
        "init": Key(
            str,
            AUTO,
            "how RAVAN's frozen bases B and A are made",
            ("gram-schmidt", "normal", "constant", "shared-subspace", "data-aware"),
            from_preset=True,
        ),
        "init-scale": Key(
            float,
            1.0,
            "norm of the columns of RAVAN's B and the rows of its A, and of the rows of a LoRA's A",
            above=0,
            high=1e3,
        ),
        "calibration-steps": Key(
            int,
            8,
            "batches from which each client helps to make data-aware bases",
            low=1,
            high=1_000_000,
        ),
        "calibration-learning-rate": Key(
            float,
            AUTO,
            "learning rate of Fed-SB's first round; auto: the preset's for method full, or "
            "learning-rate",
            above=0,
            high=10,
        ),
        "scaling": Key(
            str, "trained", "train the scale of each head, or keep it at 1", ("trained", "constant")
        ),
        "scoring": Key(
            str,
            "random",
            "how a client with a small budget ranks the heads",
            ("random", "weight", "gradient"),
        ),
        "selection": Key(
            str,
            "layer",
            "train the best heads of each layer, or the best of all layers together",
            ("layer", "global"),
        ),
        "classifier": Key(
            str,
            AUTO,
            "keep the classifier random and frozen, or train and average it",
            ("frozen", "trained"),
            from_preset=True,
        ),
        "layer-form": Key(
            str,
            AUTO,
            "compute multi-head layers with the update merged into the weight, or beside it; auto: "
            "what is less work, and exact",
            (AUTO, "merged", "factored"),
        ),
    },
    "messages and aggregation": {
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
    },
    "privacy": {
        "privacy": Key(
            str,
            "none",
            "client: differential privacy for each client, against all who see the model",
            ("none", "client"),
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
            "noise on the sum of clipped changes, by clip-norm; auto: by epsilon",
            low=0.1,
            high=1000,
        ),
        "delta": Key(float, 1e-5, "delta that goes with epsilon", above=0, high=0.1),
        "clip-norm": Key(
            float,
            AUTO,
            "norm to which a client's change is clipped; auto: 0.1 at first, then half of the "
            "changes are within it",
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
    },
    "slow, silent and faulty clients": {
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
    },
    "what a run writes": {
        "output-dir": Key(
            str,
            AUTO,
            "folder of the run directories; auto: runs/, and ~/ravan-flwr/runs with flwr run, "
            "which takes absolute paths only",
            of_result=False,
        ),
        "resume": Key(
            str,
            "",
            "run directory to go on with; RUN@N goes back to the state after round N",
            of_result=False,
        ),
        "deliver": Key(
            bool,
            False,
            "at the end give every connected device the result, which it writes to the result-path "
            "of its node config",
            of_result=False,
        ),
        "report": Key(
            bool, True, "write a page with pictures at the end of the run", of_result=False
        ),
        "tracking": Key(
            str,
            "tensorboard",
            "where each round is logged; wandb and mlflow log to tensorboard as well",
            ("tensorboard", "wandb", "mlflow", "none"),
            of_result=False,
        ),
    },
}

KEYS: dict[str, Key] = {name: key for keys in KEYS_BY_TOPIC.values() for name, key in keys.items()}
FROM_PRESET = frozenset(name for name, key in KEYS.items() if key.from_preset)
# Runs that differ in these alone are runs of the same thing.
NOT_OF_RESULT = frozenset(name for name, key in KEYS.items() if not key.of_result)
# A run that is resumed may differ in these from what it was.
FREE_ON_RESUME = NOT_OF_RESULT | {name for name, key in KEYS.items() if key.may_change}


def check_key(name: str, value: Scalar) -> Scalar:
    """Return the value in the key's own type; ValueError for an unknown key or a wrong value."""
    if name == "num-clients":
        raise ValueError(
            f"{name} = {value!r}: it is no key of the run config, since who starts a run has the "
            "clients; expected `ravan-flwr simulate num-clients=N`, in Python "
            'simulate(settings, N), or `flwr run` with --federation-config "num-supernodes=N"'
        )
    if name not in KEYS:
        raise ValueError(
            f"unknown key {name!r}{did_you_mean(name, [*KEYS, 'num-clients'])} Expected one that "
            "`ravan-flwr simulate --help` lists; correct it"
        )
    return KEYS[name].checked(name, value)
