"""Turn an upload into the client's change of its broadcast, and back."""

from collections.abc import Mapping

from torch import Tensor

from ravan_flwr.methods.base import Method, Tensors, split_classifier
from ravan_flwr.methods.extensions import norm_limits


def find_start(method: Method, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
    """Return a valid upload's tensors as they were in the broadcast, before training."""
    trained, classifier = split_classifier(upload)
    sent_tensors, sent_classifier = split_classifier(sent)
    start = norm_limits(method).find_start(trained, sent_tensors)
    return start | {name: sent_classifier[name] for name in classifier}


def take_change(method: Method, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
    """Return the upload with changes in place of trained tensors; indices of heads stay."""
    start = find_start(method, upload, sent)
    return {name: t - start[name] if name in start else t for name, t in upload.items()}


def apply_change(method: Method, change: Mapping[str, Tensor], sent: Tensors) -> Tensors:
    """Return the upload with a change added to the broadcast, the inverse of `take_change`."""
    start = find_start(method, change, sent)
    return {name: start[name] + t if name in start else t for name, t in change.items()}
