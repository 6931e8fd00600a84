"""The bytes that autograd saves for the backward pass of a real model's training step."""

from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def saved_for_backward(network):
    """Collect what autograd saves beside the network's own tensors: storage -> (bytes, tensor).

    References to the tensors are held, so that no storage is counted twice.
    """
    saved = {}
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def saved_bytes(loaded, batch, fraction=1.0, dtype=None):
    """Return the bytes that a client's step saves for its backward pass, each storage once."""
    model = loaded.model
    autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
    with model.holding(model.initial_state()):
        model.method.choose(model.adapters, fraction, torch.Generator(), lambda: None)
        model.network.train()
        with saved_for_backward(model.network) as saved, autocast:
            loss = loaded.task.loss(model.network, batch)
        del loss
        trained = sum(4 * p.numel() for p in model.parameters())
    return sum(size for size, _ in saved.values()), trained


def bytes_for_backward(loaded, fraction, batch_size, dtype=None):
    """Return a client's saved bytes, each storage once, and its trained bytes."""
    batch = loaded.test_sets["test"].take(np.arange(batch_size))
    return saved_bytes(loaded, batch, fraction, dtype)
