"""Pick the device that a process computes on, and look after its memory."""

import psutil
import torch

from ravan_flwr.training.gpus import tell_of_unused_gpus, unused_gpus


def pick_device(device: str) -> torch.device:
    """Find the device: `auto` is the best accelerator at hand; one that is named must be there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        tell_of_unused_gpus(torch.version.cuda)
        return torch.device("cpu")
    chosen = torch.device(device)
    number = chosen.index or 0
    present = {
        "cpu": True,
        "cuda": number < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }[chosen.type]
    if not present:
        unused = unused_gpus(torch.version.cuda) if chosen.type == "cuda" and not number else None
        raise ValueError(
            f"device = {device!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; expected one that is; use device=auto or device=cpu"
            + (f". {unused}" if unused else "")
        )
    return chosen


def further_gpus(device: torch.device, asked: str) -> list[torch.device]:
    """List the GPUs of this process beside its first, unless one was asked for by its number."""
    if device.type != "cuda" or asked not in ("auto", "cuda"):
        return []
    return [torch.device("cuda", number) for number in range(1, torch.cuda.device_count())]


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may take on a device: a GPU's, or the machine's."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free = torch.cuda.mem_get_info(device)[0]
    if torch.cuda.get_device_properties(device).is_integrated:  # it has the machine's memory, in
        free = max(free, int(psutil.virtual_memory().available))  # which files are kept as well
    return free + _held(device)


def give_back_memory(device: torch.device) -> None:
    """Let other processes have what PyTorch holds and does not use, where they have less of it.

    To take it again costs tens of milliseconds, each time.
    """
    if device.type == "cuda" and _held(device) > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()


def _held(device: torch.device) -> int:
    """Count the bytes that PyTorch holds and does not use, which this process can have again."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
