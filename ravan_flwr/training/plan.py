"""Describe the costs of a run before it starts: parameters, bytes, memory, time and privacy."""

import math
import textwrap
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.budgets import BUDGET_FRACTIONS, affordable
from ravan_flwr.optional import PLAN_RELEASES, load
from ravan_flwr.privacy.account import find_epsilon, multiplier_for
from ravan_flwr.runs.console import minutes
from ravan_flwr.simulated_time.devices import make_devices
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.cost import Skeleton, bytes_of_round, step_memory, step_seconds
from ravan_flwr.training.device_work import Workload
from ravan_flwr.training.model_and_data import make_task, settle
from ravan_flwr.training.network import likely_device


def plan_of(settings: Mapping[str, Scalar], num_clients: int | None = None) -> str:
    """Return the plan of a run with these settings as text."""
    config = settle(read_config(with_preset_path(settings)))
    if not config.model.shape:  # a preset with a shape needs no hub for its plan
        make_task(config).check_sizes()
    lines = [describe(replace(config, num_clients=number_of_clients(config, num_clients)))]
    if ineffective := without_effect(settings):
        lines += ["", *ineffective]
    return "\n".join(lines)


def describe(config: Config) -> str:
    """Return the plan of a configuration as text."""
    skeleton = Skeleton(config)
    num_clients = config.num_clients or number_of_clients(config)
    parts = (
        _sizes(config, skeleton),
        _clients(config, skeleton),
        _run(config, skeleton, num_clients),
    )
    size = config.micro_batch_size or config.batch_size
    assumed = f"Assumed: {size} examples at a time, Adam; docs/gpu.md has what is counted"
    exact = config.precision == "float32" and config.float32_matmul == "highest"
    if exact and likely_device(config.device) == "cuda":
        assumed += (
            "\nOn a GPU float32-matmul=tf32 and precision=bfloat16 are several times as fast as "
            "exact float32"
        )
    return "\n\n".join(["\n".join(part) for part in parts] + [assumed])


def _row(label: str, *texts: str) -> str:
    """Format a label with texts in a column beside it, each text on a new line."""
    lines = [line for text in texts for line in textwrap.wrap(text, 80, break_on_hyphens=False)]
    first, *rest = lines
    return "\n".join([f"{label:16}{first}", *(" " * 16 + line for line in rest)])


def _sizes(config: Config, skeleton: Skeleton) -> Iterator[str]:
    """Describe layers and parameters."""
    method, layers = skeleton.method, skeleton.method.layers
    sides = sorted({(layer.out_features, layer.in_features) for layer in layers}, reverse=True)
    shapes = ", ".join(f"{out_side} x {in_side}" for out_side, in_side in sides)
    adapters = method.trainable_parameters()
    note = f", {adapters:,} of them in the adapters" if skeleton.classifier_size else ""
    yield f"preset {config.preset}, method {config.method}, classifier {config.classifier}"
    yield _row(
        "adapted",
        f"{len(layers)} matrices of {shapes} (out x in)",
        f"{layers[0].name} ... {layers[-1].name}",
    )
    heads = f", {config.heads} heads" if METHODS[config.method].has_heads else ""
    yield _row("rank", f"{method.rank or 'any'}{heads}")
    yield _row(
        "trained",
        f"{adapters + skeleton.classifier_size:,} parameters{note}",
        f"a LoRA of rank {config.lora_rank} has {method.budget:,}; this is "
        f"{100 * adapters / method.budget:.1f} % of that",
    )


def _clients(config: Config, skeleton: Skeleton) -> Iterator[str]:
    """Tabulate bytes and memory by budget."""
    yield "                            bytes of a round            memory of a step, MB"
    yield "budget   trains            up          down    model  trained     kept      all"
    for fraction in BUDGET_FRACTIONS:
        if not skeleton.method.can_train(fraction):
            yield f"{fraction:<9g}not eligible: the method is trained whole or not at all"
            continue
        memory = step_memory(config, fraction)
        kept = memory.activations + memory.graph
        parts = (memory.weights, memory.trained, kept, memory.total)
        number = skeleton.method.budget_units
        trains = "all" if number is None else f"{affordable(fraction, number)}/{number}"
        yield (
            f"{fraction:<9g}{trains:<8}{skeleton.bytes_up(fraction):>12,}{skeleton.bytes_down(fraction):>14,}"
            + "".join(f"{part / 1e6:>9.1f}" for part in parts)
        )


def _run(config: Config, skeleton: Skeleton, num_clients: int) -> Iterator[str]:
    """Describe the traffic of a round and of the run, and the conditions that may end the run."""
    clients, rounds, method = config.num_replies(num_clients), config.num_rounds, skeleton.method
    up, down = clients * skeleton.bytes_up(1.0), clients * skeleton.bytes_down(1.0)
    all_up, all_down, calibration_bytes = rounds * up, rounds * down, 0
    if calibration := method.calibration:
        calibrated = num_clients if calibration.all_clients else config.num_asked(num_clients)
        reached = min(rounds * clients, num_clients)  # clients that get the fixed tensors
        initial = method.initial_state(skeleton.adapters)  # a calibration is sent in float32
        requests = calibrated * (
            method.broadcast_bytes(initial, 1.0) + 4 * skeleton.classifier_size
        )
        calibration_bytes = calibrated * calibration.bytes_up + requests
        all_up += calibrated * calibration.bytes_up
        all_down += requests + reached * calibration.bytes_down
        yield _row(
            "before round 1",
            f"{calibrated} clients send {calibration.bytes_up:,} bytes each; a client gets "
            f"{calibration.bytes_down:,} once",
        )
    evaluated = 0
    if config.evaluate_on == "clients":  # all clients get the state
        evaluated = num_clients * skeleton.bytes_down(1.0)
        all_down += math.ceil(rounds / config.eval_every) * evaluated
    epochs = config.local_epochs
    steps = (
        f"local-steps=epochs:{epochs:g}" if epochs else f"{config.local_steps} steps of a client"
    )
    if not method.trainable_parameters() and not skeleton.classifier_size:
        steps = "no step of a client, since nothing is trained"
    yield _row(
        "a round",
        f"{clients} of {num_clients} clients: at most {up:,} bytes up, {down:,} down",
        steps,
        _time_text(config, num_clients),
    )
    yield _row("the run", f"{rounds} rounds: at most {all_up:,} bytes up, {all_down:,} down")
    if method.trainable_parameters() or skeleton.classifier_size:
        yield _row("time", _measured(config, clients * (config.local_steps or 0)))
    if config.max_bytes is not None:
        spent, within, largest = calibration_bytes, 0, bytes_of_round(config, skeleton)
        while within < rounds and spent + largest <= config.max_bytes:
            within += 1
            # A round after which no further one may fit is evaluated, as the last one is.
            is_last = spent + 2 * largest > config.max_bytes
            evaluates = is_last or within % config.eval_every == 0
            spent += up + down + (evaluated if evaluates else 0)
        enough = "all" if within >= rounds else f"{within} of {rounds}"
        yield _row("max-bytes", f"{config.max_bytes:,.0f}: enough for {enough} rounds")
    if config.privacy != "none":
        yield _row("privacy", *_privacy(config, skeleton, num_clients))


def _measured(config: Config, steps: int) -> str:
    """Return how long this machine takes for so many steps in a round, from one that is tried."""
    device = likely_device(config.device)
    try:
        seconds = step_seconds(config)
    except Exception as error:  # noqa: BLE001 (a model of any kind, on any device; the rest holds)
        return f"not estimated: no step was tried on this machine ({device}): {error}"
    text = f"a step takes about {seconds:.2g} s on this machine ({device})"
    if steps:
        a_round = minutes(steps * seconds)
        the_run = minutes(config.num_rounds * steps * seconds)
        text += f": {a_round} a round, {the_run} for the run"
    beside = "evaluations and messages"
    if config.privacy != "none":
        beside = "evaluations, messages and what privacy takes"
    return (
        f"{text}. Tried just now, with made-up weights and examples. Clients one after another; "
        f"{beside} are not counted"
    )


def _time_text(config: Config, num_clients: int) -> str:
    """Return how long simulated devices take for a round with the whole budget, as text."""
    if config.devices is None:
        return ""
    work = Workload(config, num_clients, make_devices(config.devices, config.seed, num_clients))
    seconds = sorted(work.seconds(1.0, client) for client in range(num_clients))
    middle, slowest = seconds[num_clients // 2], seconds[-1]
    return f"{middle:,.3g} s on the median device, {slowest:,.3g} s on the slowest"


def _privacy(config: Config, skeleton: Skeleton, num_clients: int) -> Iterator[str]:
    """Describe what the run spends; of examples, at the client with the fewest of them."""
    if config.privacy == "client":
        releases, rate = 1, min(1.0, config.clients_per_round / num_clients)
        protected = f"of each of {num_clients} clients, in a round"
    else:
        releases, rate, protected = load(PLAN_RELEASES)(config, skeleton, num_clients)
    rounds, delta = config.num_rounds, config.delta
    z = config.noise_multiplier or multiplier_for(
        config.epsilon or 0, rate, delta, rounds * releases
    )

    def spent(number: int) -> float:
        return find_epsilon(z, rate, delta, number * releases)

    yield (
        f"epsilon {spent(rounds):.3f} after {rounds} rounds, delta {delta:g}, noise multiplier "
        f"{z:.4g}, {protected} with probability {rate:.4g}"
    )
    if config.epsilon is not None and spent(rounds) > config.epsilon:
        last_round = bisect(range(1, rounds + 1), config.epsilon, key=spent)
        yield f"epsilon = {config.epsilon:g} is spent after {last_round} rounds"
