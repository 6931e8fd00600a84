"""Measure the server's work in a round against Flower's FedAvg, and a registry of thousands.

    python benchmarks/server.py                    # two minutes

A reply has 1.16 million float32 numbers: RAVAN's H of ViT-B/16, 24 layers of 4 heads of rank 110,
which Flower's FedAvg gets as one Array in its own format. Both start from the messages and end
with the next global arrays; ours checks every reply (shape, dtype, finite, norm) on the way.
Sixteen different replies are used repeatedly, the two take turns, and a row is the median of
the repetitions. Memory is the growth of the process.

Methods that need the product of a LoRA's factors, over the same layers with rank 32, against the
same step with the (out, in) matrices: ten replies, and the next state.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from ravan_flwr.adapters import Layer
from ravan_flwr.messages.arrays import to_record, view_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Method, Settings
from ravan_flwr.methods.fedex_lora import FedExLora
from ravan_flwr.methods.fedit import FedIT
from ravan_flwr.methods.flexlora import FlexLora
from ravan_flwr.methods.hetlora import HetLora
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.ravan import Ravan
from ravan_flwr.methods.tensors import pack_bits
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.sampling import sample
from ravan_flwr.server.update_norm_check import UpdateNormCheck

LAYERS, HEADS, RANK, SIDE, DIFFERENT = 24, 4, 110, 768, 16
BAR, REGISTRY_BAR = 0.5, 0.010


def methods() -> tuple[dict[str, Method], dict[str, Method]]:
    """Make methods over ViT-B/16's adapted matrices, with equal numbers of parameters.

    Those whose next state is a mean, and those with products of factors.
    """
    layers = [Layer(str(n), SIDE, SIDE) for n in range(LAYERS)]
    settings = Settings(
        seed=0,
        lora_rank=32,
        rank=None,
        lora_scale=1.0,
        heads=HEADS,
        init="normal",
        calibration_steps=1,
        scaling="constant",
        scoring="random",
        selection="layer",
    )
    means: dict[str, type[Method]] = {"RAVAN": Ravan, "FedIT": FedIT}
    products: dict[str, type[Method]] = {
        "FlexLoRA": FlexLora,
        "HetLoRA": HetLora,
        "FedEx-LoRA": FedExLora,
    }
    return (
        {name: made(settings, layers, 0) for name, made in means.items()},
        {name: made(settings, layers, 0) for name, made in products.items()},
    )


def upload(method: Method, seed: int) -> dict[str, Tensor]:
    """Make a random upload of a client with the whole budget."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=random)
        for name, shape in method.upload_shapes(1.0).items()
    }
    if isinstance(method, Ravan):
        tensors["heads"] = pack_bits(torch.ones(LAYERS * HEADS, dtype=torch.bool))
    return tensors


def messages(records: list[ArrayRecord], number: int) -> Iterator[Message]:
    """Make random replies."""
    for n in range(number):
        metrics = MetricRecord({"num-examples": 10, "train-loss": 1.0})
        content = RecordDict({"arrays": records[n % len(records)], "metrics": metrics})
        yield Message(content, dst_node_id=0, message_type="train")


def of_flower(records: list[ArrayRecord], number: int) -> float:
    """Time Flower's FedAvg on these replies."""
    replies = list(messages(records, number))
    began = time.perf_counter()
    FedAvg().aggregate_train(1, replies)
    return time.perf_counter() - began


def of_ours(method: Method, records: list[ArrayRecord], number: int) -> float:
    """Time our aggregation of these replies."""
    state = {name: torch.zeros_like(t) for name, t in view_record(records[0]).items()}
    if isinstance(method, Ravan):
        state = {"H": state["H"].view(LAYERS, HEADS, *state["H"].shape[1:])}
    replies = list(messages(records, number))
    began = time.perf_counter()
    aggregate = Aggregate(method, state, UpdateNormCheck(1e6))
    for reply in replies:
        aggregate.check_and_add(view_record(reply.content.array_records["arrays"]), 1.0)
    to_record(aggregate.close())
    return time.perf_counter() - began


def of_factors(method: Method, uploads: list[dict[str, Tensor]]) -> float:
    """Time the server's step of a method of LoRAs."""
    state = method.initial_state([])
    began = time.perf_counter()
    sums = method.open_round(state)
    for one in uploads:
        sums.add(one, 1.0)
    sums.close()
    return time.perf_counter() - began


def of_matrices(method: Method, uploads: list[dict[str, Tensor]]) -> float:
    """Do the same with full matrices: their mean, their norms, their SVD."""
    assert isinstance(method, LoraMethod)
    began = time.perf_counter()
    factors = [method.split(upload) for upload in uploads]
    for layer in range(LAYERS):
        products = [Bs[layer].double() @ As[layer].double() for Bs, As in factors]
        if isinstance(method, HetLora):
            norms = [float(product.norm()) for product in products]
            for which in (0, 1):
                sum(n * pair[which][layer].double() for n, pair in zip(norms, factors, strict=True))
            continue
        mean = torch.stack(products).mean(0)
        if isinstance(method, FlexLora):
            torch.linalg.svd(mean, full_matrices=False)
        else:
            B, A = (torch.stack([p[w][layer].double() for p in factors]).mean(0) for w in (0, 1))
            mean -= B @ A
    return time.perf_counter() - began


def compared(
    ours: Callable[[], float], peer: Callable[[], float], repetitions: int
) -> tuple[float, float, float]:
    """Return the medians of both, which take turns, and of their ratios."""
    times = [(ours(), peer()) for _ in range(repetitions)]
    ratio = statistics.median(mine / theirs for mine, theirs in times)
    mine, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    return mine, theirs, ratio


def resident() -> float:
    """Read this process's memory in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def sampling(clients: int = 10_000) -> float:
    """Time the sampling of a round's clients from a large registry."""
    drawn_from = [
        RegisteredClient(
            node_id=n,
            partition_id=n,
            num_partitions=clients,
            own_data=False,
            examples=1,
            budget_fraction=1.0,
            device="cpu",
            free_memory=0,
            versions="",
            code="",
            backbone="",
            fingerprint=(),
        )
        for n in range(clients)
    ]
    times = []
    for number in range(9):
        began = time.perf_counter()
        sample(drawn_from, 100, 0, number)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replies", type=int, default=400)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="end with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    found: dict[str, dict[str, float]] = {}
    missed = []
    print("| aggregation | ms a reply | Flower's FedAvg, ms | ratio | MB grown |")
    print("| --- | --- | --- | --- | --- |")
    means, products = methods()
    for name, method in means.items():
        uploads = [upload(method, seed) for seed in range(DIFFERENT)]
        records = [to_record(tensors) for tensors in uploads]
        theirs = [
            ArrayRecord({"H": Array.from_torch_tensor(torch.cat([t.flatten() for t in floats]))})
            for floats in ([t for t in u.values() if t.is_floating_point()] for u in uploads)
        ]
        of_ours(method, records, DIFFERENT)
        before = resident()
        of_ours(method, records, options.replies)
        grown = resident() - before
        mine, peer, ratio = compared(
            partial(of_ours, method, records, options.replies),
            partial(of_flower, theirs, options.replies),
            options.repetitions,
        )
        mine, peer = mine * 1e3 / options.replies, peer * 1e3 / options.replies
        found[name] = {"ms": mine, "peer ms": peer, "ratio": ratio, "MB grown": grown}
        print(f"| {name} | {mine:.3f} | {peer:.3f} | {ratio:.2f} | {grown:.0f} |")
        if ratio > BAR:
            missed.append(f"{name}: {ratio:.2f} x FedAvg's time, bar {BAR}")
    print("\n| ten replies and the next state | seconds | by matrices | ratio |")
    print("| --- | --- | --- | --- |")
    for name, method in products.items():
        uploads = [upload(method, seed) for seed in range(10)]
        mine, peer, ratio = compared(
            partial(of_factors, method, uploads),
            partial(of_matrices, method, uploads),
            min(3, options.repetitions),
        )
        found[name] = {"s": mine, "peer s": peer, "ratio": ratio}
        print(f"| {name} | {mine:.2f} | {peer:.2f} | {ratio:.2f} |")
    seconds = sampling()
    found["registry"] = {"ms": seconds * 1e3}
    print(f"\n10,000 clients in the registry: {seconds * 1e3:.1f} ms to sample a round")
    if seconds > REGISTRY_BAR:
        missed.append(f"registry: {seconds * 1e3:.1f} ms, bar {REGISTRY_BAR * 1e3:g} ms")
    if options.json:
        options.json.write_text(json.dumps({"server": found}, indent=1) + "\n")
    for messages_ in missed:
        print("missed:", messages_)
    sys.exit(options.check and bool(missed))


if __name__ == "__main__":
    main()
