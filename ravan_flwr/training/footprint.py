"""Estimate the GPU memory of each process of a run, on the meta device as `plan` does.

It is the sum of the model, CUDA's context with PyTorch's kernels, and the larger of training and
evaluation. An evaluation has larger batches, but saves nothing for a backward pass.
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

# CUDA's context, kernels, and the workspaces of cuBLAS and cuDNN, for each process: 770 MB on an
# H100 with PyTorch 2.11 for CUDA 13, rounded up; it depends on the GPU and on PyTorch's build.
CONTEXT = 800_000_000


@dataclass(frozen=True)
class Footprint:
    """The bytes of GPU memory of a client's process, and of the server's."""

    client: int
    server: int
    graph: int = 0  # of a client's captured step, beside which it computes others


def footprint(config: Config) -> Footprint:
    """Estimate the memory of the processes of a client with the whole budget and of the server."""
    step, evaluation = step_memory(config, 1.0), evaluation_memory(config)
    resident = CONTEXT + step.weights
    if config.evaluate_on == "server":
        return Footprint(resident + step.added, resident + evaluation, step.graph)
    return Footprint(resident + max(step.added, evaluation), resident, step.graph)


def evaluation_memory(config: Config) -> int:
    """Return the peak memory of an evaluation, in bytes beyond the model."""
    skeleton = Skeleton(config)
    network, task = skeleton.network.eval(), skeleton.task
    model_tensors = [*network.parameters(), *network.buffers()]
    # Generation caches keys and values; the peak is a forward pass over a whole answer.
    network.register_forward_pre_hook(_request_keys_and_values, with_kwargs=True)
    attention = attention_of(replace(config, batching="random"), network, task)
    with torch.no_grad(), attention, _PeakMemory(model_tensors) as memory:
        batch = meta_batch(network, task, task.evaluation_batch)
        task.loss(network, batch)
    next_batch = sum(tensor.numel() * tensor.element_size() for tensor in batch.values())
    casts = cast_weights(config, network) if keeps_casts(config) else 0
    return int(memory.peak + next_batch + casts)  # while a batch is computed, the next is read


def _request_keys_and_values(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
    return inputs, named | ({"use_cache": True} if "use_cache" in named else {})


class _PeakMemory(TorchDispatchMode):
    """Record the peak of the bytes of live storages, without the model's own."""

    def __init__(self, model_tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
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
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
