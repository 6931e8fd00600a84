"""Keep a part of the model with its client, from one round to the next.

    server                                  client
    broadcast(state, share)  ------------>  load(adapters, tensors)
                                            put(adapters, its own part)    if it has one
                                            ... local steps ...
                                            collect(adapters) -> its own part, which stays
    check(upload, share)     <------------  upload(adapters)

A method with a `personal` part has no one result: what a client predicts with is the server's
state and that client's part together. A client without one, in its first round or after it was
lost, begins with what `load` left. A trained classifier stays with the part. FedSA-LoRA
(fedsa_lora.py) keeps B so, and `local` (local.py) everything.

No other method, and nothing on the server, sees any of this.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic

from torch import Tensor

from ravan_flwr.methods.calibration import Adapter
from ravan_flwr.methods.tensors import Tensors


class Personal(ABC, Generic[Adapter]):
    """Describe what of a method's adapters stays with each client."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name the float32 tensors that stay, with their shapes."""

    @abstractmethod
    def collect(self, adapters: Sequence[Adapter]) -> Tensors:
        """Copy what stays out of the adapters, after the local steps."""

    @abstractmethod
    def put(self, adapters: Sequence[Adapter], own: Mapping[str, Tensor]) -> None:
        """Put a checked part of the client's own into adapters that have loaded a broadcast."""
