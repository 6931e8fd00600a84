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


def bytes_for_backward(loaded, fraction, batch_size, dtype=None):
    """Return a client's saved bytes, each storage once, and its trained bytes."""
    model = loaded.model
    with model.holding(model.initial_state()):
        model.method.choose(model.adapters, fraction, torch.Generator(), lambda: None)
        batch = loaded.test_sets["test"].take(np.arange(batch_size))
        model.network.train()
        with (
            saved_for_backward(model.network) as saved,
            torch.autocast("cpu", dtype, enabled=dtype is not None),
        ):
            loss = loaded.task.loss(model.network, batch)
        measured = sum(size for size, _ in saved.values())
        trained = sum(4 * p.numel() for p in model.parameters())
        del loss
    return measured, trained
