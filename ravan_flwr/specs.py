"""Define plain values for all rooms: what a setting holds, where a model and data come from."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Scalar: TypeAlias = bool | int | float | str

# Set in the environment by who has said how many nodes there are to be: no advice on it then.
NODES_CHOSEN = "RAVAN_FLWR_NODES_CHOSEN"
# By these a user sets how many threads a process computes with.
THREAD_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ModelSpec:
    """Say where the backbone comes from."""

    source: Literal["bundled", "hub"]  # a file of training/backbones; an id, or a folder
    name: str
    revision: str = ""
    # What its config.json says of its shape: a plan needs no more, and so no hub.
    shape: tuple[tuple[str, Scalar], ...] = ()
    targets: tuple[str, ...] = ()  # ends of the names of the layers to adapt; none: the table's


@dataclass(frozen=True)
class DataSpec:
    """Say where the examples come from, and what each of their columns is for."""

    source: Literal["sklearn-digits", "hub"]  # the latter: an id of the hub, or a folder
    name: str = ""
    subset: str = ""
    revision: str = ""
    train: str = "train"  # the split that clients share
    tests: tuple[tuple[str, str], ...] = (("test", "test"),)  # name -> split, of the server
    test_share: float = 0.2  # of `train` that is held back where there is no split `test`
    columns: tuple[tuple[str, str], ...] = ()  # role -> column
    partition_by: str = "label"  # the role or column that a Dirichlet partition makes uneven
    labels: tuple[str, ...] = ()  # the classes, in the order of their numbers; none: see `settled`
    prompt: str = ""  # what a text-to-text model is given, with {column roles} in it
    target_length: int = 0  # tokens of an answer
    # Of a language model: what is written before an answer (the first of which all columns have
    # text), its tokenizer's chat template in place of its own, what is done with texts that are too
    # long, and which tokens are learned.
    prompts: tuple[str, ...] = ()
    chat_template: str = ""
    overlong: str = "cut"  # or "drop"
    loss_on: str = "answers"  # or "all"

    @property
    def settled(self) -> bool:
        """Tell whether the labels are known, which else the examples tell."""
        return bool(self.labels) or not self.column("label")

    def column(self, role: str) -> str:
        """Return the column for a role, "" if there is none."""
        return dict(self.columns).get(role, "")


# By the form of an export, the folder of a run's directory, or of a device, that holds it.
RESULT_FOLDERS = {"peft": "adapter", "merged": "merged"}
