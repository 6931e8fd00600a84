"""Stand in for CUDA graphs on a CPU: record the operations of a step, and run them again.

As in a graph, addresses are fixed, no Python runs at a replay, numbers of Python are constants, and
reading a value while recording is an error.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

TRACING = "transformers.masking_utils.is_tracing"
READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero")


class Recorder:
    """Record functions, as `CudaGraphs` does."""

    compares = False

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record `run`; return a function that replays it."""
        operations = _Operations()
        # transformers asks whether a step is being captured, and then reads no values of a mask.
        with mock.patch(TRACING, return_value=True), operations:
            run()
        self.recordings += 1
        return operations.replay


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in READS:
            raise RuntimeError(f"{func}: reads a value while a step is recorded")
        result = func(*args, **(kwargs or {}))
        self.done.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations on the same addresses, and write results where they were."""
        for func, args, kwargs, result in self.done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                is_tensor = isinstance(old, torch.Tensor)
                if (
                    is_tensor
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
                    old.copy_(new)
