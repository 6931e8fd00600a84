"""Bring what a client trained, clipped and with its share of the noise, into a secure round's rows.

With `privacy=client` and `secure-aggregation=true` nobody but the client sees its change without
noise, so that it clips by itself (secure/noised.py has the numbers, docs/privacy.md the proof).
Noise comes from the system's entropy, rounding from the seed: it needs no secret.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.methods.base import Method
from ravan_flwr.privacy.mechanism import changes_from, clipping
from ravan_flwr.privacy.noise import gaussian
from ravan_flwr.secure.fixed_point import Numbers
from ravan_flwr.secure.noised import NoiseShares, Steps, to_numbers, within
from ravan_flwr.secure.schedule import Part, Schedule
from ravan_flwr.training.masked import CUT_OFF, filled_in, parts_of

WITHIN = "/within"  # whether a change was within the norm; no tensor has this name


def noised_parts(
    method: Method, state: Mapping[str, Tensor], noise: NoiseShares
) -> tuple[Part, ...]:
    """List what is summed up: all tensors, and a bit if the norm adapts."""
    parts = [
        Part(part.name, part.rows, part.size, noise.norm)
        for part in parts_of(method, state, 1.0)
        if part.name != CUT_OFF
    ]
    bits = [Part(WITHIN, 1, 1, noise.norm)] if noise.bits else []
    return (*parts, *bits)


def noise_in(config: Config, schedule: Schedule) -> NoiseShares:
    """Return the noise of a schedule; ValueError if it is not what the settings say."""
    noise = schedule.noise
    if noise is None:
        raise ValueError("privacy = 'client': got a schedule without noise, expected its shares")
    adapts = config.clip_norm is None
    if adapts != bool(noise.bits) or config.clip_norm not in (None, noise.norm):
        raise ValueError(
            f"got noise for a norm of {noise.norm}, and {noise.bits} on bits, expected clip-norm = "
            f"{config.clip_norm or 'auto'}"
        )
    wanted = config.noise_multiplier
    if wanted is not None and not noise.whole >= wanted * (1 - 1e-9):
        raise ValueError(f"got noise of multiplier {noise.whole:.4g}, expected {wanted:g}")
    return noise


def to_noised(
    method: Method,
    sent: Mapping[str, Tensor],
    upload: Mapping[str, Tensor] | None,
    schedule: Schedule,
    random: np.random.Generator,
) -> Numbers:
    """Clip a client's changes, round them, and add its share of the noise, row after row."""
    noise, clients = schedule.noise, len(schedule.partitions)
    assert noise is not None
    steps = clipped_steps(method, sent, upload, schedule, random)
    noises = gaussian([len(steps)], noise.deviation(clients)).numpy()
    return to_numbers(steps + np.rint(noises).astype(np.int64))


def clipped_steps(
    method: Method,
    sent: Mapping[str, Tensor],
    upload: Mapping[str, Tensor] | None,
    schedule: Schedule,
    random: np.random.Generator,
) -> Steps:
    """Make the whole numbers without noise: their norm is at most the clip norm.

    What is not finite counts as zero, and so does no upload at all: a client that failed for it
    would tell of its examples.
    """
    noise = schedule.noise
    assert noise is not None
    made = sent if upload is None else filled_in(method, sent, upload)
    filled = {
        name: tensor.double().nan_to_num(nan=np.nan, posinf=np.nan, neginf=np.nan)
        for name, tensor in made.items()
    }
    changes = changes_from(sent, filled)
    factor, is_within = clipping(changes, noise.norm)
    names = [part.name for part in schedule.parts if part.name != WITHIN]
    flat = np.concatenate([changes[name].numpy().reshape(-1) for name in names])
    steps = within(flat * (factor / noise.step), noise.norm / noise.step, random)
    if not noise.bits:
        return steps
    return np.append(steps, noise.bit if is_within else -noise.bit)
