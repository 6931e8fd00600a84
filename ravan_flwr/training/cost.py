"""Count what a step and a message cost before anything runs: no weights, no data, no bases.

The network is built on the meta device, where tensors have shapes and nothing else. One
forward pass there tells which tensors a training step keeps for its backward pass, so that
the memory of a step is counted, not guessed, for every number of heads.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ravan_flwr.adapters import find_layers
from ravan_flwr.adapters.stored import BITS, quantizable
from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.sparsity import WHOLE, num_bytes, sent_sparsely
from ravan_flwr.methods import budget_fraction
from ravan_flwr.methods.base import CLASSIFIER, Method
from ravan_flwr.privacy.example_gradients import ExampleGradients
from ravan_flwr.secure.fixed_point import WIDTH
from ravan_flwr.secure.schedule import GIVEN, Bytes, Schedule, make_schedule, most_around
from ravan_flwr.seeding import generator
from ravan_flwr.tasks.base import Batch, Task
from ravan_flwr.training.attention import attention_of
from ravan_flwr.training.local_steps import PRECISIONS
from ravan_flwr.training.masked import parts_of, selected_rows
from ravan_flwr.training.model_and_data import make_method, make_task, settle
from ravan_flwr.training.network import (
    backbone_dtype,
    build_skeleton,
    likely_device,
    prepare_network,
    pretrained_parameters,
)

ADAM = 4  # a trained parameter's value, gradient and two moments, in float32 each


@dataclass(frozen=True)
class StepMemory:
    """Count the bytes of one training step, by what they are for."""

    weights: int  # everything that is frozen and there anyway: backbone and bases
    trained: int  # values, gradients and Adam's moments of what is trained
    activations: int  # kept for the backward pass

    @property
    def added(self) -> int:
        """Count what a step takes beyond the model itself."""
        return self.trained + self.activations

    @property
    def total(self) -> int:
        return self.weights + self.added


class Skeleton:
    """Hold the adapted network without weights, as plans and footprints count it."""

    def __init__(self, config: Config) -> None:
        self.config = config = settle(config)
        self.task = make_task(config)
        stored_dtype = backbone_dtype(config, likely_device(config.device))
        built = build_skeleton(config.model, self.task, stored_dtype)
        self.network = built.network.requires_grad_(False)
        prepare_network(self.network, config)
        self.saved = 0  # bytes, by keeping the backbone in few bits
        if config.quantize != "none":
            bits = BITS[config.quantize]
            weights = [m.weight for m in quantizable(self.network, built.classifier).values()]
            self.saved = round(sum(w.numel() * (w.element_size() - bits / 8) for w in weights))
        # Which heads are chosen is all the same, and scores cannot be computed here.
        unscored = replace(config, scoring="random")
        self.method = make_method(unscored, find_layers(self.network, built.targets), built.size)
        pretrained = pretrained_parameters(self.network, built.classifier)
        self.adapters = self.method.install(self.network, pretrained)
        self.classifier = built.classifier if config.classifier == "trained" else []
        for parameter in self.classifier:
            parameter.requires_grad_(True)

    @cached_property
    def around(self) -> Bytes | None:
        """Count the bytes of a secure round beside what is trained; None of another round."""
        return most_around(self._schedule()) if self.config.secure_aggregation else None

    def receive(self, fraction: float) -> None:
        """Load what a client with that budget fraction is sent first."""
        method = self.largest_round()
        method.load(self.adapters, method.broadcast(method.initial_state(self.adapters), fraction))

    def choose(self, fraction: float) -> list[nn.Parameter]:
        """Choose what a client with that budget fraction trains, and return it."""
        method = self.largest_round()
        method.choose(self.adapters, fraction, generator(0), lambda: None)
        return self.trained()

    def trained(self) -> list[nn.Parameter]:
        """List what is trained now."""
        return [*self.largest_round().parameters(self.adapters), *self.classifier]

    def state(self) -> dict[str, torch.Tensor]:
        """Make the initial state, the classifier as its shape alone."""
        state = dict(self.method.initial_state(self.adapters))
        if self.classifier:
            state[CLASSIFIER] = torch.empty(self.classifier_size, device="meta")
        return state

    def _schedule(self) -> Schedule:
        """Draw who would train what in a secure round of clients with the run's budgets."""
        config, state = self.config, self.state()
        # A bound is told in as many digits as it has: none has more than this one.
        longest, digest = 1e-5 / 3, GIVEN * "0"
        parts = [part._replace(bound=longest) for part in parts_of(self.method, state, 1.0)]
        rows = {}
        for partition in range(config.clients_per_round):
            fraction = budget_fraction(config.budgets, config.seed, partition)
            if self.method.can_train(fraction):
                random = generator(config.seed, "heads", 1, partition)
                rows[partition] = selected_rows(self.method, state, fraction, random)
        least, number = config.secure_minimum, config.num_rounds
        return make_schedule(2**63, number, least, parts, rows, digest)

    @property
    def classifier_size(self) -> int:
        return sum(parameter.numel() for parameter in self.classifier)

    def largest_round(self) -> Method:
        """Give the method as it is in the round in which a client sends most."""
        rounds = self.method.different_rounds()
        return max(rounds, key=lambda method: method.upload_bytes(1.0))

    @property
    def classifier_sent(self) -> int:
        """Count the numbers of the classifier that travel: where clients have own parts, none."""
        return self.classifier_size if self.method.personal is None else 0

    def bytes_up(self, fraction: float) -> int:
        method = self.largest_round()
        shapes = list(method.upload_shapes(fraction).values())
        if self.around is not None:
            numbers = sum(map(math.prod, shapes)) + self.classifier_sent
            return WIDTH * (numbers + 1) + self.around.up  # and how many were cut off
        return self._coded(method.upload_bytes(fraction), shapes, self.config.densities[1])

    def bytes_down(self, fraction: float) -> int:
        initial = self.method.initial_state(self.adapters)
        sent = self.method.broadcast(initial, fraction).items()
        shapes = {n: tuple(tensor.shape) for n, tensor in sent if tensor.dtype == torch.float32}
        around = 0 if self.around is None else self.around.down
        number, sparse = self.method.broadcast_bytes(initial, fraction), sent_sparsely(self.method)
        dense = [shape for name, shape in shapes.items() if name not in sparse]
        trained = [shape for name, shape in shapes.items() if name in sparse]
        number += num_bytes(dense, WHOLE[0], self.config.wire) - 4 * sum(map(math.prod, dense))
        return self._coded(number, trained, self.config.densities[0]) + around

    def _coded(self, number: int, shapes: Sequence[tuple[int, ...]], fraction: Fraction) -> int:
        """Count the bytes on the wire, the classifier's included; most are in these shapes."""
        remainder = number - 4 * sum(math.prod(shape) for shape in shapes)
        return remainder + num_bytes([*shapes, (self.classifier_sent,)], fraction, self.config.wire)


@lru_cache(maxsize=64)
def step_memory(config: Config, fraction: float) -> StepMemory:
    """Count the memory of a step of a client with that budget fraction."""
    built = Skeleton(config)
    network = built.network
    built.receive(fraction)
    weights = _bytes([*network.parameters(), *network.buffers()])
    trained = built.choose(fraction)
    added = _bytes([*network.parameters(), *network.buffers()]) - weights
    copies = _bytes(trained) - 4 * built.classifier_size if added else 0  # of some heads
    at_a_time, task = config.micro_batch_size or config.batch_size, built.task
    with attention_of(config, network, task):
        by_example = ExampleGradients(network, trained) if config.privacy == "example" else None
        activations = saved_for_backward(network, task, at_a_time, by_example)
    if by_example:
        # The gradients of so many examples, and the sums of what clipping leaves of them: in
        # float64, as are the sums, there is one parameter's at a time, beside a copy of it.
        numbers = [parameter.numel() for parameter in trained]
        activations += 4 * at_a_time * sum(numbers) + 8 * sum(numbers)
        activations += 12 * at_a_time * max(numbers, default=0)
    if config.gradient_checkpointing:  # one block's are computed again where they are needed
        reference = replace(config, gradient_checkpointing=False, precision="float32")
        activations += step_memory(reference, fraction).activations // _checkpoints(config, network)
    activations += cast_weights(config, network) + task.transient(network.config, at_a_time)
    own = _bytes(trained)
    return StepMemory(weights - (own - copies) - built.saved, ADAM * own, activations)


@lru_cache(maxsize=64)
def step_operations(config: Config, fraction: float) -> tuple[float, float]:
    """Count the floating-point operations of a step of a client with that budget fraction.

    The first number is that of the forward pass alone. A pass runs on the meta device, where
    products of matrices are counted and nothing is computed. The optimiser is left out.
    """
    built = Skeleton(config)
    network, task = built.network, built.task
    fraction = fraction if built.method.can_train(fraction) else 1.0
    built.receive(fraction)
    built.choose(fraction)
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


def cast_weights(config: Config, network: nn.Module) -> int:
    """Count the copies of linear layers' weights that autocast makes in a precision of 16 bits.

    They stay (keeps_casts), at least until the backward pass, which needs them. With checkpoints
    they are made again, block by block. Activations are counted in float32 all the same: some are.
    """
    if config.precision == "float32":
        return 0
    linears = [
        module
        for module in network.modules()
        if isinstance(module, nn.Linear) and module.weight.dtype != PRECISIONS[config.precision]
    ]
    if config.quantize != "none":  # what is in few bits is unpacked when it is needed, and dropped
        quantized = set(quantizable(network, []).values())
        linears = [linear for linear in linears if linear not in quantized]
    return sum(2 * linear.weight.numel() for linear in linears) // _checkpoints(config, network)


def _checkpoints(config: Config, network: nn.Module) -> int:
    """Count the parts in which the forward pass is run again for the backward pass; else one."""
    if not config.gradient_checkpointing:
        return 1
    return max(
        1, sum(isinstance(module, GradientCheckpointingLayer) for module in network.modules())
    )


def meta_batch(network: PreTrainedModel, task: Task, number: int) -> Batch:
    """Make a batch of so many examples that has shapes and nothing else."""
    shapes = task.shapes(network.config, number)
    return {name: torch.empty(s, dtype=d, device="meta") for name, (s, d) in shapes.items()}


def saved_for_backward(
    network: PreTrainedModel,
    task: Task,
    batch_size: int,
    by_example: ExampleGradients | None = None,
) -> int:
    """Count the bytes that autograd saves in a forward pass, each storage once.

    Of gradients by example it is also what adapted layers read, but nothing for their parameters.
    """
    batch = meta_batch(network, task, batch_size)
    storages = {_storage(tensor) for tensor in [*network.parameters(), *network.buffers()]}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in storages:
            saved[_storage(tensor)] = tensor
        return tensor

    network.train()
    with ExitStack() as stack:
        if by_example is not None:
            stack.enter_context(by_example.tapped(read=pack))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        loss = task.loss(network, batch)
    del loss  # until here the saved tensors live, so that no two share an address
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Count the bytes of tensors' values, those that share a storage once."""
    different = {_storage(tensor): tensor for tensor in tensors}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in different)


def largest_fraction(config: Config, free: int) -> float:
    """Find the budget that pays for most heads, or ranks, and whose step fits into that memory."""
    parts = Skeleton(config).method.parts
    if parts is None:  # whole, or left out: then the fraction is that of the memory it needs
        return max(1e-6, min(1.0, 0.9 * free / step_memory(config, 1.0).added))

    def need(number: int) -> int:
        return step_memory(config, number / parts).added

    fitting = bisect_right(range(1, parts + 1), 0.9 * free, key=need)
    if not fitting:
        raise ValueError(
            f"node config: budget is 'auto', and the least that can be trained needs "
            f"{need(1) / 1e6:.0f} MB beside the model, but 90 % of {free / 1e6:.0f} MB free are "
            "less; lower batch-size"
        )
    return fitting / parts


def adapter_parameters(config: Config) -> int:
    """Count the parameters that a client with the whole budget trains, without the classifier."""
    return Skeleton(config).method.trainable_parameters()
