"""Define plain types for all subpackages: values of settings, sources of models and data."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Scalar: TypeAlias = bool | int | float | str

MAX_MASKED_CLIENTS = 256  # of a secure round: a sum of 256 numbers of 16 bits has 24 bits

# Environment variables for a process's number of compute threads.
THREAD_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class ModelSpec:
    """The source of the backbone."""

    source: Literal["bundled", "hub"]  # a file of training/backbones; an id, or a folder
    name: str
    revision: str = ""
    # The part of its config.json that sets its shape. A plan needs only this, and so no hub.
    shape: tuple[tuple[str, Scalar], ...] = ()
    targets: tuple[str, ...] = ()  # suffixes of layers to adapt; empty: the architecture's default


@dataclass(frozen=True)
class DataSpec:
    """The source of the examples, and the role of each of their columns."""

    source: Literal["sklearn-digits", "hub"]  # hub: an id of the hub, or a folder
    name: str = ""
    subset: str = ""
    revision: str = ""
    train: str = "train"  # the split that is partitioned among clients
    tests: tuple[tuple[str, str], ...] = (("test", "test"),)  # name -> split, of the server
    test_share: float = 0.2  # fraction of `train` to test on where there is no split `test`
    columns: tuple[tuple[str, str], ...] = ()  # role -> column
    partition_by: str = "label"  # the role or column that a Dirichlet partition makes uneven
    labels: tuple[str, ...] = ()  # the classes, by number; empty: see `labels_known`
    prompt: str = ""  # what a text-to-text model is given, with {column roles} in it
    target_length: int = 0  # tokens of an answer
    # For a language model: the prompts before an answer (the first whose columns all have text
    # is used), a chat template in place of the tokenizer's, the treatment of texts that are too
    # long, and the tokens of the loss.
    prompts: tuple[str, ...] = ()
    chat_template: str = ""
    overlong: str = "cut"  # or "drop"
    loss_on: str = "answers"  # or "all"
    beta: float = 0.0  # of DPO, how strongly it holds the model to the pretrained one; 0: 0.1

    @property
    def labels_known(self) -> bool:
        """Return whether the labels are known; otherwise they are read from the examples."""
        return bool(self.labels) or not self.column("label")

    def column(self, role: str) -> str:
        """Return the column for a role, "" if there is none."""
        return dict(self.columns).get(role, "")


def join_list(value: Any) -> Any:
    """Return a list of texts as one text with commas between, any other value unchanged."""
    is_list = isinstance(value, list) and all(isinstance(part, str) for part in value)
    return ",".join(value) if is_list else value


def read_targets(text: str) -> tuple[str, ...]:
    """Return the suffixes of layers' names in a text with commas."""
    suffixes = tuple(suffix.strip() for suffix in text.split(","))
    if not all(suffixes):
        raise ValueError(
            f"targets = {text!r}: expected ends of layers' names with commas between them, such as "
            "q_proj,v_proj"
        )
    return suffixes


EXPORT_FORMS = ("peft", "ravan", "merged")
# Form of an export -> its folder, in a run's directory or on a device.
RESULT_FOLDERS = {"peft": "adapter", "merged": "merged"}
