"""Count what a process of a run takes of a GPU's memory, on the meta device as `plan` counts.

Beside the model that is CUDA's own context with PyTorch's kernels, and the larger of what the
process does: steps of training, or an evaluation, whose batches are larger, but of which nothing is
kept for a backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ravan_flwr.config.run_config import Config
from ravan_flwr.training.attention import attention_of
from ravan_flwr.training.cost import Skeleton, cast_weights, meta_batch, step_memory
from ravan_flwr.training.network import keeps_casts

# Of each process: CUDA's context, the kernels, the workspaces of cuBLAS and cuDNN. A customary
# figure, rounded up; what it is depends on the GPU and on PyTorch's build.
CONTEXT = 700_000_000


@dataclass(frozen=True)
class Footprint:
    """Hold the bytes of a GPU's memory that each kind of process takes."""

    client: int
    server: int


def footprint(config: Config) -> Footprint:
    """Count for the process of a client with the whole budget, and for the server's."""
    step, evaluation = step_memory(config, 1.0), evaluation_memory(config)
    resident = CONTEXT + step.weights
    if config.evaluate_on == "server":
        return Footprint(resident + step.added, resident + evaluation)
    return Footprint(resident + max(step.added, evaluation), resident)


def evaluation_memory(config: Config) -> int:
    """Count the most that an evaluation takes at a time beyond the model."""
    built = Skeleton(config)
    network, task = built.network.eval(), built.task
    model_tensors = [*network.parameters(), *network.buffers()]
    # Answers that are generated keep keys and values; a forward pass over all of one is the most.
    network.register_forward_pre_hook(_keep_keys_and_values, with_kwargs=True)
    attention = attention_of(replace(config, batching="random"), network, task)
    with torch.no_grad(), attention, _MostAlive(model_tensors) as memory:
        batch = meta_batch(network, task, task.evaluation_batch)
        task.loss(network, batch)
    ahead = sum(tensor.numel() * tensor.element_size() for tensor in batch.values())
    casts = cast_weights(config, network) if keeps_casts(config) else 0
    return int(memory.most + ahead + casts)  # the next batch is there while this one is worked on


def _keep_keys_and_values(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
    return inputs, named | ({"use_cache": True} if "use_cache" in named else {})


class _MostAlive(TorchDispatchMode):
    """Count the bytes of the storages that are alive after each operation, but for those known."""

    def __init__(self, model_tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._model_storages = {tensor.untyped_storage()._cdata for tensor in model_tensors}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {k: entry for k, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._model_storages:
                    self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result
