"""Describe what a run will cost, for people, before anything runs."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import replace

import torch

from ravan_flwr.config.checks import told_without_effect
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.methods.base import Method
from ravan_flwr.methods.budgets import SHARES, affordable
from ravan_flwr.specs import Scalar
from ravan_flwr.training.backbone_dtype import likely_device
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.cost import Skeleton, step_memory
from ravan_flwr.training.gpus import unused_gpus
from ravan_flwr.training.model_and_data import make_task, settle
from ravan_flwr.training.plan_privacy import privacy_told
from ravan_flwr.training.threads import suitable_threads
from ravan_flwr.training.workers import most_workers


def suggested_heads(budget_a_layer: float, side: int) -> int:
    """Find the most heads, doubling from one, for which sqrt(N h) stays below d (section 4.3)."""
    heads = 1
    while math.sqrt(budget_a_layer * heads * 2) < side:
        heads *= 2
    return heads


def plan_of(settings: Mapping[str, Scalar], num_clients: int | None = None) -> str:
    """Read these settings and describe what their run will cost."""
    config = settle(read_config(own_preset(settings)))
    if not config.model.shape:  # of which a preset says enough for a plan without the hub
        make_task(config).check_sizes()
    told = [describe(replace(config, num_clients=number_of_clients(config, num_clients)))]
    if idle := told_without_effect(settings, config.method):
        told += ["", *idle]
    return "\n".join(told)


def describe(config: Config) -> str:
    """Write the plan for people."""
    built = Skeleton.build(config)
    return "\n".join(
        [*_sizes(config, built), "", *_clients(config, built), "", *_run(config, built)]
    )


def _sizes(config: Config, built: Skeleton) -> list[str]:
    """Describe layers, parameters and effective rank."""
    method, layers = built.method, built.layers
    sides = sorted({(layer.out_features, layer.in_features) for layer in layers}, reverse=True)
    side = min(min(pair) for pair in sides)
    shapes = ", ".join(f"{out_side} x {in_side}" for out_side, in_side in sides)
    adapters = method.trainable_parameters()
    bound = method.effective_rank_bound()
    lines = [
        f"preset {config.preset}, method {config.method}, classifier {config.classifier}",
        f"adapted         {len(layers)} matrices of {shapes} (out x in)",
        f"                {layers[0].name} ... {layers[-1].name}",
        f"rank            {method.rank or 'any'}" + (f", {config.heads} heads" if bound else ""),
        f"trained         {adapters + built.classifier_size:,} parameters"
        + (f", {adapters:,} of them beside the classifier" if built.classifier_size else ""),
        f"                a LoRA of rank {config.lora_rank} has {method.budget:,}; this is "
        f"{100 * adapters / method.budget:.1f} % of that",
    ]
    if bound:
        number = adapters / len(layers)
        advice = suggested_heads(number, side)
        lines += [
            f"effective rank  at most {bound} in a matrix, of d = {side}",
            f"                heads help while sqrt(N h) < d: with N = {number:,.0f} in a matrix,",
            f"                up to {advice} heads; then it is {math.sqrt(number * advice):.0f}",
        ]
    return lines


def _clients(config: Config, built: Skeleton) -> list[str]:
    """Tabulate bytes and memory by budget."""
    lines = [
        "                            bytes of a round            memory of a step, MB",
        "budget   trains            up          down    model  trained     kept      all",
    ]
    for share in SHARES:
        if not built.method.can_train(share):
            lines.append(f"{share:<9g}left out: the method is trained whole or not at all")
            continue
        memory = step_memory(config, share)
        parts = (memory.weights, memory.trained, memory.activations, memory.total)
        model, trained, kept, total = (f"{part / 1e6:.1f}" for part in parts)
        lines.append(
            f"{share:<9g}{_part(built.method, share):<8}"
            f"{built.bytes_up(share):>12,}{built.bytes_down(share):>14,}"
            f"{model:>9}{trained:>9}{kept:>9}{total:>9}"
        )
    return lines


def _batch(config: Config) -> str:
    """Say how many examples a step has, and how many, or of how many tokens, at a time."""
    part, tokens = config.micro_batch_size, config.micro_batch_tokens
    told = [f"{config.batch_size}", *([f"{part} at a time"] if part else [])]
    return ", ".join([*told, *([f"{tokens:,} tokens at a time"] if tokens else [])])


def _part(method: Method, share: float) -> str:
    """Say how much of the method a client trains."""
    return "all" if method.parts is None else f"{affordable(share, method.parts)}/{method.parts}"


def _work(config: Config, built: Skeleton) -> str:
    """Say how many steps a client takes in a round."""
    if not built.method.trainable_parameters() and not built.classifier_size:
        return "no step of a client, since nothing is trained"
    if config.local_epochs is None:
        return f"{config.local_steps} steps of a client"
    passes = f"{config.local_epochs:g} pass{'es' * (config.local_epochs != 1)}"
    return f"{passes} of a client over its examples (plan --partition counts the steps)"


def bytes_of_round(config: Config) -> int:
    """Count what a round with an evaluation sends at most, up and down."""
    return _bytes_of_round(config, Skeleton.build(config))


def _bytes_of_round(config: Config, built: Skeleton) -> int:
    there, down = config.num_clients or number_of_clients(config), built.bytes_down(1.0)
    evaluating = there if config.evaluate_on == "clients" else 0
    return config.asked_of(there) * (built.bytes_up(1.0) + down) + evaluating * down


def _side_by_side(config: Config, built: Skeleton, there: int) -> list[str]:
    """Say how many clients of a run in process work at a time on this machine."""
    alone = suitable_threads(built.size, config.batch_size)
    on_cpu = likely_device(config.device) == "cpu"
    workers = most_workers(config, there, alone, on_cpu=on_cpu)
    threads = f"{workers.threads} thread{'s' * (workers.threads != 1)}"
    each = f", {threads} each" if on_cpu else ", on the accelerator"
    if workers.number == 1:
        return [f"in process      one client after the other{each.removesuffix(' each')}"]
    when = "" if config.processes else ", once that saves two seconds"
    most = workers.number if config.processes else f"up to {workers.number}"
    return [f"in process      {most} clients at a time{each}{when}"]


def _unused_gpus(config: Config) -> list[str]:
    """Say which GPUs of this machine a run would not use, and why."""
    if config.device == "cpu" or torch.accelerator.is_available():
        return []
    told = unused_gpus(torch.version.cuda)
    return textwrap.wrap(told, 88, initial_indent="GPU             ") if told else []


def _fitting(config: Config, built: Skeleton, before: int) -> list[str]:
    """Say how many rounds a limit of bytes leaves."""
    if config.max_bytes is None:
        return []
    fit = max(0, int((config.max_bytes - before) // _bytes_of_round(config, built)))
    told = "all" if fit >= config.num_rounds else f"{fit} of {config.num_rounds}"
    return [f"max-bytes       {config.max_bytes:,.0f}: enough for {told} rounds"]


def _until(config: Config) -> list[str]:
    """Say what ends the run before its last round."""
    if not config.until_metric:
        return []
    return [f"until-metric    {config.until_metric:g}: the round that reaches it is the last"]


def _secure(config: Config, built: Skeleton) -> list[str]:
    """Say what of the bytes is there because uploads are masked."""
    if built.around is None:
        return []
    up, down, most = built.around.up, built.around.down, config.clients_per_round
    return [
        "secure          3 bytes a number up. Keys, shares and signatures of a client take",
        f"                {up:,} bytes up and {down:,} down of a round of {most}; each is asked 5 "
        "times",
    ]


def _of_examples(config: Config) -> list[str]:
    """Say what of the memory is for private steps."""
    if config.privacy != "example":
        return []
    return [
        "With privacy=example kept has the gradients of each example that is worked on at a time,",
        "in place of one for all, what adapted layers read, and the sums in float64.",
    ]


def _run(config: Config, built: Skeleton) -> list[str]:
    """Describe the bytes of a round and of the run, and what was assumed."""
    there = config.num_clients or number_of_clients(config)
    clients = config.asked_of(there)
    reserve = clients - min(config.clients_per_round, there)
    up, down = clients * built.bytes_up(1.0), clients * built.bytes_down(1.0)
    rounds, method = config.num_rounds, built.method
    calibration = method.calibration
    first, fixed = (calibration.bytes_up, calibration.bytes_down) if calibration else (0, 0)
    calibrated = there if calibration and calibration.everyone else clients
    reached = min(rounds * clients, there)  # those that ever get the fixed tensors
    initial = method.initial_state(built.adapters)  # a calibration travels in float32
    asked = calibrated * (method.broadcast_bytes(initial, 1.0) + 4 * built.classifier_size)
    all_up = rounds * up + (calibrated * first)
    all_down = rounds * down + (asked + reached * fixed if first else 0)
    if config.evaluate_on == "clients":  # which are all sent the state
        evaluations = math.ceil(rounds / config.eval_every)
        all_down += evaluations * there * built.bytes_down(1.0)
    told = [
        f"before round 1  {calibrated} clients send {first:,} bytes each; a client gets {fixed:,} "
        "once",
    ]
    return [
        *(told if first else []),
        f"a round         {clients} of {there} clients: at most {up:,} bytes up,",
        f"                {down:,} down",
        *([f"                {reserve} of them are in reserve"] if reserve else []),
        f"                {_work(config, built)}",
        f"the run         {rounds} rounds: at most {all_up:,} bytes up,",
        f"                {all_down:,} down",
        *_side_by_side(config, built, there),
        *_unused_gpus(config),
        *_fitting(config, built, calibrated * first + asked if first else 0),
        *_until(config),
        *privacy_told(config, built, there),
        *_secure(config, built),
        "",
        f"Assumed: batches of {_batch(config)}, Adam. model: backbone and bases.",
        "trained: values, gradients, moments. kept: what autograd saves in a forward pass,",
        "in float32; with it, in a precision of 16 bits, autocast's copies of frozen weights,",
        "and with gradient checkpointing what one block computes again; of a language model's",
        "logits as many as are computed at a time, every token counted; of attention what the",
        "device's kernel keeps. Gradients in flight and the workspace of the backend come on top;",
        "so do the second copy of the adapted matrices in FedEx-LoRA and FLoRA, and Adam's moments",
        "of them in Fed-SB's first round.",
        *_of_examples(config),
    ]
