"""Declare the keys of a run config, each in one place: its type, default, limits and help.

A run config is what `[tool.flwr.app.config]` holds and `flwr run . -c "key=value"`
overrides: flat, kebab-case, with bool, int, float and str values. A key that is `"auto"`
takes the preset's value. Where presets have none, its help describes the value.
"""

import dataclasses
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, get_args

from ravan_flwr.config.key import AUTO, EARLIER, Key, check_choice, did_you_mean
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.budgets import BUDGETS
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar

FEW_BITS = ("8bit", "4bit")  # of a backbone that bitsandbytes quantises
# Values of `weighting` in place of a mean, and the replies that each needs to outvote a false one.
ROBUST = {"median": 3, "trimmed-mean": 3, "krum": 5, "multi-krum": 5}
KRUM = ("krum", "multi-krum")  # those that compare whole updates, so that none may lack a part


def key(default: Scalar, text: str, **options: Any) -> Any:
    """Declare a key as a field; the field's annotation gives its type."""
    return field(metadata={"key": Key(default, text, **options)})


def auto_key(text: str, **options: Any) -> Any:
    """Declare a key with default "auto"; an unset "auto" becomes None if the type allows it."""
    return key(AUTO, text, **options)


def preset_key(preset: Scalar, text: str, **options: Any) -> Any:
    """Declare a key whose default is the preset's value, or `preset` if the preset has none."""
    return key(AUTO, text, preset=preset, **options)


def _count(name: str) -> Key:
    return Key(2, name, value_type=int, low=1, high=1_000_000)


def _rate(default: float) -> Key:
    return Key(default, "learning-rate", value_type=float, above=0, high=1_000)


_ALPHA = Key(0.3, "alpha", value_type=float, above=0, high=1_000_000)
_COLUMN = Key("", "column")
_SECONDS = Key(AUTO, "seconds", value_type=float, above=0)
_WARM_UP = Key(0, "warm-up", value_type=int, low=0, high=1_000_000)
_FRACTION = r"\d{1,9}(/[1-9]\d{0,8}|\.\d{1,9})?"
_SCALE = Key(1.0, "alpha", value_type=float, above=0, high=1_000)
_BETA = Key(0.9, "beta", value_type=float, low=0, high=0.9999)
_MU = Key(0.0, "mu", value_type=float, low=0, high=1_000_000)
_OF_STEP = (
    Key(0.0, "weight-decay", value_type=float, low=0, high=1_000),
    Key(0.0, "max-norm", value_type=float, low=0, high=1_000_000_000),
)


def densities(sparsity: str) -> tuple[Fraction, Fraction]:
    """Return the densities of broadcasts and uploads in `DOWN:UP`."""
    down, up = map(Fraction, sparsity.split(":"))
    return down, up


# fmt: off
@dataclass(frozen=True)
class Config:
    """A run's settings, resolved and checked.

    The order, and the comments, are those of `--help`.
    """

    task: str
    num_clients: int | None  # of the preset or the federation; None: from the data (natural)
    local_epochs: float | None  # of local-steps=epochs:NUMBER, where local_steps is None

    # model, data and method
    preset: str = key("digits-vit", "file of conf/, or the path of a file: task, model, data, and "
        "the values of settings that are auto")
    model: ModelSpec = auto_key(  # noqa: RUF009 (it makes a field)
        "model in place of the preset's: an id of the Hugging Face Hub, id@revision, a folder, or "
        "the name of another model in the preset, such as small")
    data: DataSpec = auto_key(  # noqa: RUF009
        "data set in place of the preset's, with the same columns: an id of the hub, or a folder")
    glue_task: str = auto_key("task of preset glue-llama; auto: sst2",
        choices=("mnli", "qnli", "qqp", "sst2", "rte"))
    method: str = key("ravan", "federated method", choices=tuple(METHODS))
    seed: int = key(0, "seed of every random choice", low=0, high=2**31 - 1)

    # rounds and clients
    num_rounds: int = preset_key(20, "number of rounds", low=1, high=1_000_000, may_change=True)
    clients_per_round: int = preset_key(3, "clients that train in each round", low=1,
        high=1_000_000)
    max_bytes: float | None = preset_key(AUTO, "limit on the bytes that a run's rounds send, up "
        "and down: the run ends with the last round that fits; deliver=true sends more "
        "afterwards; auto: the preset's, or no limit", above=0, may_change=True)
    until_metric: float = key(0.0, "end the run with the round whose evaluation reaches this value "
        "of the task's metric: at least, or at most for a perplexity; 0: never",
        low=0, may_change=True)
    until_time: float = key(0.0, "end the run with the first round that ends at least this many "
        "seconds after the run's start; 0: never", low=0, may_change=True)
    devices: str | None = auto_key("simulate the time that clients take, in a run in process: on "
        "devices of a profile (uniform, phones, edge-gpus), or of a YAML file; auto: real time")
    budgets: str = key("full", "distribution of the clients' budget fractions: how much of the "
        "adapters each can train; by-speed: as much as a simulated device can do in SECONDS, or in "
        "the median time of all", variants=dict.fromkeys(BUDGETS, ()) | {"by-speed": (_SECONDS,)})
    aggregation: str = key("sync", "when the server updates the state: sync: after the replies of "
        "a round's clients; async: after buffer-size updates, while concurrency clients train",
        choices=("sync", "async"))
    buffer_size: int | None = auto_key("updates that close an asynchronous round; auto: "
        "clients-per-round", low=1, high=1_000_000)
    concurrency: int | None = auto_key("clients that train at a time in an asynchronous run; auto: "
        "clients-per-round", low=1, high=1_000_000)
    max_staleness: int | None = auto_key("reject an update from a state that is more versions old; "
        "auto: no limit", low=0, high=1_000_000)
    eval_every: int = preset_key(1, "number of rounds from one evaluation to the next", low=1,
        high=1_000_000, may_change=True)
    evaluate_on: str = auto_key("examples to evaluate on: the server's test examples, or the "
        "clients' validation splits; auto: the clients' where each has a model of its own (such as "
        "local), else the server's", choices=(AUTO, "server", "clients"))
    validation_share: float = auto_key("fraction of its examples that is each client's validation "
        "split; auto: 0.2 where clients evaluate, else 0", low=0, high=0.9)

    # how simulated clients partition the data
    partition: str = preset_key("dirichlet-by-client:0.3", "how clients partition the data: "
        "alike, with different class proportions (the smaller ALPHA, the more they differ), "
        "one client for each value of a column, or with few classes or shards of sorted examples "
        "each; COLUMN: the column by which they differ, in place of the preset's",
        variants={
            "iid": (), "dirichlet": (_ALPHA, _COLUMN), "dirichlet-by-client": (_ALPHA, _COLUMN),
            "natural": (_COLUMN,), "pathological": (_count("classes"), _COLUMN),
            "shards": (_count("shards"), _COLUMN),
        })

    # training on a client
    local_steps: int | None = preset_key(50, "optimiser steps of a client in each round, or passes "
        "over its examples, so that more examples mean more steps", low=1, high=1_000_000,
        variants={"epochs": (Key(1.0, "number", value_type=float, above=0, high=10_000),)})
    batch_size: int = preset_key(32, "examples in each step", low=1, high=65_536)
    micro_batch_size: int | None = auto_key("examples of a step that are computed at a time "
        "(gradient accumulation), to save memory; auto: all", low=1, high=65_536)
    batching: str = key("random", "examples of a step: drawn at random, texts of similar lengths "
        "together, or several short texts of a language model in one row; the last two need less "
        "padding", choices=("random", "length", "packed"))
    learning_rate: float = auto_key("learning rate of the clients", above=0, high=10)
    learning_rate_schedule: str = preset_key("constant", "learning rate by round: the same, or "
        "from learning-rate down to END, by default a fiftieth of it; it rises in the first "
        "WARM-UP rounds", variants={"constant": (_WARM_UP,), "cosine": (
            Key(AUTO, "end", value_type=float, low=0, high=10), _WARM_UP)})
    optimizer: str = key("adam", "clients' optimiser: Adam, by default without the weight decay of "
        "AdamW and without a norm to which gradients are clipped; FedProx pulls the parameters "
        "towards the round's start with strength MU as well, 0 if it is left out",
        variants={"adam": _OF_STEP, "fedprox": (_MU, *_OF_STEP)})
    max_length: int = auto_key("tokens that are read of each text", low=1, high=1_048_576)
    device: str = auto_key("where to compute; auto: a GPU if there is one",
        pattern=r"(auto|cpu|cuda|mps)(:\d+)?", in_words="auto, cpu, cuda, cuda:N or mps",
        of_result=False)
    processes: int | None = auto_key("clients that train at a time in a run in process, each in a "
        "process of its own; auto: as many as there are cores for, where that saves time", low=1,
        high=4_096, of_result=False)
    clients_per_pass: int | None = auto_key("clients that a run in process trains at a time as "
        "one batch; auto: as many as keep a GPU busy, one on a CPU", low=1, high=4_096,
        of_result=False)
    cuda_graphs: str = key("auto", "auto: capture a training step on a GPU once, and replay it "
        "where that is quicker", choices=("auto", "off"), of_result=False)
    precision: str = preset_key("float32", "floating-point type of training steps and evaluations",
        choices=("float32", "bfloat16", "float16"))
    float32_matmul: str = key("highest", "matrix products of float32 on a GPU; tf32 rounds their "
        "factors to 10 bits, which is several times as fast", choices=("highest", "tf32"))
    gradient_checkpointing: bool = preset_key(False, "keep few activations and compute the others "
        "twice, to save memory")
    backbone_dtype: str = preset_key(AUTO, "type of the frozen backbone's numbers: 16 bits change "
        "no result if the model's files have no more; 8bit and 4bit, by bitsandbytes, save memory; "
        "auto: the preset's unless the method changes the backbone, or as in the files with CUDA, "
        "float32 elsewhere",
        choices=(AUTO, "float32", "bfloat16", "float16", *FEW_BITS))

    # adapters
    targets: str = auto_key("layers to adapt: the ends of their names, with commas between; auto: "
        "query and value projections, or all linear layers where none are found")
    heads: int = preset_key(4, "RAVAN's heads in each adapted matrix", low=1, high=4_096)
    rank: int | None = auto_key("rank of an adapter, or of each head; auto: the preset's, or the "
        "largest within the parameter budget", low=1, high=65_536)
    lora_rank: int = auto_key("parameter budget: as many parameters as a LoRA of this rank has; "
        "lower and higher: the preset's, with its ranks and learning rates; auto: lower",
        low=1, high=65_536, choices=("lower", "higher"))
    lora_scale: float | str = preset_key(1.0, "scale of a LoRA's update, alpha / r; sqrt-clients: "
        "ALPHA sqrt(clients-per-round / r), by default with ALPHA 1 (SFed-LoRA)", above=0,
        high=1_000, variants={"sqrt-clients": (_SCALE,)})
    init: str = preset_key("gram-schmidt", "initialisation of RAVAN's frozen bases B and A; STEPS: "
        "number of each client's batches for data-aware bases, by default 8", variants={
            "gram-schmidt": (), "normal": (), "constant": (), "shared-subspace": (),
            "data-aware": (Key(AUTO, "steps", value_type=int, low=1, high=1_000_000),),
            "first-round": (),
        })
    calibration_learning_rate: float = auto_key("learning rate of a calibration round that "
        "trains pretrained weights; auto: the preset's for method full, or 0.0001",
        above=0, high=10)
    scaling: str = key("trained", "train the scale of each head, or keep it at 1",
        choices=("trained", "constant"))
    scoring: str = key("random", "how a client with a small budget fraction ranks the heads",
        choices=("random", "weight", "gradient"))
    selection: str = key("layer", "train the best heads of each layer, or the best of all layers "
        "together", choices=("layer", "global"))
    head_mean: str = key("trained", "average a head over the clients that trained it, or over all "
        "clients of the round, with the unchanged head of the others",
        choices=("trained", "all"))
    classifier: str = preset_key("trained", "keep the classifier random and frozen, or train and "
        "average it", choices=("frozen", "trained"))

    # messages and aggregation
    wire: str = key("float32", "format of the numbers that travel, both ways",
        choices=("float32", "float16", "bfloat16", "int8"))
    sparsity: str = key("1:1", "densities down and up: the fractions of the numbers that travel, "
        "those of largest magnitude, with their places (FLASC); clients train all numbers",
        pattern=f"{_FRACTION}:{_FRACTION}",
        in_words="DOWN:UP, each above 0 and at most 1, such as 1/4:1/16")
    weighting: str = key("uniform", "how replies are combined: a mean with equal weights, or with "
        "weights by numbers of examples; against a few false replies, a median or a trimmed mean "
        "of each number, or the replies that are closest to the others (one: krum; a mean of "
        "several: multi-krum)",
        choices=("uniform", "examples", *ROBUST))
    server_optimizer: str = key("none", "server's optimiser of the mean update: FedAvgM is "
        "momentum (by default 1:0.9), FedAdam is adam (0.01:0.9)",
        variants={"none": (), "momentum": (_rate(1.0), _BETA), "adam": (_rate(0.01), _BETA)})

    # privacy
    privacy: str = key("none", "client: differential privacy for each client, against all who see "
        "the model; example: for each example of a client, against the server as well",
        choices=("none", "client", "example"))
    epsilon: float | None = auto_key("privacy budget: the run ends when it is spent; without "
        "noise-multiplier the noise follows from it; auto: no limit", above=0, high=10_000)
    noise_multiplier: float | None = auto_key("noise on the sum of clipped changes, or of clipped "
        "gradients, divided by clip-norm; auto: from epsilon", low=0.1, high=1_000)
    delta: float = key(1e-5, "delta that belongs to epsilon", low=1e-12, high=0.1)
    clip_norm: float | None = auto_key("norm to which a client's change, or an example's gradient, "
        "is clipped; auto: for changes 0.1 at first, then their median norm; for gradients 1",
        above=0, high=1_000_000)
    noise_cohort: int | None = auto_key("for studies only: the noise of a round with this many "
        "clients, of which fewer are simulated; auto: the real number", low=1, high=100_000_000)
    secure_aggregation: bool = key(False, "clients mask what they upload, and the server sees only "
        "sums; devices need secure-keys")
    secure_minimum: int = key(4, "smallest number of clients in a sum; a head with fewer clients "
        "in a round is not trained", low=3, high=256)

    # slow, unresponsive and faulty clients
    round_timeout: float = key(3600.0, "seconds to wait for the replies of a round", above=0,
        of_result=False)
    straggler_grace: float | None = auto_key("seconds that a round stays open after min-replies "
        "valid replies, in a synchronous run; auto: after half of the replies, ten times as long "
        "as they took, at least 60", low=0, may_change=True)
    over_sample: float = key(1.0, "ask this multiple of clients-per-round, and use the first "
        "clients-per-round replies", low=1, high=10)
    min_replies: int = key(1, "stop the run when a round has fewer valid replies", low=1,
        high=1_000_000, may_change=True, is_limit=True)
    max_update_norm: float | None = auto_key("reject a reply whose change has a larger norm; auto: "
        "what learning-rate and local-steps allow", above=0, may_change=True, is_limit=True)
    max_share: float = key(1.0, "largest budget fraction that a client is granted",
        above=0, high=1, may_change=True, is_limit=True)
    max_examples: int | None = auto_key("limit on the weight, in examples, of a device's own data; "
        "auto: ten times the median", low=1, high=2**48, is_limit=True)

    # what a run writes
    output_dir: str = auto_key("folder of the run directories; auto: runs/, and ~/ravan-flwr/runs "
        "with flwr run, which takes absolute paths only", of_result=False)
    resume: str = key("", "run directory to continue; RUN@N goes back to the state after round N",
        of_result=False)
    deliver: bool = key(False, "at the end send every connected device the result, which it writes "
        "to the result-path of its node config", of_result=False)
    tracking: str = key("tensorboard", "where each round is logged; wandb and mlflow log to "
        "tensorboard too; none: nowhere, and no page with pictures is written at the end",
        choices=("tensorboard", "wandb", "mlflow", "none"), of_result=False)

    # fmt: on

    def parse(self, key: str) -> dict[str, Any]:
        """Return the parameters of a setting such as `dirichlet:0.3`; its first word is ""."""
        return KEYS[key].parse(key, getattr(self, key.replace("-", "_")))

    @property
    def densities(self) -> tuple[Fraction, Fraction]:
        """Return the densities of broadcasts and uploads."""
        return densities(self.sparsity)

    @property
    def packing(self) -> bool:
        """Return whether several short texts share a row."""
        return self.batching == "packed"

    @property
    def quantize(self) -> str:
        """Return the backbone's quantisation: "8bit", "4bit" or "none"."""
        return self.backbone_dtype if self.backbone_dtype in FEW_BITS else "none"

    @property
    def release(self) -> str:
        """Return how updates become the next state: "mean", "masked", or that of `privacy`."""
        if self.secure_aggregation:
            return "masked"
        return "mean" if self.privacy == "none" else self.privacy

    @property
    def robust(self) -> str:
        """Return the robust estimator in place of a mean, or "none"."""
        return self.weighting if self.weighting in ROBUST else "none"

    @property
    def weight_decay(self) -> float:
        """Return the weight decay of a client's steps."""
        return float(self.parse("optimizer")["weight-decay"])

    @property
    def max_gradient_norm(self) -> float:
        """Return the norm to which a step's gradient is clipped, 0 for none."""
        return float(self.parse("optimizer")["max-norm"])

    @property
    def proximal_mu(self) -> float:
        """Return the strength of FedProx's pull towards the round's start."""
        return float(self.parse("optimizer").get("mu", 0.0))

    @property
    def calibration_steps(self) -> int:
        """Return the number of each client's batches for data-aware bases."""
        steps = self.parse("init").get("steps", AUTO)
        return 8 if steps == AUTO else int(steps)

    @property
    def partition_scheme(self) -> str:
        """Return the first word of `partition`."""
        return self.partition.partition(":")[0]

    def count_steps(self, examples: int) -> int:
        """Return the optimiser steps per round of a client with this number of examples.

        A short last batch of a pass is also a step. A fraction of a pass is rounded up to whole
        batches.
        """
        if self.local_steps is not None:
            return self.local_steps
        batches = -(-examples // self.batch_size)
        # In floating point 0.1 x 30 is slightly more than 3.
        return max(1, math.ceil((self.local_epochs or 1.0) * batches - 1e-6))

    def num_asked(self, clients: int) -> int:
        """Return how many of the clients a round asks to train, over-sampled clients included."""
        number = min(self.clients_per_round, clients)
        # In floating point 1.1 x 10 is slightly more than 11.
        return min(number + math.ceil(number * (self.over_sample - 1) - 1e-9), clients)

    def num_replies(self, clients: int) -> int:
        """Return the most updates of a round: of the clients that it asks, or of its buffer."""
        if self.aggregation == "async":
            return min(self.buffer_size or self.clients_per_round, clients)
        return self.num_asked(clients)

    def max_concurrent(self, clients: int) -> int:
        """Return how many of the clients can work at the same time."""
        if self.aggregation == "async":
            return min(self.concurrency or self.clients_per_round, clients)
        return clients if self.evaluate_on == "clients" else self.num_asked(clients)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`: plain JSON under the keys of the run config."""
        plain: dict[str, Any] = json.loads(json.dumps(kebab(dataclasses.asdict(self))))
        return plain


def kebab(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with fields' names in kebab-case, in nested mappings too."""
    return {
        name.replace("_", "-"): kebab(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }


def read_keys(fields: type[Any]) -> dict[str, Key]:
    """Return the keys that a dataclass declares, each with the type of its field."""
    return {
        field.name.replace("_", "-"): dataclasses.replace(
            field.metadata["key"], value_type=_value_type(field.type)
        )
        for field in dataclasses.fields(fields)
        if "key" in field.metadata
    }


def _value_type(annotation: Any) -> Any:
    """Return the type of a key's value; a field such as `ModelSpec` is set by a text."""
    value_type = next(iter(get_args(annotation)), annotation)
    return value_type if value_type in (bool, int, float) else str


_FIELDS = read_keys(Config)
# The server operator's limits: parts of one key.
LIMITS = {name: spec for name, spec in _FIELDS.items() if spec.is_limit}
_LIMITS_KEY = Key(
    "",
    "limits that the server's operator sets. "
    + "; ".join(f"{name}: {spec.help} ({spec.allowed})" for name, spec in LIMITS.items()),
    in_words="NAME=NUMBER, with commas between",
    may_change=True,
)
KEYS = {
    "limits" if spec.is_limit else name: _LIMITS_KEY if spec.is_limit else spec
    for name, spec in _FIELDS.items()
}
# A run's settings where neither the user nor the preset sets them.
RUN: dict[str, Scalar] = {"num-clients": 10} | {
    name: spec.preset for name, spec in KEYS.items() if spec.preset is not None
}
# Keys that do not affect the result: runs that differ only in these count as the same.
NOT_OF_RESULT = frozenset(name for name, spec in KEYS.items() if not spec.of_result)
# Keys that may change when a run is resumed.
FREE_ON_RESUME = NOT_OF_RESULT | {
    name for name, spec in (_FIELDS | KEYS).items() if spec.may_change
}

# Keys of several values: a text with commas between, or a list in a YAML file.
SEVERAL = ("targets", "limits")

# First key of a topic -> the topic.
TOPICS = {
    "preset": "model, data and method", "num-rounds": "rounds and clients",
    "partition": "how simulated clients partition the data", "local-steps": "training on a client",
    "targets": "adapters", "wire": "messages and aggregation", "privacy": "privacy",
    "round-timeout": "slow, unresponsive and faulty clients", "output-dir": "what a run writes",
}  # fmt: skip

def check_key(name: str, value: Scalar) -> Scalar:
    """Return the value in the key's type; raise ValueError for an unknown key or a wrong value."""
    if name == "num-clients":
        raise ValueError(
            f"{name} = {value!r}: it is no key of the run config, since the federation sets the "
            "number; expected `ravan-flwr simulate num-clients=N`, in Python "
            'simulate(settings, N), or `flwr run` with --federation-config "num-supernodes=N"'
        )
    if name in LIMITS:
        raise ValueError(
            f"unknown key {name!r}: it is a limit; write limits={name}={value}"
        )
    if name in EARLIER:
        raise ValueError(f"unknown key {name!r}: it is now {EARLIER[name]}, say; write that")
    if name not in KEYS:
        names = [*KEYS, "num-clients", *LIMITS]
        raise ValueError(
            f"unknown key {name!r}{did_you_mean(name, names)} Expected one that "
            "`ravan-flwr simulate --help` lists"
        )
    value = KEYS[name].checked(name, value)
    if name == "limits":
        read_limits(str(value))
    return value


def check_num_clients(number: object) -> int:
    """Return a number of clients; raise ValueError unless it is a whole number above 0."""
    if type(number) is not int or number < 1:
        problem = "expected a whole number at least 1, such as 20"
        raise ValueError(f"num-clients = {number!r}: {problem}")
    return number


def read_limits(text: str) -> dict[str, Scalar]:
    """Return the limits in `NAME=NUMBER,NAME=NUMBER` by name."""
    read: dict[str, Scalar] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        name, _, number = word.partition("=")
        check_choice("limits:", name, LIMITS)
        if name in read:
            raise ValueError(f"limits = {text!r}: got {name} twice, expected once; leave one out")
        read[name] = LIMITS[name].checked(name, LIMITS[name].typed(number))
    return read


def as_key_values(settings: Mapping[str, Scalar]) -> list[str]:
    """Return settings as KEY=VALUE words, which `read_settings` reads."""
    return [f"{key}={as_typed(value)}" for key, value in settings.items()]


def as_typed(value: object) -> object:
    """Return a setting as a user types it."""
    if isinstance(value, bool):
        return str(value).lower()
    return AUTO if value is None else value


def key_table() -> str:
    """Return the table of all keys by topic, with their defaults and allowed values."""
    lines = [
        "Keys and defaults. auto: the preset's value, unless the key describes another.",
        "",
        *_row("num-clients", AUTO, "clients of the simulation (a whole number at least 1)"),
    ]
    for name, key in KEYS.items():
        if name in TOPICS:
            lines += ["", f"{TOPICS[name]}:"]
        description = key.help if key.allowed == "a text" else f"{key.help} ({key.allowed})"
        lines += _row(name, str(as_typed(key.default)) or "(none)", description)
    return "\n".join(lines)


def _row(name: str, default: str, description: str) -> list[str]:
    """Return a key's lines in the layout of argparse, in 80 columns."""
    head, indent = f"  {name}={default}", " " * 24
    lines = textwrap.wrap(
        description, 80, initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False,  # names of keys and of choices stay whole
    )  # fmt: skip
    return [head, *lines] if len(head) > 22 else [head + lines[0][len(head) :], *lines[1:]]


def read_settings(settings: Sequence[str]) -> tuple[dict[str, Scalar], int | None]:
    """Return (run config, num-clients) from KEY=VALUE words; only the values' form is checked."""
    config: dict[str, Scalar] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(
                f"got {setting!r}, expected KEY=VALUE, such as seed=1, without spaces"
            )
        if not text:
            raise ValueError(
                f"{key} = '': got nothing, expected a value; is a shell variable empty? Leave the "
                "key out for its default"
            )
        value = _value(key, text)
        if key in config:
            raise ValueError(
                f"{key}: got it twice, as {config[key]!r} and {value!r}, expected each key "
                "once; leave one out"
            )
        config[key] = value
    num_clients = config.pop("num-clients", None)
    return config, None if num_clients is None else check_num_clients(num_clients)


def _value(key: str, text: str) -> Scalar:
    """Return a text as the type of its key: a folder may be called 2024."""
    unknown = Key("", "", value_type=int)  # it may have a number
    value = KEYS.get(key, unknown).typed(text)
    if not isinstance(value, str):
        return value
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text
