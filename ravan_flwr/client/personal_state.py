"""Keep a client's own part of the model in its node's state, from one round to the next.

Flower keeps a node's state for one run, and forgets it when the node is started again. What is
read from it is checked as what comes from elsewhere is: a part of another run, of other shapes, or
with numbers that are not finite, counts as lost.
"""

import hashlib
import json
from logging import getLogger

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from ravan_flwr.config.keys import FREE_ON_RESUME
from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.methods.base import Tensors
from ravan_flwr.training.adapted_model import AdaptedModel

log = getLogger(__name__)

OWN = "own-part"  # the record with the tensors
OWN_OF = "own-part-of"  # the record that says which run's they are


def run_mark(config: Config, run_id: int) -> str:
    """Name a run by its number and by the settings that its result follows from."""
    settings = {k: v for k, v in config.as_dict().items() if k not in FREE_ON_RESUME}
    text = json.dumps([run_id, settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep_own(state: RecordDict, own: Tensors, mark: str) -> None:
    """Put the part into a node's state, in place of the one before."""
    state[OWN] = to_record(own)
    state[OWN_OF] = ConfigRecord({"run": mark})


def own_tensors(state: RecordDict) -> Tensors | None:
    """Read the tensors of the part, as they are; None if there is none."""
    arrays = state.get(OWN)
    return from_record(arrays) if isinstance(arrays, ArrayRecord) else None


def find_own(state: RecordDict, model: AdaptedModel, mark: str) -> Tensors | None:
    """Find the part that the client has of this run; None if it has none that can be used."""
    try:
        own = own_tensors(state)
        if own is None:
            return None
        named = state.get(OWN_OF)
        found = named.get("run") if isinstance(named, ConfigRecord) else None
        if found != mark:
            raise ValueError(f"it is of run {found!r}, expected {mark!r}")
        model.check_own(own)
    except ValueError as error:
        log.warning("this client's own part of the model is of no use, it begins anew: %s", error)
        return None
    return own
