"""One step of a client's optimiser: gradients, proximal term, clipping, Adam or AdamW."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ravan_flwr.tasks.base import Batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device: str, precision: str, *, cache_enabled: bool | None = None) -> torch.autocast:
    """Return a context in which matrix products are computed in this precision."""
    dtype = None if precision == "float32" else DTYPES[precision]
    return torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=cache_enabled)


def no_scaler(device: torch.device) -> torch.amp.GradScaler:
    """Return a gradient scaler that scales nothing: only float16 needs one."""
    return torch.amp.GradScaler(device.type, enabled=False)


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a client's training in one round."""

    num_steps: int
    batch_size: int
    learning_rate: float
    precision: str
    proximal_mu: float = 0.0  # FedProx adds mu / 2 |w - w at the start of the round|^2 to the loss
    batching: str = "random"
    micro_batch_size: int | None = None  # examples per backward pass; None: the whole batch
    packing: bool = False  # several short texts in one row
    weight_decay: float = 0.0
    max_gradient_norm: float = 0.0  # 0: no clipping


def adam(
    parameters: Sequence[Tensor], rate: float | Tensor, decay: float, device: torch.device,
    *, capturable: bool = False,
) -> torch.optim.Optimizer:  # fmt: skip
    """Return Adam, or AdamW with weight decay."""
    return (torch.optim.AdamW if decay else torch.optim.Adam)(
        parameters,
        lr=rate,
        weight_decay=decay,
        fused=True if device.type != "mps" else None,  # False would disable foreach, too
        capturable=capturable and device.type == "cuda",
    )


class OptimizerStep:
    """A step of a client's optimiser, which can be called again and again, and Adam's moments."""

    def __init__(
        self, parameters: Sequence[Tensor], settings: TrainingSettings,
        scaler: torch.amp.GradScaler, backward: Callable[[Sequence[Batch]], Tensor], *,
        capturable: bool = False, clients: int = 1,
    ) -> None:  # fmt: skip
        """Begin with a new optimiser; `backward` adds the gradients of the parts of a batch.

        The parameters may be those of several clients, one after the other.
        """
        self.parameters, self.settings, self.scaler = list(parameters), settings, scaler
        self.backward, self.clients = backward, clients
        device = parameters[0].device
        self.skipped = torch.zeros((), dtype=torch.long, device=device)
        self.anchors = [p.detach().clone() for p in parameters] if settings.proximal_mu else []
        self.rate: float | Tensor = settings.learning_rate
        if capturable:  # a tensor can change between replays; CUDA's kernel takes it in float32
            dtype = torch.float32 if device.type == "cuda" else torch.float64
            self.rate = torch.tensor(self.rate, dtype=dtype, device=device)
        self.optimizer = adam(
            self.parameters, self.rate, settings.weight_decay, device, capturable=capturable
        )

    def __call__(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Train on the parts of a batch, and return its mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.backward(micro_batches)
        if self.anchors or self.settings.max_gradient_norm:
            self.scaler.unscale_(self.optimizer)
        if self.anchors:
            pull_back(self.parameters, self.anchors, self.settings.proximal_mu)
        if self.settings.max_gradient_norm:
            self._clip()
        self.scaler.step(self.optimizer)
        if self.scaler.is_enabled():  # count a skipped step, without waiting for the GPU
            unit = torch.ones((), device=self.skipped.device)
            before = self.scaler.scale(unit)
            self.scaler.update()
            self.skipped += self.scaler.scale(unit) < before
        return loss

    def _clip(self) -> None:
        """Clip each client's gradient to the greatest norm."""
        max_norm = self.settings.max_gradient_norm
        if self.clients == 1:
            nn.utils.clip_grad_norm_(self.parameters, max_norm)
            return
        gradients = [p.grad.view(self.clients, -1) for p in self.parameters if p.grad is not None]
        norms = torch.stack([gradient.square().sum(1) for gradient in gradients]).sum(0).sqrt()
        factors = (max_norm / (norms + 1e-6)).clamp(max=1)  # as clip_grad_norm_
        for gradient in gradients:
            gradient.mul_(factors[:, None])

    def finish(self) -> Tensor:
        """Return the number of steps without effect."""
        return self.skipped


def pull_back(parameters: Sequence[Tensor], anchors: list[Tensor], mu: float) -> None:
    """Add the gradient of the proximal term, mu (w - anchor)."""
    with torch.no_grad():
        for parameter, anchor in zip(parameters, anchors, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - anchor, alpha=mu)
