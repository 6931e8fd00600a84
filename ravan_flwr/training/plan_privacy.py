"""Say what a private run will spend, and how large its noise is, before anything runs."""

import math
from bisect import bisect

import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.methods.budgets import BUDGETS, SHARES
from ravan_flwr.privacy.account import epsilon_of, epsilon_seen, multiplier_for
from ravan_flwr.privacy.cohorts import most_rounds, why_not_masked
from ravan_flwr.privacy.example_gradients import check_trained
from ravan_flwr.privacy.example_mechanism import StepNoise, step_noise_norm
from ravan_flwr.privacy.expected import expected_clients, noise_norm
from ravan_flwr.privacy.mechanism import FIRST_NORM, Noise, reached
from ravan_flwr.secure.noised import NoiseShares
from ravan_flwr.secure.schedule import threshold_of
from ravan_flwr.training.cost import Skeleton
from ravan_flwr.training.model_and_data import get_model_and_data
from ravan_flwr.training.private_steps import sampling_rate


def privacy_told(config: Config, built: Skeleton, there: int) -> list[str]:
    """Tell it in lines of a plan; of a run that is not private there are none."""
    if config.privacy == "none":
        return []
    of = _of_clients if config.privacy == "client" else _of_examples
    return of(config, built, there)


def _of_clients(config: Config, built: Skeleton, there: int) -> list[str]:
    rate, rounds = min(1.0, config.clients_per_round / there), config.num_rounds
    z = config.noise_multiplier or multiplier_for(config.epsilon or 0, rate, config.delta, rounds)
    state = dict(built.method.initial_state(built.adapters))
    if built.classifier_size:
        state[CLASSIFIER] = torch.empty(built.classifier_size, device="meta")
    parts = zip(SHARES, BUDGETS[config.budgets], strict=True)
    clients = {share: part * there for share, part in parts if built.method.can_train(share)}
    expected = expected_clients(built.method, state, clients, rate)
    norm = config.clip_norm or FIRST_NORM
    noise = Noise(z, rate * there, config.clip_norm is None, config.noise_cohort)
    size = noise_norm(state, expected, noise.of_changes * norm)
    spent = epsilon_of(z, rate, config.delta, rounds)
    told = [
        f"privacy         epsilon {spent:.3f} after {rounds} rounds, delta {config.delta:g}, "
        f"noise multiplier {z:.4g},",
        f"                each of {there} clients in a round with probability {rate:.4g}; above",
        "                are the bytes of as many as are expected: rounds have more and fewer",
        f"                noise of norm {size:.4g} on a mean of changes that are clipped to "
        f"{norm:g}" + ("" if config.clip_norm else " at first"),
    ]
    if config.clip_norm is None:
        held = _rounds_held(config, spent, z, rate, 1)
        most = reached(norm, held)
        told.append(
            f"                it adapts, to at most {most:.3g} in the last of {held} rounds"
        )
    if config.noise_cohort:
        told.append(
            f"                a study: as {config.noise_cohort:,} clients a round would have"
        )
    return [*told, *_ends(config, spent, z, rate, 1, "ends it"), *_to_server(config, z, there)]


def _to_server(config: Config, z: float, there: int) -> list[str]:
    """Say what a server may learn that sees masked sums with noise in them."""
    if not config.secure_aggregation:
        return []
    rate = min(1.0, config.clients_per_round / there)
    least, rounds = config.secure_minimum, config.num_rounds
    if why := why_not_masked(there, rate, least, rounds, config.delta):
        raise ValueError(why)
    number = min(config.clients_per_round, there)
    each = NoiseShares(FIRST_NORM, z).left(number, threshold_of(number)) ** -2
    usual, most = _usual_rounds(config, there), most_rounds(there, rate, rounds)
    of_usual, of_most = (epsilon_seen(times * each, config.delta) for times in (usual, most))
    told = [
        f"                for the server, which knows who takes part: epsilon {of_usual:.3f} of a",
        f"                client in {usual} rounds, as many as are usual; each sends all heads",
    ]
    if most > usual:
        told.append(
            f"                {of_most:.3f} of the client that is drawn most often, in about {most}"
        )
    return told


def _of_examples(config: Config, built: Skeleton, there: int) -> list[str]:
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
