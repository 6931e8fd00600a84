"""List the keys of a run config.

A run config is what `[tool.flwr.app.config]` holds and `flwr run . -c "key=value"`
overrides: flat, kebab-case, with bool, int, float and str values. A key that is `"auto"`
takes the preset's value, or where presets have none what its help says.
"""

from ravan_flwr.config.adapter_keys import ADAPTERS
from ravan_flwr.config.key import AUTO, Key, check_choice, did_you_mean
from ravan_flwr.config.partition_keys import PARTITION_KEYS
from ravan_flwr.config.round_keys import AGGREGATION, FAULTS, PRIVACY, ROUNDS, SECURE
from ravan_flwr.config.training_keys import TRAINING
from ravan_flwr.methods import METHODS
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
    "rounds and clients": ROUNDS,
    "how simulated clients share the data": PARTITION_KEYS,
    "training on a client": TRAINING,
    "adapters": ADAPTERS,
    "messages and aggregation": AGGREGATION,
    "privacy": PRIVACY | SECURE,
    "slow, silent and faulty clients": FAULTS,
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

# What other programs call a key, where its spelling does not lead to it.
_ELSEWHERE = {
    "lr": "learning-rate",
    "eta": "learning-rate",
    "client-lr": "learning-rate",
    "server-lr": "server-learning-rate",
    "lr-scheduler": "learning-rate-schedule",
    "wd": "weight-decay",
    "bs": "batch-size",
    "epochs": "local-epochs",
    "num-epochs": "local-epochs",
    "max-steps": "local-steps",
    "num-server-rounds": "num-rounds",
    "fraction-fit": "clients-per-round",
    "fraction-train": "clients-per-round",
    "num-supernodes": "num-clients",
    "alpha": "partition-alpha",
    "mu": "proximal-mu",
    "r": "rank",
    "lora-r": "lora-rank",
    "lora-alpha": "lora-scale",
    "target-modules": "targets",
    "num-heads": "heads",
    "max-seq-length": "max-length",
    "optimizer": "server-optimizer",
    "max-grad-norm": "max-gradient-norm",
    "dtype": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "gpu": "device",
    "cuda": "device",
    "dataset": "data",
    "strategy": "method",
    "algorithm": "method",
    "sigma": "noise-multiplier",
    "dp": "privacy",
    "secagg": "secure-aggregation",
    "compression": "wire",
    "clients": "num-clients",
    "dirichlet-alpha": "partition-alpha",
    "head": "heads",
    "num-workers": "processes",
    "wandb": "tracking",
    "out": "output-dir",
    "dropout": "",  # there is none
    "lora-dropout": "",
}


def check_key(name: str, value: Scalar) -> Scalar:
    """Return the value in the key's own type; ValueError for an unknown key or a wrong value."""
    if name == "num-clients":
        raise ValueError(
            f"{name} = {value!r}: it is no key of the run config, since who starts a run has the "
            "clients; expected `ravan-flwr simulate num-clients=N`, in Python "
            'simulate(settings, N), or `flwr run` with --federation-config "num-supernodes=N"'
        )
    if name not in KEYS:
        known, meant = [*KEYS, "num-clients"], _ELSEWHERE.get(name.lower().replace("_", "-"), name)
        raise ValueError(
            f"unknown key {name!r}{did_you_mean(meant, known)} Expected one that "
            "`ravan-flwr simulate --help` lists; correct it"
        )
    return KEYS[name].checked(name, value)
