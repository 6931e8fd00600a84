"""Add RAVAN's heads to a model, for PEFT."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, AuxiliaryTrainingWrapper
from torch import nn

from ravan_flwr.adapters.attach import TARGETS
from ravan_flwr.adapters.bases import describe_bases
from ravan_flwr.peft.layer import RavanLinear


class RavanModel(BaseTuner):
    """A model with RAVAN's heads; `get_peft_model(model, RavanConfig(...))` creates it.

    Args:
        model: the model to adapt.
        config: the configuration, or a dict of configurations by adapter.
        adapter_name: the adapter's name, "default" from `get_peft_model`.

    Attributes:
        model: the adapted model.
        peft_config: the configurations by adapter.
    """

    prefix = "ravan_"
    tuner_layer_cls = RavanLinear
    target_module_mapping = {  # noqa: RUF012 (PEFT declares it otherwise)
        **{k: list(v) for k, v in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.items()},
        **{model_type: list(targets) for model_type, targets in TARGETS.items()},
    }

    def inject_adapter(
        self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        """Add an adapter to every target; see PEFT's `BaseTuner`."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        _check_base(model, adapter_name, self.peft_config[adapter_name])

    def _save_to_state_dict(self, *args: Any) -> None:
        """Note for each configuration, before PEFT saves it, what would be lost."""
        super()._save_to_state_dict(*args)
        configs: dict[str, Any] = self.peft_config
        for config in configs.values():
            config.unsaved = _unsaved(self.model, config)

    @contextmanager
    def _enable_peft_forward_hooks(self, *_: Any, **kwargs: Any) -> Iterator[None]:
        """Raise ValueError on a batch for several adapters; PEFT would run it through one."""
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "adapter_names: got a batch for several adapters, which RAVAN does not support, "
                "expected none; leave it out, and call set_adapter before each part of the batch"
            )
        yield

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,  # noqa: ARG002 (for tuners that adapt single parameters)
    ) -> None:
        layer_name = current_key.removeprefix("_orig_mod.")  # the prefix of a compiled model
        if isinstance(target, RavanLinear):
            target.update_layer(adapter_name, layer_name, peft_config)
            return
        layer = RavanLinear(target, adapter_name, layer_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)


def _unsaved(model: nn.Module, config: Any) -> list[str]:
    """Return the parameters that no folder has: neither the backbone's nor the adapter's.

    They are trained, or were drawn at random since transformers did not find them in the backbone's
    folder; and they belong to no adapter and to none of `modules_to_save`.
    """
    saved = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
        for parameter in module.parameters()
    }
    others = {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) not in saved
        and RavanModel.prefix not in name
        and not (config.bias != "none" and name.endswith("bias"))
    }
    # `from_pretrained` marks the parameters that it found. A model without a head may not use those
    # that it did not find; and PEFT itself saves embeddings that were resized.
    found = {name for name, p in others.items() if getattr(p, "_is_hf_initialized", False)}
    embeddings = {
        id(parameter)
        for get in ("get_input_embeddings", "get_output_embeddings")
        if isinstance(module := getattr(model, get, lambda: None)(), nn.Module)
        for parameter in module.parameters()
    }
    has_head = getattr(model, "base_model", model) is not model
    return [
        name
        for name, parameter in others.items()
        if parameter.requires_grad
        or (found and has_head and name not in found and id(parameter) not in embeddings)
    ]


def _check_base(model: nn.Module, adapter: str, config: Any) -> None:
    """Raise ValueError if a loaded adapter was made for other layers or with other bases."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RavanLinear) and adapter in module.ravan_H
    }
    bases = config.adapted = describe_bases(
        {n: (layer.ravan_B[adapter], layer.ravan_A[adapter]) for n, layer in layers.items()}
    )
    if (made_for := config.base_layers) is None:
        return
    try:
        other_layers = any(bases[key] != made_for[key] for key in ("first", "sizes"))
        pairs = list(zip(bases["sums"], map(float, made_for["sums"]), strict=True))
    except (LookupError, TypeError, ValueError):
        raise ValueError(
            f"adapter {adapter!r}: got base_layers = {made_for!r}, expected what `save_pretrained` "
            "writes; restore adapter_config.json, or leave base_layers out"
        ) from None
    if other_layers:
        raise ValueError(
            f"adapter {adapter!r}: got a {type(model).__name__} whose targets are {_sizes(bases)}, "
            f"expected {_sizes(made_for)}; load the model that the adapter was trained on, "
            f"{config.base_model_name_or_path or 'whose name is not saved with the adapter'}"
        )
    same = all(math.isclose(total, saved, rel_tol=1e-4, abs_tol=1e-4) for total, saved in pairs)
    if not same and not config.save_bases:
        raise ValueError(
            f"adapter {adapter!r}: torch {torch.__version__} makes bases that sum up to "
            f"{bases['sums']}, expected {made_for['sums']} as when the adapter was saved; restore "
            "adapter_config.json if it was edited, or load the adapter with the torch that it was "
            "trained with, and save it from there with save_bases=True"
        )


def _sizes(layers: dict[str, Any]) -> str:
    counts = " and ".join(
        f"{number} layers of {sides}" for sides, number in layers["sizes"].items()
    )
    return f"{counts}, the first of them {layers['first']}"
