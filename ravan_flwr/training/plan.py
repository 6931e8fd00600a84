"""Describe what a run will cost, for people, before anything runs."""

import math
import textwrap
from bisect import bisect
from collections.abc import Mapping
from dataclasses import replace

import torch

from ravan_flwr.config.checks import without_effect
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.methods import BUDGETS, SHARES, affordable
from ravan_flwr.privacy.account import StepNoise, epsilon_of, multiplier_for
from ravan_flwr.privacy.example_gradients import check_trained, step_noise_norm
from ravan_flwr.privacy.mechanism import FIRST_NORM, Noise, expected_clients, noise_norm
from ravan_flwr.simulated_time.devices import devices_of
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.cost import Skeleton, step_memory
from ravan_flwr.training.device import most_workers, suitable_threads
from ravan_flwr.training.machine import unused_gpus
from ravan_flwr.training.model_and_data import get_model_and_data, make_task, settle
from ravan_flwr.training.network import likely_device
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
    told = [describe(replace(config, num_clients=number_of_clients(config, num_clients)))]
    if idle := without_effect(settings):
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
    method, layers = built.method, built.method.layers
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
        number = built.method.parts
        trains = "all" if number is None else f"{affordable(share, number)}/{number}"
        lines.append(
            f"{share:<9g}{trains:<8}"
            f"{built.bytes_up(share):>12,}{built.bytes_down(share):>14,}"
            f"{model:>9}{trained:>9}{kept:>9}{total:>9}"
        )
    return lines


def _work(config: Config, built: Skeleton) -> str:
    """Say how many steps a client takes in a round."""
    if not built.method.trainable_parameters() and not built.classifier_size:
        return "no step of a client, since nothing is trained"
    if config.local_epochs is None:
        return f"{config.local_steps} steps of a client"
    passes = f"{config.local_epochs:g} pass{'es' * (config.local_epochs != 1)}"
    return f"{passes} of a client over its examples (plan --partition counts the steps)"


def bytes_of_round(config: Config, built: Skeleton | None = None) -> int:
    """Count what a round with an evaluation sends at most, up and down."""
    built = built or Skeleton.build(config)
    there, down = config.num_clients or number_of_clients(config), built.bytes_down(1.0)
    evaluating = there if config.evaluate_on == "clients" else 0
    return config.asked_of(there) * (built.bytes_up(1.0) + down) + evaluating * down


def _time(config: Config, there: int) -> list[str]:
    """Say how long simulated devices take for a round, with the whole budget."""
    if config.devices is None:
        return []
    work = Workload(config, there, devices_of(config.devices, config.seed, there))
    seconds = sorted(work.seconds(1.0, client) for client in range(there))
    return [
        f"                {seconds[there // 2]:,.3g} s on the device in the middle, "
        f"{seconds[-1]:,.3g} s on the slowest",
    ]


def _side_by_side(config: Config, built: Skeleton, there: int) -> str:
    """Say how many clients of a run in process work at a time on this machine."""
    alone = suitable_threads(built.method.size, config.batch_size)
    on_cpu = likely_device(config.device) == "cpu"
    workers = most_workers(config, there, alone, on_cpu=on_cpu)
    threads = f"{workers.threads} thread{'s' * (workers.threads != 1)}"
    if workers.number == 1:
        where = threads if on_cpu else "on the accelerator"
        return f"in process      one client after the other, {where}"
    where = f"{threads} each" if on_cpu else "on the accelerator"
    when = "" if config.processes else ", once that saves two seconds"
    most = workers.number if config.processes else f"up to {workers.number}"
    return f"in process      {most} clients at a time, {where}{when}"


def _run(config: Config, built: Skeleton) -> list[str]:
    """Describe the bytes of a round and of the run, and what was assumed."""
    there = config.num_clients or number_of_clients(config)
    lines, before = _sent(config, built, there)
    lines += [_side_by_side(config, built, there)]
    if config.device != "cpu" and not torch.accelerator.is_available():
        why = unused_gpus(torch.version.cuda)
        lines += textwrap.wrap(why, 88, initial_indent="GPU             ") if why else []
    lines += _end(config, built, before)
    if config.privacy != "none":
        private = _private_clients if config.privacy == "client" else _private_examples
        lines += private(config, built, there)
    if built.around is not None:
        keys, most = built.around, config.clients_per_round
        lines += [
            "secure          3 bytes a number up. Keys, shares and signatures of a client take",
            f"                {keys.up:,} bytes up and {keys.down:,} down of a round of {most}; "
            "each is asked 5 times",
        ]
    return [*lines, "", _assumed(config)]


def _sent(config: Config, built: Skeleton, there: int) -> tuple[list[str], int]:
    """Describe what a round and the run send; return the bytes of a calibration as well."""
    clients = config.asked_of(there)
    up, down = clients * built.bytes_up(1.0), clients * built.bytes_down(1.0)
    rounds, method = config.num_rounds, built.method
    lines, before = list[str](), (0, 0)
    if calibration := method.calibration:
        first, fixed = calibration.bytes_up, calibration.bytes_down
        calibrated = there if calibration.everyone else clients
        reached = min(rounds * clients, there)  # those that ever get the fixed tensors
        initial = method.initial_state(built.adapters)  # a calibration travels in float32
        asked = calibrated * (method.broadcast_bytes(initial, 1.0) + 4 * built.classifier_size)
        before = calibrated * first, asked
        lines += [
            f"before round 1  {calibrated} clients send {first:,} bytes each; a client gets "
            f"{fixed:,} once"
        ]
    all_up = rounds * up + before[0]
    all_down = rounds * down + (before[1] + reached * fixed if calibration else 0)
    if config.evaluate_on == "clients":  # which are all sent the state
        evaluations = math.ceil(rounds / config.eval_every)
        all_down += evaluations * there * built.bytes_down(1.0)
    lines += [
        f"a round         {clients} of {there} clients: at most {up:,} bytes up,",
        f"                {down:,} down",
    ]
    if reserve := clients - min(config.clients_per_round, there):
        lines += [f"                {reserve} of them are in reserve"]
    lines += [
        f"                {_work(config, built)}",
        *_time(config, there),
        f"the run         {rounds} rounds: at most {all_up:,} bytes up,",
        f"                {all_down:,} down",
    ]
    return lines, sum(before)


def _end(config: Config, built: Skeleton, before: int) -> list[str]:
    """Say what may end the run before its last round; `before` are the bytes before the first."""
    lines = []
    if config.max_bytes is not None:
        rounds = config.num_rounds
        fit = max(0, int((config.max_bytes - before) // bytes_of_round(config, built)))
        enough = "all" if fit >= rounds else f"{fit} of {rounds}"
        lines += [f"max-bytes       {config.max_bytes:,.0f}: enough for {enough} rounds"]
    if config.until_metric:
        value = config.until_metric
        lines += [f"until-metric    {value:g}: the round that reaches it is the last"]
    if config.until_time:
        lines += [f"until-time      {config.until_time:g} s: the round that ends then is the last"]
    return lines


def _assumed(config: Config) -> str:
    """Say what the numbers assume."""
    batch = [f"{config.batch_size}"]
    batch += [f"{config.micro_batch_size} at a time"] if config.micro_batch_size else []
    return f"Assumed: batches of {', '.join(batch)}, Adam; docs/gpu.md has what is counted"


def _private_clients(config: Config, built: Skeleton, there: int) -> list[str]:
    rate, rounds = min(1.0, config.clients_per_round / there), config.num_rounds
    z = config.noise_multiplier or multiplier_for(config.epsilon or 0, rate, config.delta, rounds)
    state = built.state()
    parts = zip(SHARES, BUDGETS[config.parts("budgets")[""]], strict=True)
    clients = {share: part * there for share, part in parts if built.method.can_train(share)}
    expected = expected_clients(built.method, state, clients, rate)
    norm = config.clip_norm or FIRST_NORM
    noise = Noise(z, rate * there, config.clip_norm is None, config.noise_cohort)
    size = noise_norm(state, expected, noise.of_changes * norm)
    spent = epsilon_of(z, rate, config.delta, rounds)
    lines = [
        f"privacy         epsilon {spent:.3f} after {rounds} rounds, delta {config.delta:g}, "
        f"noise multiplier {z:.4g},",
        f"                each of {there} clients in a round with probability {rate:.4g}; above",
        "                are the bytes of as many as are expected: rounds have more and fewer",
        f"                noise of norm {size:.4g} on a mean of changes that are clipped to "
        f"{norm:g}" + ("" if config.clip_norm else " at first"),
    ]
    if config.noise_cohort:
        lines.append(
            f"                a study: as {config.noise_cohort:,} clients a round would have"
        )
    return lines + _ends(config, spent, z, rate, 1, "ends it")


def _private_examples(config: Config, built: Skeleton, there: int) -> list[str]:
    """Tell it of the client with the fewest examples, whose are drawn most often."""
    method, adapters = built.largest_round(), built.adapters
    method.load(adapters, method.broadcast(method.initial_state(adapters), 1.0))  # what is trained
    trained = [*method.parameters(adapters), *built.classifier]
    check_trained(built.network, trained)
    fewest = min(filter(None, get_model_and_data(config).partition_sizes(there)))
    rate, rounds = sampling_rate(config.batch_size, fewest), config.num_rounds
    steps = config.local_steps or 0
    z = config.noise_multiplier or multiplier_for(
        config.epsilon or 0, rate, config.delta, rounds * steps
    )
    noise = StepNoise(z, config.clip_norm or 0)
    numbers = sum(parameter.numel() for parameter in trained)
    size = step_noise_norm(numbers, noise, rate * fewest)
    spent, usual = epsilon_of(z, rate, config.delta, rounds * steps), _usual_rounds(config, there)
    then = epsilon_of(z, rate, config.delta, usual * steps)
    return [
        f"privacy         of each example, at the client with the fewest ({fewest}): epsilon "
        f"{spent:.3f} if it trains in",
        f"                all {rounds} rounds, {then:.3f} in {usual}, as many as are usual; delta "
        f"{config.delta:g}, noise",
        f"                multiplier {z:.4g}, each example in a step with probability {rate:.4g}",
        f"                a step's gradient has noise of norm {size:.4g} on a mean of gradients "
        "that",
        f"                are clipped to {noise.norm:g}",
        *_ends(config, spent, z, rate, steps, "leaves such a client nothing"),
    ]


def _usual_rounds(config: Config, there: int) -> int:
    """Count the rounds in which a client trains, in the mean."""
    return math.ceil(config.num_rounds * config.asked_of(there) / there - 1e-9)


def _ends(config: Config, spent: float, z: float, rate: float, steps: int, what: str) -> list[str]:
    """Say after how many rounds epsilon is spent, if it is before the last."""
    held = _rounds_held(config, spent, z, rate, steps)
    if held == config.num_rounds:
        return []
    return [f"                epsilon = {config.epsilon:g} {what} after {held} rounds"]


def _rounds_held(config: Config, spent: float, z: float, rate: float, steps: int) -> int:
    """Count the rounds that epsilon leaves room for, of which all would spend so much."""
    limit, rounds = config.epsilon, config.num_rounds
    if limit is None or spent <= limit:
        return rounds
    held = range(1, rounds + 1)
    return bisect(held, limit, key=lambda n: epsilon_of(z, rate, config.delta, n * steps))
