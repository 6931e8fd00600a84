"""Pick the device that a process computes on."""

import torch

from ravan_flwr.training.gpus import tell_of_unused_gpus


def pick_device(device: str) -> torch.device:
    """Find the device: `auto` is the best accelerator at hand; one that is named must be there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        tell_of_unused_gpus(torch.backends.cuda.is_built())
        return torch.device("cpu")
    chosen = torch.device(device)
    number = chosen.index or 0
    present = {
        "cpu": True,
        "cuda": number < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }[chosen.type]
    if not present:
        raise ValueError(
            f"device = {device!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; expected one that is; use device=auto or device=cpu"
        )
    return chosen
