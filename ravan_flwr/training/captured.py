"""Capture a training step once as a CUDA graph, and replay it for every step of every client.

In a step of a small batch a GPU waits for the CPU most of the time: the CPU starts a thousand small
kernels one by one. A CUDA graph is a recording of all of them that is started at once.

A graph reads and writes fixed addresses, so all that a step touches stays where it was when the
step was captured (`FixedTensors`): the network's tensors, the state of Adam, the learning rate, the
anchors of the proximal term. When the next client begins, each of its tensors that lies elsewhere,
such as the factors of a LoRA or the index of the chosen heads, is copied to that address. So one
graph serves all clients whose tensors have the same names and shapes, whatever heads they chose.
Each shape of a batch has a graph of its own. Other steps, such as that of a short last batch, are
computed eagerly on the same tensors.

Replayed and eager steps compute the same kernels on the same numbers, so uploads are the same bits.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import getLogger
from statistics import median
from types import SimpleNamespace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from ravan_flwr.adapters.stored import refresh_cast
from ravan_flwr.tasks.base import Batch
from ravan_flwr.training.step import OptimizerStep, TrainingSettings, autocast, no_scaler

log = getLogger(__name__)

MicroBatches = Sequence[Batch]
MAX_GRAPHS = 8  # of one model; further shapes are computed eagerly
WARM_UP = 3  # steps before a capture, in which libraries choose kernels and allocate workspaces
TRIED = 3  # steps of each kind that decide whether a graph is quicker


class Capture(Protocol):
    """Record a function; return a function that runs the recording again."""

    compares: bool  # whether replayed steps have to be quicker than eager ones to be used

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]: ...


class CudaGraphs:
    """Record with CUDA graphs, which share one pool of memory: no two are replayed at a time."""

    compares = True

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread pins the memory of the next batch meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self._pool = self._pool or graph.pool()
        return graph.replay


class GraphCache:
    """The CUDA graphs of a process's model, which its clients use in turn."""

    def __init__(self, capture: Capture, *, at_first: bool = True) -> None:
        """Capture each shape of a batch when it comes for the first time, or else the second."""
        self.capture, self.at_first = capture, at_first
        self.fixed_tensors: dict[Any, FixedTensors] = {}
        self._logged: set[str] = set()

    def wrap(self, network: nn.Module, step: OptimizerStep) -> "CapturedStep":
        """Begin a client; return its step, which is replayed where there is a graph."""
        key = (_description(network), replace(step.settings, num_steps=0, learning_rate=0.0))
        fixed = self.fixed_tensors.get(key)
        if fixed is not None:
            fixed.adopt(network, step)
        elif len(self.fixed_tensors) < MAX_GRAPHS:
            fixed = self.fixed_tensors[key] = FixedTensors(network, step)
        return CapturedStep(self, network, step, fixed)

    @property
    def number(self) -> int:
        """Return the number of graphs, with those that could not be captured."""
        return len(self._graphs())

    @property
    def holds_memory(self) -> bool:
        """Return whether there is a graph whose memory could be given back."""
        return any(graph is not None for graph in self._graphs())

    def _graphs(self) -> "list[Graph | None]":
        return [graph for fixed in self.fixed_tensors.values() for graph in fixed.graphs.values()]

    def log_once(self, text: str) -> None:
        """Log a line unless it was logged before."""
        if text not in self._logged:
            self._logged.add(text)
            log.info(text)


@dataclass
class Graph:
    """A captured step for batches of one shape."""

    micro_batches: MicroBatches  # the addresses that it reads a batch from
    loss: Tensor
    replay: Callable[[], None]
    clients: int = 0  # that have used it
    eager_seconds: list[float] = field(default_factory=list)
    replay_seconds: list[float] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Return whether enough eager and replayed steps were timed to compare them."""
        return len(self.replay_seconds) >= TRIED

    def __call__(self, micro_batches: MicroBatches) -> Tensor:
        """Run the step on a batch, and return its loss."""
        for own, micro_batch in zip(self.micro_batches, micro_batches, strict=True):
            for name, tensor in micro_batch.items():
                own[name].copy_(tensor, non_blocking=True)
        self.replay()
        return self.loss.clone()


class FixedTensors:
    """The tensors of a network and of its optimiser, at the addresses that graphs use."""

    def __init__(self, network: nn.Module, step: OptimizerStep) -> None:
        """Take the tensors where they are now; no two may share an address."""
        addresses = set[int]()
        # Buffers first: a weight may be a buffer's tensor for now, as in `ResidualLoRALinear`.
        for tensor in (*network.buffers(), *network.parameters()):
            if tensor.numel() and tensor.data_ptr() in addresses:
                tensor.data = tensor.data.clone()
            addresses.add(tensor.data_ptr())
        # Kept, so that nothing else gets these addresses.
        self.tensors = {name: tensor.data for name, tensor in _tensors(network).items()}
        self.casts: dict[str, Any] = {}  # copies in 16 bits that `cast_once` keeps
        assert isinstance(step.rate, Tensor)
        self.rate, self.anchors, self.skipped = step.rate, step.anchors, step.skipped
        # By parameter: the dicts themselves are shared by the optimisers of all clients.
        self.optimizer_states = [step.optimizer.state[p] for p in step.parameters]
        self.graphs: dict[Any, Graph | None] = {}  # by the shapes of a batch; None: it failed
        self.seen = set[Any]()  # shapes

    def adopt(self, network: nn.Module, step: OptimizerStep) -> None:
        """Move a client's tensors to these addresses, and begin its optimiser anew."""
        tensors = _tensors(network)
        moved = {n: t for n, t in tensors.items() if t.data_ptr() != self.tensors[n].data_ptr()}
        places = {self.tensors[name].data_ptr() for name in moved}
        for tensor in tensors.values():  # that lies where another one is to be
            if tensor.data_ptr() in places:
                tensor.data = tensor.data.clone()
        for name, own in tensors.items():
            place = self.tensors[name]
            if own.data_ptr() != place.data_ptr():
                place.copy_(own.data)
                own.data = place
        for name, (key, kept) in self.casts.items():
            refresh_cast(tensors[name], key[1], kept)
        for place, own in zip(self.anchors, step.anchors, strict=True):
            place.copy_(own)
        self.rate.fill_(step.rate)
        self.skipped.zero_()
        step.anchors, step.rate, step.skipped = self.anchors, self.rate, self.skipped
        step.optimizer.param_groups[0]["lr"] = self.rate
        states = zip(step.parameters, self.optimizer_states, strict=True)
        step.optimizer.state.update(states)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Set the optimiser's tensors to zero, as those of a new one."""
        for tensor in self._optimizer_tensors():
            tensor.zero_()

    def capture(
        self, network: nn.Module, step: OptimizerStep, micro_batches: MicroBatches, capture: Capture
    ) -> Graph:
        """Capture a step on batches of this shape; all values are then as they were."""
        own = [
            {name: tensor.clone() for name, tensor in micro_batch.items()}
            for micro_batch in micro_batches
        ]
        losses: list[Tensor] = []  # of the last call

        def run() -> None:
            losses[:] = [step(own)]

        with _as_before(step, [*step.parameters, *network.buffers(), self.skipped]):
            if not any(self.optimizer_states):  # the first step of an optimiser makes its state
                try:
                    run()
                finally:
                    self.reset_optimizer()
            with _as_before(step, self._optimizer_tensors()):
                run()
                self.casts = {
                    name: kept
                    for name, tensor in _tensors(network).items()
                    if (kept := getattr(tensor, "kept_cast", None)) is not None
                }
                step.optimizer.zero_grad(set_to_none=True)
                replay = capture(run)
                return Graph(own, losses[0], replay)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for state in self.optimizer_states:
            yield from state.values()


class CapturedStep:
    """A client's `OptimizerStep`, replayed where there is a graph for the shape of the batch."""

    def __init__(
        self, cache: GraphCache, network: nn.Module, step: OptimizerStep, fixed: FixedTensors | None
    ) -> None:
        self.cache, self.network, self.step, self.fixed = cache, network, step, fixed
        self._used = set[int]()  # graphs
        self._description = _description(network)

    def __call__(self, micro_batches: MicroBatches) -> Tensor:
        """Train on the parts of a batch, and return its mean loss."""
        graph = self._graph(micro_batches)
        if graph is None:
            return self.step(micro_batches)
        if id(graph) not in self._used:
            self._used.add(id(graph))
            graph.clients += 1
        if not self.cache.capture.compares or graph.clients == 1 or graph.is_measured:
            return graph(micro_batches)
        return self._timed(graph, micro_batches)

    def finish(self) -> Tensor:
        """Return the number of steps without effect; RuntimeError if a tensor has moved."""
        if self.fixed is not None:
            moved = [
                name
                for name, tensor in _tensors(self.network).items()
                if name not in self.fixed.tensors
                or tensor.data_ptr() != self.fixed.tensors[name].data_ptr()
            ]
            if moved or _description(self.network) != self._description:
                raise RuntimeError(
                    f"captured steps: {', '.join(moved[:3]) or 'the network'} changed its address "
                    "or shape while a client trained, expected none to; set cuda-graphs=off"
                )
        return self.step.skipped

    def _graph(self, micro_batches: MicroBatches) -> Graph | None:
        """Return the graph for batches of this shape; capture it when the shape is new."""
        if self.fixed is None:
            return None
        graphs = self.fixed.graphs
        key = tuple(
            tuple((name, tuple(t.shape), t.dtype) for name, t in micro_batch.items())
            for micro_batch in micro_batches
        )
        # The last batch of a pass has another size in each client.
        number = sum(len(next(iter(micro_batch.values()))) for micro_batch in micro_batches)
        is_whole = number >= self.step.settings.batch_size
        is_due = self.cache.at_first or key in self.fixed.seen
        self.fixed.seen.add(key)
        if is_whole and is_due and key not in graphs and self.cache.number < MAX_GRAPHS:
            graphs[key], reason = None, ""
            try:
                graphs[key] = self.fixed.capture(
                    self.network, self.step, micro_batches, self.cache.capture
                )
            except torch.OutOfMemoryError:  # whose text has numbers, other ones each time
                reason = "the GPU has too little free memory"
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).partition("\n")[0]
            if graphs[key] is None:  # not within `except`, where the error holds the memory
                self.cache.log_once(f"steps are not captured as a CUDA graph: {reason}")
                self.step.optimizer.zero_grad(set_to_none=True)
                if self.step.skipped.is_cuda:
                    torch.cuda.empty_cache()
        return graphs.get(key)

    def _timed(self, graph: Graph, micro_batches: MicroBatches) -> Tensor:
        """Run a step, and measure it; after the last one drop a graph that is slower."""
        is_replay = len(graph.eager_seconds) >= TRIED
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = graph(micro_batches) if is_replay else self.step(micro_batches)
        torch.cuda.synchronize()
        seconds = graph.replay_seconds if is_replay else graph.eager_seconds
        seconds.append(time.perf_counter() - began)
        if graph.is_measured:
            eager, replayed = median(graph.eager_seconds), median(graph.replay_seconds)
            self.cache.log_once(
                f"a step takes {1000 * replayed:.1f} ms captured, and {1000 * eager:.1f} not"
            )
            if replayed > eager:
                graphs = self.fixed.graphs if self.fixed else {}
                graphs.update({key: None for key, kept in graphs.items() if kept is graph})
        return loss


class ForwardPass(OptimizerStep):
    """A forward pass in the place of a step: it returns logits, and trains nothing."""

    def __init__(self, network: nn.Module, batch_size: int, precision: str) -> None:
        """Capture batches of `batch_size` examples or more; others are computed eagerly."""
        device = next(network.parameters()).device
        settings = TrainingSettings(0, batch_size, 0.0, precision)
        nothing = [torch.zeros((), device=device)]
        super().__init__(nothing, settings, no_scaler(device), _no_gradients, capturable=True)
        self.network, self.device = network, device

    def __call__(self, micro_batches: MicroBatches) -> Tensor:
        """Return the logits of a batch."""
        # Without a cache: a graph would read the copy that autocast made of an earlier weight.
        (inputs,) = micro_batches
        with autocast(self.device.type, self.settings.precision, cache_enabled=False):
            return cast(Tensor, self.network(**inputs).logits)


def _no_gradients(_: MicroBatches) -> Tensor:
    raise AssertionError("a forward pass adds no gradients")


class CapturedNetwork:
    """A network for evaluations, whose forward pass is captured; its output has logits alone."""

    def __init__(
        self, cache: GraphCache, network: nn.Module, batch_size: int, precision: str
    ) -> None:
        self._forward = cache.wrap(network, ForwardPass(network, batch_size, precision))

    def __call__(self, **inputs: Tensor) -> SimpleNamespace:
        """Return the network's output for these inputs."""
        return SimpleNamespace(logits=self._forward([inputs]))


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name, each once."""
    return dict(network.named_parameters()) | dict(network.named_buffers())


def _description(network: nn.Module) -> tuple[Any, ...]:
    """Return everything about the tensors of a network but their values and addresses."""
    return tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in _tensors(network).items()
    )


@contextmanager
def _as_before(step: OptimizerStep, tensors: Any) -> Iterator[None]:
    """Restore the values of tensors, the loss scale, and PyTorch's generators after a block."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    scale = step.scaler.state_dict()
    device = step.skipped.device
    try:
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        if scale:
            step.scaler.load_state_dict(scale)
