"""Describe a result that is delivered to nodes, check it on a node, and check the node's answer.

The tensors travel in the same message. A node writes to a folder that is named after the run, so
the node checks this name itself.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ravan_flwr.messages.plain_text import plain, read_fields, shown
from ravan_flwr.methods.tensors import check_names, checksum, sum_of_squares
from ravan_flwr.specs import RESULT_FOLDERS

MAX_CHARACTERS = 1 << 20  # of a summary
# A folder's name on any system: no separator, no dot or space at an end, not hidden.
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._+=@-]{0,148}[A-Za-z0-9_+=@-])?")
_DIGEST = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Parcel:
    """A description of a run's result. The fields travel under the same names with hyphens."""

    run: str  # the name of the run's directory
    run_id: str  # unique, unlike the name
    last_round: int
    checksum: str  # of the state's tensors
    summary: str  # the run's `summary.json`

    def as_config(self) -> dict[str, str | int]:
        """Return the values of the message's ConfigRecord; `read_parcel` is the inverse."""
        return {name.replace("_", "-"): value for name, value in asdict(self).items()}

    @property
    def run_summary(self) -> dict[str, Any]:
        """Return the run's summary, which a model card shows."""
        content: dict[str, Any] = json.loads(self.summary)
        return content


def check_run_name(name: str) -> str:
    """Return a run's name; raise ValueError unless every device can have a folder of that name."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the run's name is {shown(name)}, expected letters, digits, spaces and ._+=@- alone, "
            "at most 150, with a letter or digit first: a device makes a folder of that name; "
            "rename the run directory"
        )
    return name


def read_parcel(config: Mapping[str, Any]) -> Parcel:
    """Return the parcel in an untrusted message; raise ValueError if it is malformed."""
    parcel = Parcel(**read_fields(Parcel, config))
    check_run_name(parcel.run)
    for key, digest in (("run-id", parcel.run_id), ("checksum", parcel.checksum)):
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{key} is {shown(digest)}, expected 16 hexadecimal digits")
    if parcel.last_round < 0:
        raise ValueError(f"last-round is {parcel.last_round}, expected a number from 0")
    if len(parcel.summary) > MAX_CHARACTERS:
        raise ValueError(f"summary has {len(parcel.summary)} characters, expected fewer")
    if not isinstance(json.loads(parcel.summary), dict):
        raise ValueError("summary is no JSON object, expected that of a run")
    return parcel


def check_state(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], digest: str) -> None:
    """Raise ValueError unless tensors have the expected names, finite numbers and the checksum.

    Shapes and dtypes are checked where a method loads them: FedEx-LoRA's residual grows.
    """
    check_names(tensors, list(expected))
    for name, tensor in tensors.items():
        sum_of_squares(tensor, name)
    if (actual := checksum(tensors)) != digest:
        raise ValueError(f"the state has checksum {actual}, expected {digest}: it was damaged")


def confirmation(parcel: Parcel, folder: str) -> dict[str, Any]:
    """Return the answer of a node that has written the result to a folder of that name."""
    return {"kept": True, "folder": folder, "checksum": parcel.checksum}


def refusal(reason: str) -> dict[str, Any]:
    """Return the answer of a node that could not keep the result."""
    return {"kept": False, "reason": plain(reason)}


def read_answer(answer: Mapping[str, Any], parcel: Parcel) -> str:
    """Return the folder that a node wrote; raise ValueError, with its reason, if it wrote none."""
    folder, reason = answer.get("folder"), answer.get("reason")
    if answer.get("kept") is False:
        raise ValueError((plain(reason) if isinstance(reason, str) else "") or "no reason given")
    if answer.get("kept") is not True or folder not in RESULT_FOLDERS.values():
        raise ValueError(
            f"its answer is kept = {shown(answer.get('kept'))}, folder = {shown(folder)}, expected "
            f"true and one of {', '.join(RESULT_FOLDERS.values())}"
        )
    if answer.get("checksum") != parcel.checksum:
        raise ValueError(
            f"it reports checksum {shown(answer.get('checksum'))}, expected {parcel.checksum}"
        )
    return str(folder)
