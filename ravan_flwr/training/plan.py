"""Describe what a run will cost, for people, before anything runs."""

import math
import textwrap
from bisect import bisect
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.methods import BUDGET_FRACTIONS, BUDGETS, affordable
from ravan_flwr.privacy.account import StepNoise, epsilon_of, multiplier_for
from ravan_flwr.privacy.example_gradients import check_trained, step_noise_norm
from ravan_flwr.privacy.mechanism import FIRST_NORM, Noise, expected_clients, noise_norm
from ravan_flwr.simulated_time.devices import devices_of
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.cost import Skeleton, step_memory
from ravan_flwr.training.machine import unused_gpus
from ravan_flwr.training.model_and_data import get_model_and_data, make_task, settle
from ravan_flwr.training.private_steps import sampling_rate
from ravan_flwr.training.work import Workload


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
    lines = [describe(replace(config, num_clients=number_of_clients(config, num_clients)))]
    if idle := without_effect(settings):
        lines += ["", *idle]
    return "\n".join(lines)


def describe(config: Config) -> str:
    """Write the plan for people."""
    built = Skeleton(config)
    num_clients = config.num_clients or number_of_clients(config)
    parts = (_sizes(config, built), _clients(config, built), _run(config, built, num_clients))
    batch = [f"{config.batch_size}"]
    if config.micro_batch_size:
        batch.append(f"{config.micro_batch_size} at a time")
    assumed = f"Assumed: batches of {', '.join(batch)}, Adam; docs/gpu.md has what is counted"
    return "\n\n".join(["\n".join(part) for part in parts] + [assumed])


def _row(label: str, *texts: str) -> str:
    """Write a label, and beside it what it is about, each text from a new line on."""
    lines = [line for text in texts for line in textwrap.wrap(text, 80, break_on_hyphens=False)]
    first, *rest = lines
    return "\n".join([f"{label:16}{first}", *(" " * 16 + line for line in rest)])


def _sizes(config: Config, built: Skeleton) -> Iterator[str]:
    """Describe layers, parameters and effective rank."""
    method, layers = built.method, built.method.layers
    sides = sorted({(layer.out_features, layer.in_features) for layer in layers}, reverse=True)
    shapes = ", ".join(f"{out_side} x {in_side}" for out_side, in_side in sides)
    adapters, bound = method.trainable_parameters(), method.effective_rank_bound()
    note = f", {adapters:,} of them beside the classifier" if built.classifier_size else ""
    yield f"preset {config.preset}, method {config.method}, classifier {config.classifier}"
    yield _row(
        "adapted",
        f"{len(layers)} matrices of {shapes} (out x in)",
        f"{layers[0].name} ... {layers[-1].name}",
    )
    yield _row("rank", f"{method.rank or 'any'}" + (f", {config.heads} heads" if bound else ""))
    yield _row(
        "trained",
        f"{adapters + built.classifier_size:,} parameters{note}",
        f"a LoRA of rank {config.lora_rank} has {method.budget:,}; this is "
        f"{100 * adapters / method.budget:.1f} % of that",
    )
    if bound:
        number, side = adapters / len(layers), min(min(pair) for pair in sides)
        advice = suggested_heads(number, side)
        yield _row(
            "effective rank",
            f"at most {bound} in a matrix, of d = {side}",
            f"heads help while sqrt(N h) < d: with N = {number:,.0f} in a matrix, up to {advice} "
            f"heads; then it is {math.sqrt(number * advice):.0f}",
        )


def _clients(config: Config, built: Skeleton) -> Iterator[str]:
    """Tabulate bytes and memory by budget."""
    yield "                            bytes of a round            memory of a step, MB"
    yield "budget   trains            up          down    model  trained     kept      all"
    for fraction in BUDGET_FRACTIONS:
        if not built.method.can_train(fraction):
            yield f"{fraction:<9g}left out: the method is trained whole or not at all"
            continue
        memory = step_memory(config, fraction)
        parts = (memory.weights, memory.trained, memory.activations, memory.total)
        number = built.method.parts
        trains = "all" if number is None else f"{affordable(fraction, number)}/{number}"
        yield (
            f"{fraction:<9g}{trains:<8}{built.bytes_up(fraction):>12,}{built.bytes_down(fraction):>14,}"
            + "".join(f"{part / 1e6:>9.1f}" for part in parts)
        )


def bytes_of_round(config: Config, built: Skeleton | None = None) -> int:
    """Count what a round with an evaluation sends at most, up and down."""
    built = built or Skeleton(config)
    num_clients, down = config.num_clients or number_of_clients(config), built.bytes_down(1.0)
    evaluating = num_clients if config.evaluate_on == "clients" else 0
    return config.asked_of(num_clients) * (built.bytes_up(1.0) + down) + evaluating * down


def _run(config: Config, built: Skeleton, num_clients: int) -> Iterator[str]:
    """Describe what a round and the run send, and what may end the run."""
    clients, rounds, method = config.asked_of(num_clients), config.num_rounds, built.method
    up, down = clients * built.bytes_up(1.0), clients * built.bytes_down(1.0)
    all_up, all_down, before = rounds * up, rounds * down, 0
    if calibration := method.calibration:
        calibrated = num_clients if calibration.everyone else clients
        reached = min(rounds * clients, num_clients)  # clients that ever get the fixed tensors
        initial = method.initial_state(built.adapters)  # a calibration travels in float32
        requests = calibrated * (method.broadcast_bytes(initial, 1.0) + 4 * built.classifier_size)
        before = calibrated * calibration.bytes_up + requests
        all_up += calibrated * calibration.bytes_up
        all_down += requests + reached * calibration.bytes_down
        yield _row(
            "before round 1",
            f"{calibrated} clients send {calibration.bytes_up:,} bytes each; a client gets "
            f"{calibration.bytes_down:,} once",
        )
    if config.evaluate_on == "clients":  # which are all sent the state
        all_down += math.ceil(rounds / config.eval_every) * num_clients * built.bytes_down(1.0)
    reserve = clients - min(config.clients_per_round, num_clients)
    yield _row(
        "a round",
        f"{clients} of {num_clients} clients: at most {up:,} bytes up, {down:,} down",
        f"{reserve} of them are in reserve" if reserve else "",
        _work(config, built),
        _time(config, num_clients),
    )
    yield _row("the run", f"{rounds} rounds: at most {all_up:,} bytes up, {all_down:,} down")
    lacks_gpu = config.device != "cpu" and not torch.accelerator.is_available()
    if lacks_gpu and (why := unused_gpus(torch.version.cuda)):
        yield _row("GPU", why)
    if config.max_bytes is not None:
        fit = max(0, int((config.max_bytes - before) // bytes_of_round(config, built)))
        enough = "all" if fit >= rounds else f"{fit} of {rounds}"
        yield _row("max-bytes", f"{config.max_bytes:,.0f}: enough for {enough} rounds")
    if config.until_metric:
        text = f"{config.until_metric:g}: the round that reaches it is the last"
        yield _row("until-metric", text)
    if config.until_time:
        text = f"{config.until_time:g} s: the round that ends then is the last"
        yield _row("until-time", text)
    if config.privacy != "none":
        private = _private_clients if config.privacy == "client" else _private_examples
        yield _row("privacy", *private(config, built, num_clients))
    if (keys := built.around) is not None:
        yield _row(
            "secure",
            f"3 bytes a number up. Keys, shares and signatures of a client take {keys.up:,} bytes "
            f"up and {keys.down:,} down of a round of {config.clients_per_round}; each is asked 5 "
            "times",
        )


def _work(config: Config, built: Skeleton) -> str:
    """Say how many steps a client takes in a round."""
    if not built.method.trainable_parameters() and not built.classifier_size:
        return "no step of a client, since nothing is trained"
    if config.local_epochs is None:
        return f"{config.local_steps} steps of a client"
    passes = f"{config.local_epochs:g} pass{'es' * (config.local_epochs != 1)}"
    return f"{passes} of a client over its examples (plan --partition counts the steps)"


def _time(config: Config, num_clients: int) -> str:
    """Say how long simulated devices take for a round, with the whole budget."""
    if config.devices is None:
        return ""
    work = Workload(config, num_clients, devices_of(config.devices, config.seed, num_clients))
    seconds = sorted(work.seconds(1.0, client) for client in range(num_clients))
    middle, slowest = seconds[num_clients // 2], seconds[-1]
    return f"{middle:,.3g} s on the device in the middle, {slowest:,.3g} s on the slowest"


def _private_clients(config: Config, built: Skeleton, num_clients: int) -> Iterator[str]:
    rate, rounds = min(1.0, config.clients_per_round / num_clients), config.num_rounds
    z = config.noise_multiplier or multiplier_for(config.epsilon or 0, rate, config.delta, rounds)
    state = built.state()
    parts = zip(BUDGET_FRACTIONS, BUDGETS[config.parts("budgets")[""]], strict=True)
    clients = {
        fraction: part * num_clients for fraction, part in parts if built.method.can_train(fraction)
    }
    expected = expected_clients(built.method, state, clients, rate)
    norm = config.clip_norm or FIRST_NORM
    noise = Noise(z, rate * num_clients, config.clip_norm is None, config.noise_cohort)
    size = noise_norm(state, expected, noise.of_changes * norm)
    last_round = _last_round(config, z, rate, 1)
    yield (
        f"epsilon {epsilon_of(z, rate, config.delta, rounds):.3f} after {rounds} rounds, delta "
        f"{config.delta:g}, noise multiplier {z:.4g}, each of {num_clients} clients in a round "
        f"with probability {rate:.4g}"
    )
    yield "above are the bytes of as many as are expected: rounds have more and fewer"
    yield f"noise of norm {size:.4g} on a mean of changes that are clipped to {norm:g}" + (
        "" if config.clip_norm else " at first"
    )
    if config.noise_cohort:
        yield f"a study: as {config.noise_cohort:,} clients a round would have"
    if last_round < rounds:
        yield f"epsilon = {config.epsilon:g} ends it after {last_round} rounds"


def _private_examples(config: Config, built: Skeleton, num_clients: int) -> Iterator[str]:
    """Tell it of the client with the fewest examples, whose are drawn most often."""
    built.receive(1.0)
    trained = built.trained()
    check_trained(built.network, trained)
    fewest = min(filter(None, get_model_and_data(config).partition_sizes(num_clients)))
    rate, rounds = sampling_rate(config.batch_size, fewest), config.num_rounds
    steps = config.local_steps or 0
    z = config.noise_multiplier or multiplier_for(
        config.epsilon or 0, rate, config.delta, rounds * steps
    )
    noise = StepNoise(z, config.clip_norm or 0)
    numbers = sum(parameter.numel() for parameter in trained)
    size = step_noise_norm(numbers, noise, rate * fewest)
    usual = _usual_rounds(config, num_clients)
    epsilon, usual_epsilon = (epsilon_of(z, rate, config.delta, n * steps) for n in (rounds, usual))
    yield (
        f"of each example, at the client with the fewest ({fewest}): epsilon {epsilon:.3f} if it "
        f"trains in all {rounds} rounds, {usual_epsilon:.3f} in {usual}, as many as are usual; "
        f"delta {config.delta:g}, noise multiplier {z:.4g}, each example in a step with "
        f"probability {rate:.4g}"
    )
    yield (
        f"a step's gradient has noise of norm {size:.4g} on a mean of gradients that are clipped "
        f"to {noise.norm:g}"
    )
    last_round = _last_round(config, z, rate, steps)
    if last_round < rounds:
        yield f"epsilon = {config.epsilon:g} leaves such a client nothing after {last_round} rounds"


def _usual_rounds(config: Config, num_clients: int) -> int:
    """Count the rounds in which a client trains, in the mean."""
    return math.ceil(config.num_rounds * config.asked_of(num_clients) / num_clients - 1e-9)


def _last_round(config: Config, z: float, rate: float, steps: int) -> int:
    """Count the rounds that epsilon leaves room for."""

    def spent(rounds: int) -> float:
        return epsilon_of(z, rate, config.delta, rounds * steps)

    limit, rounds = config.epsilon, config.num_rounds
    if limit is None or spent(rounds) <= limit:
        return rounds
    return bisect(range(1, rounds + 1), limit, key=spent)
