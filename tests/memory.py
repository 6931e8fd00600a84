"""What a training step of a real model keeps for its backward pass, as autograd saves it."""

from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def saved_for_backward(network):
    """Collect what autograd saves meanwhile, beside the network itself: storage -> bytes, tensor.

    The tensors are held, so that no storage is counted twice.
    """
    kept = {}
    there = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def kept_for_backward(loaded, fraction, batch_size, dtype=None):
    """Bytes kept, each storage once, and bytes trained, of a client with that share."""
    model = loaded.model
    with model.holding(model.initial_state()):
        model.method.choose(model.adapters, fraction, torch.Generator(), lambda: None)
        batch = loaded.test_sets["test"].take(np.arange(batch_size))
        model.network.train()
        with (
            saved_for_backward(model.network) as kept,
            torch.autocast("cpu", dtype, enabled=dtype is not None),
        ):
            loss = loaded.task.loss(model.network, batch)
        measured = sum(size for size, _ in kept.values())
        trained = sum(4 * p.numel() for p in model.parameters())
        del loss
    return measured, trained
