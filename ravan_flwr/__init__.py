"""Federated fine-tuning with multi-head low-rank adapters (RAVAN), as a Flower app."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ravan_flwr.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]


def __getattr__(name: str) -> Any:
    """`simulate` and its result, imported when first used: they bring torch and Flower."""
    if name in __all__:
        from ravan_flwr import simulation  # noqa: PLC0415

        return getattr(simulation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
