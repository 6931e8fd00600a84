"""Compute the memory of a process and of a step, and the bytes of a message, before a run starts.

No weights, data or bases are needed. The network is built on the meta device, where tensors have
shapes only. One forward pass there shows which tensors a training step saves for its backward pass.
So the memory of a step is counted, not guessed, for every number of heads.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ravan_flwr.adapters import find_layers
from ravan_flwr.adapters.stored import BITS, quantizable
from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.sparsity import WHOLE, num_bytes, sent_sparsely
from ravan_flwr.methods.base import CLASSIFIER, Method
from ravan_flwr.optional import EXAMPLE_GRADIENTS, ROUND_BYTES, load
from ravan_flwr.seeding import generator
from ravan_flwr.tasks.base import Batch, Task
from ravan_flwr.training.attention import imitate_attention
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.device import computing_with, suitable_threads
from ravan_flwr.training.local_steps import check_precision
from ravan_flwr.training.model_and_data import make_method, make_task, settle
from ravan_flwr.training.network import (
    backbone_dtype,
    build_skeleton,
    captures_steps,
    keeps_casts,
    likely_device,
    prepare_network,
    pretrained_parameters,
)
from ravan_flwr.training.step import DTYPES, autocast

# The most operations (on a CPU, on a GPU) and bytes of a step that a plan tries, for its time.
MAX_TRIED, MAX_TRIED_BYTES = (1e11, 5e12), 1_000_000_000
# CUDA's context, kernels, and the workspaces of cuBLAS and cuDNN, for each process: 770 MB on an
# H100 with PyTorch 2.11 for CUDA 13, rounded up; it depends on the GPU and on PyTorch's build.
CONTEXT = 800_000_000
ADAM = 4  # a trained parameter's value, gradient and two moments, in float32 each


@dataclass(frozen=True)
class StepMemory:
    """The bytes of one training step, by purpose."""

    weights: int  # frozen tensors: backbone and bases
    trained: int  # values, gradients and Adam's moments of the trained parameters
    activations: int  # saved for the backward pass
    # A captured step keeps its activations' memory; without room for that, steps are not captured.
    graph: int = 0

    @property
    def added(self) -> int:
        """Return the bytes of a step beyond the model itself."""
        return self.trained + self.activations

    @property
    def total(self) -> int:
        return self.weights + self.added + self.graph


class Skeleton:
    """The adapted network without weights, from which plans and footprints are computed."""

    def __init__(self, config: Config) -> None:
        self.config = config = settle(config)
        self.task = make_task(config)
        stored_dtype = backbone_dtype(config, likely_device(config.device))
        backbone = build_skeleton(config.model, self.task, stored_dtype)
        self.network = backbone.network.requires_grad_(False)
        prepare_network(self.network, config)
        self.saved_bytes = 0  # by quantizing the backbone
        if config.quantize != "none":
            bits = BITS[config.quantize]
            weights = [m.weight for m in quantizable(self.network, backbone.classifier).values()]
            self.saved_bytes = round(
                sum(w.numel() * (w.element_size() - bits / 8) for w in weights)
            )
        # The choice of heads does not change the counts, and meta tensors have no scores.
        unscored = replace(config, scoring="random")
        self.classifier = backbone.classifier if config.classifier == "trained" else []
        layers = find_layers(self.network, backbone.targets, self.classifier)
        self.method = make_method(unscored, layers, backbone.size)
        pretrained = pretrained_parameters(self.network, backbone.classifier)
        self.adapters = self.method.install(self.network, pretrained)
        for parameter in self.classifier:
            parameter.requires_grad_(True)

    @cached_property
    def masked(self) -> Any:
        """Return the bytes of a secure round (extras/secure/cost.py); None without one."""
        if not self.config.secure_aggregation:
            return None
        state = dict(self.method.initial_state(self.adapters))
        if self.classifier:
            state[CLASSIFIER] = torch.empty(self.classifier_size, device="meta")
        return load(ROUND_BYTES)(self.config, self.method, state)

    def receive(self, fraction: float) -> None:
        """Load the first broadcast to a client with that budget fraction."""
        method = self.largest_round()
        method.load(self.adapters, method.broadcast(method.initial_state(self.adapters), fraction))

    def choose(self, fraction: float) -> list[nn.Parameter]:
        """Choose the parameters that a client with that budget fraction trains; return them."""
        method = self.largest_round()
        method.choose(self.adapters, fraction, generator(0), lambda: None)
        return self.trained()

    def trained(self) -> list[nn.Parameter]:
        """List the parameters that are trained now."""
        return [*self.largest_round().parameters(self.adapters), *self.classifier]

    @property
    def classifier_size(self) -> int:
        return sum(parameter.numel() for parameter in self.classifier)

    def largest_round(self) -> Method:
        """Return the method of the round in which a client sends the most bytes."""
        rounds = self.method.different_rounds()
        return max(rounds, key=lambda method: method.upload_bytes(1.0))

    @property
    def classifier_sent(self) -> int:
        """Count the classifier's numbers in a message: 0 if the classifier is personal."""
        return self.classifier_size if self.method.personal is None else 0

    def bytes_up(self, fraction: float) -> int:
        method = self.largest_round()
        shapes = list(method.upload_shapes(fraction).values())
        if self.masked is not None:
            numbers = sum(map(math.prod, shapes)) + self.classifier_sent
            return int(self.masked.number * numbers + self.masked.up)
        return self._coded(method.upload_bytes(fraction), shapes, self.config.densities[1])

    def bytes_down(self, fraction: float) -> int:
        initial = self.method.initial_state(self.adapters)
        sent = self.method.broadcast(initial, fraction).items()
        shapes = {n: tuple(tensor.shape) for n, tensor in sent if tensor.dtype == torch.float32}
        beside = 0 if self.masked is None else int(self.masked.down)
        number, sparse = self.method.broadcast_bytes(initial, fraction), sent_sparsely(self.method)
        dense = [shape for name, shape in shapes.items() if name not in sparse]
        trained = [shape for name, shape in shapes.items() if name in sparse]
        number += num_bytes(dense, WHOLE[0], self.config.wire) - 4 * sum(map(math.prod, dense))
        return self._coded(number, trained, self.config.densities[0]) + beside

    def _coded(self, number: int, shapes: Sequence[tuple[int, ...]], fraction: Fraction) -> int:
        """Return the bytes on the wire, with the classifier's.

        `number` is the size of the method's tensors, with those of `shapes` in float32.
        """
        remainder = number - 4 * sum(math.prod(shape) for shape in shapes)
        return remainder + num_bytes([*shapes, (self.classifier_sent,)], fraction, self.config.wire)


def bytes_of_round(config: Config, skeleton: Skeleton | None = None) -> int:
    """Return the most bytes that a round with an evaluation sends, up and down."""
    skeleton = skeleton or Skeleton(config)
    num_clients, down = config.num_clients or number_of_clients(config), skeleton.bytes_down(1.0)
    evaluating = num_clients if config.evaluate_on == "clients" else 0
    return config.num_updates(num_clients) * (skeleton.bytes_up(1.0) + down) + evaluating * down


@lru_cache(maxsize=64)
def step_memory(config: Config, fraction: float) -> StepMemory:
    """Return the memory of a training step of a client with that budget fraction."""
    skeleton = Skeleton(config)
    network = skeleton.network
    skeleton.receive(fraction)
    weights = _bytes([*network.parameters(), *network.buffers()])
    trained = skeleton.choose(fraction)
    added = _bytes([*network.parameters(), *network.buffers()]) - weights
    copies = _bytes(trained) - 4 * skeleton.classifier_size if added else 0  # of the chosen heads
    number, task = config.micro_batch_size or config.batch_size, skeleton.task
    with imitate_attention(config, network, task):
        private = config.privacy == "example"
        by_example = load(EXAMPLE_GRADIENTS)(network, trained) if private else None
        activations = saved_for_backward(network, task, number, by_example)
    if by_example is not None:
        activations += by_example.num_bytes(number)
    if config.gradient_checkpointing:  # one block's are recomputed at a time
        reference = replace(config, gradient_checkpointing=False, precision="float32")
        activations += step_memory(reference, fraction).activations // _checkpoints(config, network)
    activations += cast_weights(config, network) + task.transient(network.config, number)
    size = _bytes(trained)
    captured = likely_device(config.device) == "cuda" and captures_steps(config)
    graph = activations if captured else 0
    kept = weights - (size - copies) - skeleton.saved_bytes
    return StepMemory(kept, ADAM * size, activations, graph)


@lru_cache(maxsize=64)
def step_operations(config: Config, fraction: float) -> tuple[float, float]:
    """Return the floating-point operations of a client's forward pass, and of its whole step.

    Matrix products are counted on the meta device, and nothing is computed. The optimiser is not
    counted.
    """
    skeleton = Skeleton(config)
    network, task = skeleton.network, skeleton.task
    fraction = fraction if skeleton.method.can_train(fraction) else 1.0
    skeleton.receive(fraction)
    skeleton.choose(fraction)
    number = config.micro_batch_size or config.batch_size
    batch = meta_batch(network, task, number)
    network.train()
    passes = config.batch_size / number
    counted = FlopCounterMode(display=False)
    with counted:
        loss = task.loss(network, batch)
        forward = counted.get_total_flops()
        if loss.requires_grad:
            loss.backward()
    return passes * forward, passes * counted.get_total_flops()


@lru_cache(maxsize=64)
def step_seconds(config: Config) -> float:
    """Measure a step of a client with the whole budget on this machine, without weights or data.

    Its numbers are random, and it has as many threads as in a run. A step of many operations is
    tried with fewer examples, and its time is in proportion. Raise ValueError if the model takes
    too much memory for that.
    """
    device, operations = likely_device(config.device), step_operations(config, 1.0)[1]
    check_precision(config.precision, torch.device(device))
    on_gpu, memory = device == "cuda", step_memory(config, 1.0)
    each = max(1.0, operations / config.batch_size)
    number = int(min(MAX_TRIED[on_gpu] / each, config.micro_batch_size or config.batch_size))
    if not number:
        raise ValueError(f"an example takes {each / 1e9:.0f} GFLOP, too many for a try")
    limit = torch.cuda.mem_get_info()[0] // 2 if on_gpu else MAX_TRIED_BYTES
    if (needs := memory.weights + memory.trained) > limit:
        raise ValueError(
            f"the model takes {needs / 1e9:.1f} GB, expected {limit / 1e9:.1f} at most"
        )
    skeleton = Skeleton(config)
    skeleton.receive(1.0)
    skeleton.choose(1.0)
    network, task = skeleton.network.to_empty(device=device).train(), skeleton.task
    for tensor in (*network.parameters(), *network.buffers()):
        # Plausible numbers: with gradients close to zero a CPU is many times slower.
        is_matrix = tensor.is_floating_point() and tensor.ndim > 1
        tensor.data.normal_(std=0.02) if is_matrix else tensor.data.fill_(tensor.ndim == 1)
    shapes = meta_batch(network, task, number)
    batch = {name: torch.ones_like(tensor, device=device) for name, tensor in shapes.items()}
    seconds = list[float]()
    size = sum(parameter.numel() for parameter in network.parameters())
    with computing_with(suitable_threads(size, config.batch_size)):
        while len(seconds) < 3 and sum(seconds) < 2.0:  # the first is slower
            begun = time.perf_counter()
            with autocast(device, config.precision):
                loss = task.loss(network, batch)
            if loss.requires_grad:
                loss.backward()
            float(loss.detach())  # waits for a GPU
            seconds.append(time.perf_counter() - begun)
    return min(seconds) * config.batch_size / number


def cast_weights(config: Config, network: nn.Module) -> int:
    """Return the bytes of autocast's 16-bit copies of linear layers' weights.

    The copies are kept (`keeps_casts`), at least until the backward pass, which needs them. With
    gradient checkpointing they are made again block by block. Activations are counted in float32
    even so, since some are.
    """
    if config.precision == "float32":
        return 0
    linears = [
        module
        for module in network.modules()
        if isinstance(module, nn.Linear) and module.weight.dtype != DTYPES[config.precision]
    ]
    if config.quantize != "none":  # quantized weights are unpacked for each use, and dropped
        quantized = set(quantizable(network, []).values())
        linears = [linear for linear in linears if linear not in quantized]
    return sum(2 * linear.weight.numel() for linear in linears) // _checkpoints(config, network)


def _checkpoints(config: Config, network: nn.Module) -> int:
    """Count the blocks that gradient checkpointing recomputes one by one; 1 without it."""
    if not config.gradient_checkpointing:
        return 1
    return max(
        1, sum(isinstance(module, GradientCheckpointingLayer) for module in network.modules())
    )


def meta_batch(network: PreTrainedModel, task: Task, number: int) -> Batch:
    """Make a batch of `number` examples of meta tensors."""
    shapes = task.shapes(network.config, number)
    return {name: torch.empty(s, dtype=d, device="meta") for name, (s, d) in shapes.items()}


def saved_for_backward(
    network: PreTrainedModel,
    task: Task,
    batch_size: int,
    by_example: Any = None,
) -> int:
    """Count the bytes that autograd saves in a forward pass, each storage once.

    With `by_example` this includes the inputs of the trained layers, and nothing that is saved for
    the gradients of their parameters.
    """
    batch = meta_batch(network, task, batch_size)
    storages = {_storage(tensor) for tensor in [*network.parameters(), *network.buffers()]}
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in storages:
            saved[_storage(tensor)] = tensor
        return tensor

    network.train()
    with ExitStack() as stack:
        if by_example is not None:
            stack.enter_context(by_example.hooked(on_input=save))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor))
        loss = task.loss(network, batch)
    del loss  # it kept the saved tensors alive, so that no two shared an address
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Count the bytes of tensors; tensors that share a storage count once."""
    different = {_storage(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.nbytes for tensor in different)


def largest_fraction(config: Config, free: int) -> float:
    """Return the largest budget fraction whose training step fits into `free` bytes."""
    units = Skeleton(config).method.budget_units
    if units is None:  # trained whole or not at all: then it is the part of the needed memory
        needed = max(1, step_memory(config, 1.0).added)  # 0 if nothing is trained
        return max(1e-6, min(1.0, 0.9 * free / needed))

    def need(number: int) -> int:
        return step_memory(config, number / units).added

    fitting = bisect_right(range(1, units + 1), 0.9 * free, key=need)
    if not fitting:
        raise ValueError(
            f"node config: budget is 'auto', and the smallest trainable part needs "
            f"{need(1) / 1e6:.0f} MB beside the model, but 90 % of {free / 1e6:.0f} MB free are "
            "less; lower batch-size"
        )
    return fitting / units


def adapter_parameters(config: Config) -> int:
    """Count the parameters that a client with the whole budget trains, without the classifier."""
    return Skeleton(config).method.trainable_parameters()


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

    def keep_cache(_: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
        return inputs, named | ({"use_cache": True} if "use_cache" in named else {})

    # Generation caches keys and values; the peak is a forward pass over a whole answer.
    network.register_forward_pre_hook(keep_cache, with_kwargs=True)
    attention = imitate_attention(replace(config, batching="random"), network, task)
    with torch.no_grad(), attention, _PeakMemory(model_tensors) as memory:
        batch = meta_batch(network, task, task.evaluation_batch)
        task.loss(network, batch)
    next_batch = sum(tensor.nbytes for tensor in batch.values())
    casts = cast_weights(config, network) if keeps_casts(config) else 0
    return int(memory.peak + next_batch + casts)  # while a batch is computed, the next is read


class _PeakMemory(TorchDispatchMode):
    """Record the peak of the bytes of live storages, without the model's own."""

    def __init__(self, model_tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._model_storages = {*map(_storage, model_tensors)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {k: entry for k, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if _storage(tensor) not in self._model_storages:
                    self._alive[_storage(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result
