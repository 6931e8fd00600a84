"""FLASC's selection of numbers as its paper has it, in slow loops."""

import torch


def by_hand(tensors, density, names):
    """Keep floor(share n) of each head's n numbers, at least one, and of all others together."""
    rows = []  # of (tensor, position) of each number
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    together = []
    for name in sorted(names):
        flat = made[name].reshape(-1)
        places = [(flat, at) for at in range(len(flat))]
        if made[name].ndim > 2:
            size = made[name].shape[-1] * made[name].shape[-2]
            rows += [places[at : at + size] for at in range(0, len(places), size)]
        else:
            together += places
    for row in [*rows, together]:
        kept = max(1, len(row) * density.numerator // density.denominator)
        order = sorted(range(len(row)), key=lambda n: (-abs(float(row[n][0][row[n][1]])), n))
        for flat, at in (row[n] for n in order[kept:]):
            flat[at] = 0.0
    assert all(torch.isfinite(tensor.float()).all() for tensor in made.values())
    return made
