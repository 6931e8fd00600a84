"""Try two levers for small steps on a GPU: several clients in one pass, and a graph of the step.

    python -m benchmarks.gpu_levers                                 # some minutes on a GPU
    python -m benchmarks.gpu_levers --device cpu --small --steps 3  # are the uploads the same?

This is a prototype to measure, not part of the package. The rows train the same clients on the
same batches from the same state:

- "one at a time": as in the package (`train_locally`).
- "together": `torch.func.vmap` over the clients' stacked parameters, which for RAVAN are the r x r
  cores and their scales, over one frozen backbone with shared B and A. Adam is elementwise, so that
  one Adam over the stacks equals each client's own.
- "compiled": one client at a time, its network by `torch.compile`; on a GPU with CUDA graphs.
- "CUDA graph": one client at a time, forward, backward and Adam captured once and replayed; only
  on a GPU.

For each row: seconds, speed-up over the first row, the fraction of time in which the GPU waited,
and the relative distance of uploads from the first row's, by norms. Adam moves a number with zero
gradient, such as a key's bias, by its rounding error. In bfloat16 rounding is to 16 bits. With
--check a float32 row that differs by more than 1e-4 is an error. A lever is kept if it is 1.5 times
as fast (docs/gpu.md).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from benchmarks.gpu import PRESETS, loaded_of, settle_device
from benchmarks.waiting import traced, waiting_share
from ravan_flwr.methods.base import Tensors
from ravan_flwr.seeding import ClientRound
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import Batch
from ravan_flwr.training.batching import training_batches
from ravan_flwr.training.local_steps import train_locally
from ravan_flwr.training.step import PRECISIONS, LocalSteps

MOST_APART = 1e-4
FIRST = "one at a time"


class Bench:
    """Hold a model, and the clients' batches on its device."""

    def __init__(self, preset: str, precision: str, options: argparse.Namespace) -> None:
        settings: dict[str, Scalar] = {"method": options.method, "precision": precision}
        loaded = loaded_of(options, preset, **settings)
        for layer in loaded.model.adapters:  # the merged form makes a weight for each client
            layer.form = "factored"
        self.config, self.model, self.task = loaded.config, loaded.model, loaded.task
        self.examples = loaded.partition(0, 4).train
        self.network: nn.Module = self.model.network
        self.steps, self.dtype = options.steps, PRECISIONS[precision]
        self.clients = [ClientRound(0, 1, number) for number in range(options.clients)]
        self.state = self.started()
        self.batches = [self._batches_of(work) for work in self.clients]

    def started(self) -> Tensors:
        """Make a non-zero state, so that every parameter has a gradient."""
        generator = torch.Generator().manual_seed(0)
        return {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in self.model.initial_state().items()
        }

    def _batches_of(self, work: ClientRound) -> list[Batch]:
        """Draw a client's batches as `train_locally` does."""
        size = min(self.config.batch_size, len(self.examples))
        order = training_batches(len(self.examples), size, work.generator("batches"), None)
        batches = [self.task.collate(self.examples.take(next(order))) for _ in range(self.steps)]
        return [
            {name: tensor.to(self.model.device) for name, tensor in batch.items()}
            for batch in batches
        ]

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Compute a batch's loss in the precision asked for."""
        device = self.model.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype is not None):
            return self.task.loss(network, batch)

    def adam(self, parameters: list[Tensor], *, capturable: bool = False) -> torch.optim.Adam:
        """Make a client's optimiser."""
        rate = self.config.learning_rate
        return torch.optim.Adam(parameters, lr=rate, fused=True, capturable=capturable)

    @contextmanager
    def trained(self) -> Iterator[dict[str, nn.Parameter]]:
        """Load the state, and yield the parameters that a client trains, by name."""
        with self.model.holding(self.state):
            self.network.train()
            generator = self.clients[0].generator("heads")
            self.model.method.choose(self.model.adapters, 1.0, generator, lambda: None)
            ids = {id(parameter) for parameter in self.model.parameters()}
            yield {
                name: parameter
                for name, parameter in self.network.named_parameters()
                if id(parameter) in ids
            }


def one_at_a_time(bench: Bench) -> list[Tensors]:
    """Train as the package does."""
    config = bench.config
    steps = LocalSteps(bench.steps, config.batch_size, config.learning_rate, config.precision)
    parts = bench.model, bench.task, bench.examples, bench.state, 1.0, steps
    return [train_locally(*parts, work).upload for work in bench.clients]


def together(bench: Bench) -> list[Tensors]:
    """Train all clients in one pass for each step."""
    with bench.trained() as parameters:
        number = len(bench.clients)
        stacks = {
            name: parameter.detach().expand(number, *parameter.shape).clone()
            for name, parameter in parameters.items()
        }

        def loss(own: dict[str, Tensor], batch: Batch) -> Tensor:
            return bench.loss(_Called(bench.network, own), batch)

        step = vmap(grad_and_value(loss), randomness="different")
        optimizer = bench.adam(list(stacks.values()))
        for each in zip(*bench.batches, strict=True):
            batch = {name: torch.stack([one[name] for one in each]) for name in each[0]}
            gradients, _ = step(stacks, batch)
            for name, stack in stacks.items():
                # In the stack's order: a fused Adam uses both as they are in memory.
                stack.grad = gradients[name].contiguous()
            optimizer.step()
        return [_upload_with(bench, parameters, stacks, client) for client in range(number)]


class _Called(nn.Module):
    """Act as a network with other parameters."""

    def __init__(self, network: nn.Module, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self._network, self._with = [network], parameters  # a list, so that it is no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._network[0], self._with, args, kwargs)


def _upload_with(
    bench: Bench, parameters: dict[str, nn.Parameter], stacks: dict[str, Tensor], client: int
) -> Tensors:
    """Put a client's parameters into the model, and return its upload."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stacks[name][client])
    return bench.model.upload(bench.model.method)


def compiled(bench: Bench, backend: str) -> list[Tensors]:
    """Train one client at a time, its network compiled."""
    mode = "reduce-overhead" if bench.model.device.type == "cuda" else None  # with CUDA graphs
    network: Any = torch.compile(bench.network, backend=backend, dynamic=False, mode=mode)
    uploads = []
    for batches in bench.batches:
        with bench.trained() as parameters:
            optimizer = bench.adam(list(parameters.values()))
            for batch in batches:
                torch.compiler.cudagraph_mark_step_begin()
                optimizer.zero_grad(set_to_none=True)
                bench.loss(network, batch).backward()
                optimizer.step()
            uploads.append(bench.model.upload(bench.model.method))
    return uploads


class Graph:
    """Capture a client's step once, with its own memory, and replay it for every client."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        with bench.trained() as parameters:
            self.start = {name: p.detach().clone() for name, p in parameters.items()}
            # The captured parameters are copies, since a loaded state replaces those of the model.
            self.own = {name: t.clone().requires_grad_() for name, t in self.start.items()}
            self.batch = {name: tensor.clone() for name, tensor in bench.batches[0][0].items()}
            self.optimizer = bench.adam(list(self.own.values()), capturable=True)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # required by PyTorch's documentation before a capture
                    self.step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    def step(self) -> None:
        """Take a step on the current batch."""
        for tensor in self.own.values():
            if tensor.grad is not None:
                tensor.grad.zero_()
        self.bench.loss(_Called(self.bench.network, self.own), self.batch).backward()
        self.optimizer.step()

    def __call__(self, bench: Bench) -> list[Tensors]:
        """Train every client by replays."""
        uploads = []
        for client, batches in enumerate(bench.batches):
            self._begin()
            for batch in batches:
                for name, tensor in batch.items():
                    self.batch[name].copy_(tensor)
                self.graph.replay()
            with bench.trained() as parameters:
                stacks = {name: tensor.detach()[None] for name, tensor in self.own.items()}
                uploads.append(_upload_with(bench, parameters, stacks, 0))
            assert client == len(uploads) - 1
        return uploads

    def _begin(self) -> None:
        """Reset the state, and Adam's to zero, in place."""
        with torch.no_grad():
            for name, tensor in self.own.items():
                tensor.copy_(self.start[name])
            for moments in self.optimizer.state.values():
                for value in moments.values():
                    value.zero_()


def distance(uploads: list[Tensors], expected: list[Tensors]) -> float:
    """Return the largest relative distance of any tensor from its expected value."""
    return max(
        float((got[name].float() - tensor.float()).norm() / tensor.float().norm())
        for got, expected_tensors in zip(uploads, expected, strict=True)
        for name, tensor in expected_tensors.items()
    )


def measure(preset: str, precision: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure every row; a failed row has its reason."""
    bench = Bench(preset, precision, options)
    rows: dict[str, Callable[[Bench], list[Tensors]]] = {
        FIRST: one_at_a_time,
        "together": together,
        "compiled": lambda bench: compiled(bench, options.backend),
    }
    if options.device == "cuda":
        rows["CUDA graph"] = Graph(bench)
    expected: list[Tensors] = []
    base = 0.0
    for name, row in rows.items():
        line: dict[str, Any] = {"preset": preset, "precision": precision, "row": name}
        try:
            uploads = row(bench)  # warms up
            expected = expected or uploads
            seconds = [timed(row, bench, options.device) for _ in range(options.repeat)]
        except Exception as error:  # noqa: BLE001 (a lever that fails is a finding)
            yield line | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            continue
        middle = statistics.median(seconds)
        base = base or middle
        waits = None
        if options.device == "cuda":
            waits = waiting_share(traced(lambda row=row: row(bench)), middle)  # type: ignore[misc]
        yield line | {
            "seconds": middle, "quicker": base / middle, "waits": waits,
            "apart": distance(uploads, expected),
        }  # fmt: skip


def timed(row: Callable[[Bench], list[Tensors]], bench: Bench, device: str) -> float:
    """Time a row."""
    synchronize(device)
    began = time.perf_counter()
    row(bench)
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu", "pretend"))
    parser.add_argument("--method", default="ravan", help="of the run config (default: ravan)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler"
    )
    parser.add_argument("--check", action="store_true", help="end with 1 if a float32 row differs")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    parser.add_argument("--folder", type=Path, help="keep the models and examples that are made")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Measure, and write a table and JSON."""
    options = parse_arguments(arguments)
    settle_device(options.device)
    with tempfile.TemporaryDirectory() as place:
        options.folder = options.folder or Path(place)
        return _all(options)


def _all(options: argparse.Namespace) -> int:
    print("| model | precision | clients | seconds | times as quick | GPU waits | apart |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    lines = []
    for preset in options.presets:
        for precision in options.precisions:
            for line in measure(preset, precision, options):
                lines.append(line)
                print(as_row(line), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"levers": lines}, indent=1) + "\n")
    wrong = [
        line
        for line in lines
        if line["precision"] == "float32" and not line.get("apart", 1.0) <= MOST_APART
    ]
    return int(options.check and bool(wrong))


def as_row(line: dict[str, Any]) -> str:
    """Return a line of the table."""
    about = f"| {line['preset']} | {line['precision']} | {line['row']} |"
    if "failed" in line:
        return f"{about} failed: {line['failed']} | | | |"
    waits = "" if line["waits"] is None else f"{line['waits']:.0%}"
    return (
        f"{about} {line['seconds']:.3f} | {line['quicker']:.2f} | {waits} | {line['apart']:.1e} |"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
