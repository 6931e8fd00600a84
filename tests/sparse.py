"""FLASC's sparsification as in its paper, in slow loops."""

import torch


def by_hand(tensors, density, names):
    """Keep floor(density n) of each head's n numbers, at least one, and of all others together."""
    rows = []  # of (tensor, position) of each number
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    vectors = []
    for name in sorted(names):
        flat = result[name].reshape(-1)
        places = [(flat, at) for at in range(len(flat))]
        if result[name].ndim > 2:
            size = result[name].shape[-1] * result[name].shape[-2]
            rows += [places[at : at + size] for at in range(0, len(places), size)]
        else:
            vectors += places
    for row in [*rows, vectors]:
        num_kept = max(1, len(row) * density.numerator // density.denominator)
        order = sorted(range(len(row)), key=lambda n: (-abs(float(row[n][0][row[n][1]])), n))
        for flat, at in (row[n] for n in order[num_kept:]):
            flat[at] = 0.0
    assert all(torch.isfinite(tensor.float()).all() for tensor in result.values())
    return result
