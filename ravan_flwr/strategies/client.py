"""Take part with a PEFT model and any training loop: load, choose, train, collect, restore.

    load_arrays(model, arrays)              load the global arrays that the strategy sent
    choose(model, 0.5, score="weight")      train half of the adapter
    ... your loop, or Trainer.train() ...   over the parameters that require gradients
    reply = collect_arrays(model)           collect the arrays that the strategy expects
    restore(model)                          restore the built model for the next client

Until `restore`, heads that are not chosen are constants in the forward pass, and ranks that are not
chosen are left out of it. Neither has a gradient or optimiser state, and weight decay leaves both
unchanged. So make the optimiser after `choose`. `choose` parametrises the parameters
(torch.nn.utils.parametrize), and `restore` undoes that. State dicts still have whole tensors, so
the model is saved and loaded as usual.
"""

import numbers
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from ravan_flwr.adapters import Layer
from ravan_flwr.adapters.stored import weight_norm
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.lora import Residual
from ravan_flwr.methods.multihead import SCORINGS, best_heads
from ravan_flwr.strategies.base import RESIDUAL
from ravan_flwr.strategies.lora import check_residual
from ravan_flwr.strategies.ravan import BASES, HEADS
from ravan_flwr.training.adapted_model import norms_with_statistics

_PRETRAINED_WEIGHT = "_pretrained_weight"  # attribute of a layer whose weight has a residual added
_EARLIER_MODE = "_earlier_mode"  # attribute of a normalisation that stays in evaluation mode


def load_arrays(model: nn.Module, arrays: ArrayRecord) -> None:
    """Load the global arrays into the active adapter of a PEFT model, and undo `choose`.

    Scales that are missing become one. Residuals, of FedEx-LoRA and FedMomentum, are added to the
    pretrained weights until `restore`. Until then batch normalisations also use their pretrained
    running statistics in training, and leave them as they are: they are not sent, except those of
    `modules_to_save`. ValueError if an array is missing, unknown or of another shape: then no value
    has changed.

    Args:
        model: nn.Module. The model that `get_peft_model` returned.
        arrays: ArrayRecord. The message's record, with the names of `get_peft_model_state_dict`.
    """
    restore(model)
    tensors = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    check_residual(tensors)
    residual, rank = (tensors.pop(name, None) for name in RESIDUAL)
    current = _adapter_tensors(model)
    for name in [*current, *tensors]:
        if name not in tensors and _last_part(name) in ("ravan_s", *BASES):
            continue
        actual, expected = (tuple(x[name].shape) if name in x else None for x in (tensors, current))
        if actual != expected:
            shapes = ["none" if shape is None else f"shape {shape}" for shape in (actual, expected)]
            advice = "build the model as the server does, with the same configuration of PEFT"
            if name in model.state_dict():  # PEFT adds embeddings that are targets or were resized
                advice = (
                    "it is pretrained, so leave it out: at the server call "
                    "get_peft_model_state_dict(model, save_embedding_layers=False)"
                )
            raise ValueError(
                f"array {name!r}: got {shapes[0]}, the model expects {shapes[1]}; {advice}"
            )
    changes: list[tuple[Any, Tensor]] = []
    if residual is not None and rank is not None:
        changes = _residual_changes(model, residual, int(rank))
    with torch.no_grad():
        for name, tensor in current.items():
            if name in tensors:
                tensor.copy_(tensors[name])
            elif _last_part(name) == "ravan_s":
                tensor.fill_(1.0)
        for base, change in changes:
            setattr(base, _PRETRAINED_WEIGHT, base.weight.data)
            base.weight.data = base.weight.data + change.to(base.weight)
    sent = {tensor.data_ptr() for tensor in current.values()}
    for norm in norms_with_statistics(model):
        if cast(Tensor, norm.running_mean).data_ptr() not in sent:
            setattr(norm, _EARLIER_MODE, norm.training)
            norm.eval()
            # No hook, which code that torch.compile made before would leave out.
            norm.train = partial(_stay, norm)  # type: ignore[method-assign]


def _stay(norm: nn.Module, mode: bool = True) -> nn.Module:  # noqa: ARG001 (of train)
    """Change no mode, in place of `norm.train`."""
    return norm


def _residual_changes(model: nn.Module, flat: Tensor, rank: int) -> list[tuple[Any, Tensor]]:
    """Return base layers, each with its residual; ValueError for misfits."""
    layers = sorted(_adapted_layers(model, "lora_A"), key=lambda pair: pair[0])
    shapes = [Layer(name, layer.out_features, layer.in_features) for name, layer in layers]
    sizes = [Residual.size(shape, rank) for shape in shapes]
    if flat.numel() != sum(sizes):
        raise ValueError(
            f"arrays: got {flat.numel()} numbers that FedEx-LoRA adds to weights, or FedMomentum, "
            f"the model expects {sum(sizes)}; build the model as the server does, with the same "
            "configuration of PEFT"
        )
    changes = []
    for (_, layer), shape, part in zip(layers, shapes, flat.split(sizes), strict=True):
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)  # an attention, or the parameters of experts: none
        if weight is None or not weight.is_floating_point():
            got = f"a {type(base).__name__}" if weight is None else f"a weight of {weight.dtype}"
            raise ValueError(
                f"arrays: got what FedEx-LoRA or FedMomentum adds to a weight, and {got}, expected "
                "floating point, of a linear layer; load the backbone without quantisation, adapt "
                "linear layers only, or take another strategy"
            )
        change = layer.scaling[_active_adapter(model)] * Residual.read(shape, rank, part).dense()
        changes.append((base, change.mT if layer.fan_in_fan_out else change))
    return changes


def choose(
    model: nn.Module, fraction: float, score: str = "random", *, selection: str = "layer",
    generator: torch.Generator | None = None, backward: Callable[[], object] | None = None,
) -> dict[str, list[int]]:  # fmt: skip
    """Train only what a budget fraction allows: some heads, or the first ranks of a LoRA.

    Args:
        model: nn.Module. The model that `get_peft_model` returned, with the global arrays loaded.
        fraction: float. The client's budget fraction, above 0 and at most 1. It allows
            floor(fraction * heads) heads or floor(fraction * r) ranks of each layer, at least one.
        score: str (default: "random"). How heads are ranked. "random"; "weight": by how much they
            have changed their layer; "gradient": by how fast the loss falls along them.
        selection: str (default: "layer"). "layer": the same number of heads in each layer.
            "global": the same number on average, the best of all layers.
        generator: torch.Generator | None (default: None). Generator of random scores and of ties;
            None uses PyTorch's default generator. Pass one where the model is made from a fixed
            seed of PyTorch: all clients would choose the same heads.
        backward: Callable | None (default: None). Function that runs one mini-batch forward and
            backward; required for `score="gradient"`.

    Returns:
        The numbers of the chosen heads, or ranks, by layer name.
    """
    if not isinstance(fraction, numbers.Real) or not 0 < fraction <= 1:
        raise ValueError(
            f"fraction = {fraction!r}: expected a number above 0 and at most 1, the part of the "
            "adapter that this client trains; pass 0.5 for half of it, say"
        )
    choices = {"score": (score, SCORINGS), "selection": (selection, ("layer", "global"))}
    for argument, (value, names) in choices.items():
        if value not in names:
            raise ValueError(
                f"{argument} = {value!r}: expected one of {', '.join(names)}; pass "
                f"{argument}={names[0]!r}"
            )
    if score == "gradient" and backward is None:
        raise ValueError(
            "backward = None: score='gradient' expects a function that runs one mini-batch forward "
            "and backward; pass backward=lambda: model(**batch).loss.backward(), say"
        )
    adapter = _active_adapter(model)
    with_heads = _adapted_layers(model, "ravan_H")
    if not with_heads and not _adapted_layers(model, "lora_A"):
        raise ValueError(
            f"model: adapter {adapter!r} has neither heads nor a LoRA to choose from, expected "
            "one of RavanConfig or LoraConfig; make the model with it, or leave choose out"
        )
    for name, layer in _adapted_layers(model, "lora_A"):
        if hasattr(layer, "parameter_name"):
            raise ValueError(
                f"layer {name}: got a LoRA of the parameter {layer.parameter_name!r}, whose ranks "
                "PEFT orders by expert, expected LoRAs of linear layers; leave choose and the "
                "budget out, or target_parameters"
            )
    _undo_choice(model)
    chosen: dict[str, list[int]] = {}
    if with_heads:
        number = affordable(fraction, len(with_heads[0][1].ravan_H[adapter]))
        scores = _scores(score, model, with_heads, generator, backward)
        best = best_heads(scores, number, selection, generator)
        for (name, layer), heads in zip(with_heads, best, strict=True):
            chosen[name] = heads
            for parameters in (layer.ravan_H, layer.ravan_s):
                _train_slices(parameters, adapter, heads, keep=True)
    for name, layer in _adapted_layers(model, "lora_A"):
        A, B = layer.lora_A[adapter], layer.lora_B[adapter]
        chosen[name] = list(range(affordable(fraction, len(A.weight))))
        _train_slices(A, "weight", chosen[name], keep=False)
        _train_slices(B, "weight", chosen[name], keep=False, dim=1)
    return chosen


def collect_arrays(model: nn.Module) -> ArrayRecord:
    """Return the arrays that a client sends: the trained part of the active adapter, in float32.

    Args:
        model: nn.Module. The model that `get_peft_model` returned, after training.

    Returns:
        For a layer with heads: the products s_i H_i, (selected, r, r), and the heads' numbers,
        (selected,). For a LoRA: the trained factors, (r, in) and (out, r), with the chosen ranks.
        All other arrays of the adapter, such as those of `modules_to_save`, are whole.
    """
    adapter = _active_adapter(model)
    arrays = {
        k: t for k, t in _adapter_tensors(model).items() if _last_part(k) not in ("ravan_s", *BASES)
    }
    for name, layer in _adapted_layers(model, "ravan_H"):
        index = _chosen_slices(layer.ravan_H, adapter, len(layer.ravan_H[adapter]))
        products = layer.heads(adapter).cores()
        arrays[f"{name}.ravan_H"], arrays[f"{name}.{HEADS}"] = products[index], index
    for name, layer in _adapted_layers(model, "lora_A"):
        for part, dim in (("lora_A", 0), ("lora_B", 1)):
            factor = getattr(layer, part)[adapter]
            index = _chosen_slices(factor, "weight", factor.weight.shape[dim])
            arrays[f"{name}.{part}.weight"] = factor.weight.index_select(dim, index)
            if not factor.weight.requires_grad:
                del arrays[f"{name}.{part}.weight"]
    return ArrayRecord({name: _copied_to_cpu(tensor) for name, tensor in arrays.items()})


def restore(model: nn.Module) -> None:
    """Undo `choose`, and what `load_arrays` did to pretrained weights and normalisations.

    The adapter keeps its values. The parameters that were trainable before `choose` are trainable
    again.

    Args:
        model: nn.Module. The model that `get_peft_model` returned.
    """
    _undo_choice(model)
    for module in model.modules():
        if hasattr(module, _PRETRAINED_WEIGHT):
            # The model may have been moved, or cast, since.
            module.weight.data = getattr(module, _PRETRAINED_WEIGHT).to(module.weight)
            delattr(module, _PRETRAINED_WEIGHT)
        if hasattr(module, _EARLIER_MODE):
            del module.train
            module.train(getattr(module, _EARLIER_MODE) and model.training)
            delattr(module, _EARLIER_MODE)


def check_trained(model: nn.Module) -> list[str]:
    """Return the names of the trained parameters; ValueError unless `collect_arrays` has them all.

    Args:
        model: nn.Module. A model, which may be none of PEFT; without a choice of heads or ranks.
    """
    adapter = _active_adapter(model)
    if not _adapted_layers(model, "ravan_H") and not _adapted_layers(model, "lora_A"):
        peft: Any = model
        config = peft.peft_config[adapter]
        tuner = type(config if config.is_prompt_learning else peft.base_model).__name__
        raise ValueError(
            f"model: its adapter {adapter!r} is of a {tuner}, expected heads or a LoRA; make the "
            "model with RavanConfig or LoraConfig"
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not any(re.search(r"\b(ravan_H|lora_[AB])\b", name) for name in trained):
        raise ValueError(
            f"model: nothing of its adapter {adapter!r} is trained, expected some of it; load it "
            "with is_trainable=True, or freeze less"
        )
    sent = {tensor.data_ptr() for tensor in _adapter_tensors(model).values()}
    if others := [name for name, p in trained.items() if p.data_ptr() not in sent]:
        raise ValueError(
            f"model: {others[0]!r} is trained and not part of the adapter, so it would never be "
            "sent, expected trained parameters of the adapter alone; freeze it, or name its module "
            "in modules_to_save"
        )
    return sorted(trained)


def frozen_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of the active adapter that are not trained."""
    sent = {tensor.data_ptr() for tensor in _adapter_tensors(model).values()}
    return [p for p in model.parameters() if not p.requires_grad and p.data_ptr() in sent]


def _undo_choice(model: nn.Module) -> None:
    for module, name in list(_chosen_tensors(model)):
        slices: Any = module.parametrizations[name][0]  # type: ignore[index]
        slices.keep = True  # so the whole tensor keeps the values of slices that were not trained
        for hook in slices.hooks:
            hook.remove()
        parametrize.remove_parametrizations(module, name)
        getattr(module, name).grad = None  # its shape was that of the chosen slices


class _Slices(nn.Module):
    """Parametrise a tensor by its chosen slices; the other slices are constants, or zeros."""

    index: Tensor
    values: Tensor  # of all slices; `forward` replaces the chosen ones
    hooks: tuple[RemovableHandle, ...]  # registered on the module that has the tensor

    def __init__(self, tensor: Tensor, slices: list[int], *, keep: bool, dim: int) -> None:
        super().__init__()
        index = torch.tensor(slices, dtype=torch.long, device=tensor.device)
        self.register_buffer("values", tensor.detach().clone(), persistent=False)
        self.register_buffer("index", index, persistent=False)
        self.dim, self.keep = dim, keep

    def forward(self, trained: Tensor) -> Tensor:
        others = self.values if self.keep else torch.zeros_like(self.values)
        return others.index_copy(self.dim, self.index, trained)

    def right_inverse(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(self.dim, self.index)


def _train_slices(
    module: nn.Module, name: str, slices: list[int], *, keep: bool, dim: int = 0
) -> None:
    tensor = module.get_parameter(name)
    tensor.grad = None
    if len(slices) < tensor.shape[dim]:
        chosen = _Slices(tensor, slices, keep=keep, dim=dim)
        parametrize.register_parametrization(module, name, chosen)
        chosen.hooks = (
            module.register_state_dict_post_hook(partial(_save_whole, name)),
            module.register_load_state_dict_pre_hook(partial(_load_whole, name)),
        )


def _save_whole(name: str, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the trained slices in a state dict by the whole tensor."""
    slices: Any = module.parametrizations[name][0]  # type: ignore[index]
    trained = state.pop(f"{prefix}parametrizations.{name}.original")
    state[prefix + name] = slices.values.index_copy(slices.dim, slices.index, trained.detach())


def _load_whole(
    name: str, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:  # fmt: skip
    """Split a whole tensor of a state dict into trained slices and constants."""
    if prefix + name in state:
        slices: Any = module.parametrizations[name][0]  # type: ignore[index]
        slices.values.copy_(tensor := state.pop(prefix + name))
        state[f"{prefix}parametrizations.{name}.original"] = slices.right_inverse(tensor)


def _chosen_tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield module and name of each tensor of which slices were chosen."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name, stack in module.parametrizations.items():  # type: ignore[operator,union-attr]
                if isinstance(stack[0], _Slices):
                    yield module, name


def _chosen_slices(module: nn.Module, name: str, number: int) -> Tensor:
    """Return the numbers of a tensor's chosen slices: all `number` where none were chosen."""
    if parametrize.is_parametrized(module, name):
        parametrizations: Any = module.parametrizations
        index: Tensor = parametrizations[name][0].index
        return index
    return torch.arange(number, device=next(module.parameters()).device)


def _active_adapter(model: nn.Module) -> str:
    """Return the name of the active adapter; ValueError unless a PEFT model has exactly one."""
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "model: got what torch.compile returns, which has other names, expected the model of "
            "PEFT; pass that one, or compile it in place by model.compile()"
        )
    name = getattr(model, "active_adapter", None)
    if not isinstance(name, str):
        raise ValueError(
            f"model: got a {type(model).__name__} with the active adapter {name!r}, expected a "
            "model of PEFT with one; make it with get_peft_model"
        )
    return name


def _adapted_layers(model: nn.Module, attribute: str) -> list[tuple[str, Any]]:
    """Return the layers, by name, whose attribute has tensors of the active adapter."""
    adapter = _active_adapter(model)
    return [
        (name, module)
        for name, module in model.named_modules()
        if adapter in getattr(module, attribute, ())
    ]


def _adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole tensors of the active adapter; they share memory with the model."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415 (only clients with PEFT need it)

    adapter = _active_adapter(model)
    tensors = dict(
        get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    )
    for name, layer in _adapted_layers(model, "ravan_H"):
        for part in BASES:  # a state dict has contiguous copies of saved bases
            if f"{name}.{part}" in tensors:
                tensors[f"{name}.{part}"] = getattr(layer, part)[adapter]
    return tensors


def _scores(
    score: str, model: nn.Module, layers: list[tuple[str, Any]], generator: torch.Generator | None,
    backward: Callable[[], object] | None,
) -> Tensor:  # fmt: skip
    """Return the heads' scores, (layers, heads); higher is better."""
    adapter = _active_adapter(model)
    Hs = [layer.ravan_H[adapter] for _, layer in layers]
    if score == "random":
        return torch.rand(len(layers), len(Hs[0]), generator=generator)
    if score == "weight":
        norms = [
            layer.heads(adapter).cores().detach().norm(dim=(1, 2))
            / weight_norm(layer.get_base_layer())
            for _, layer in layers
        ]
    else:
        assert backward is not None
        model.zero_grad()
        backward()
        for H, (name, _) in zip(Hs, layers, strict=True):
            if H.grad is None:
                raise ValueError(
                    f"backward: the heads of {name} have no gradient after it, expected one for "
                    "every layer; pass backward=lambda: model(**batch).loss.backward(), say"
                )
        norms = [H.grad.norm(dim=(1, 2)) for H in Hs]
        model.zero_grad()
    return torch.stack(norms).cpu()


def _last_part(name: str) -> str:
    """Return the last part of an array's name."""
    return name.rpartition(".")[2]


def _copied_to_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor's values on the CPU, in float32 unless they are integers."""
    copied = tensor.detach().cpu().contiguous()
    return copied.float() if copied.is_floating_point() else copied
