"""Configure RAVAN's adapter for PEFT."""

import re
import warnings
from dataclasses import asdict, dataclass
from typing import Any, Literal

from peft import PeftConfig
from peft.utils import PeftType

from ravan_flwr.adapters.bases import SCHEMES

BIASES = ("none", "all", "ravan_only")


@dataclass
class RavanConfig(PeftConfig):
    """Configure heads y = W x + b + sum_i s_i B_i H_i A_i x on linear layers, for `get_peft_model`.

    H_i (r, r) and s_i are trained; W, b, B_i (out, r) and A_i (r, in) are frozen.

    Args:
        r (int, default 32): rank of each head: H_i is (r, r).
        num_heads (int, default 4): heads in each layer.
        init (str, default 'gram-schmidt'): how the bases B and A are made.
        base_seed (int, default 0): seed of the bases: the same seed, layer name and `init` give the
            same B and A.
        trainable_scales (bool, default True): train the scales s_i; otherwise they are frozen.
        target_modules (list[str] | str | None, default None): layers to adapt: a list of names or
            of their ends, a regular expression of whole names, or "all-linear"; None takes the
            usual ones of the architecture.
        exclude_modules (list[str] | str | None, default None): layers not to adapt, as a list or a
            regular expression.
        layers_to_transform (list[int] | int | None, default None): numbers of the blocks to adapt;
            needs `target_modules` as a list.
        layers_pattern (list[str] | str | None, default None): name of the list of blocks, such as
            "layer", for architectures that PEFT does not know.
        modules_to_save (list[str] | None, default None): other modules to train and save whole,
            such as a new classifier.
        bias (str, default 'none'): biases to train: none, all, or ravan_only, those of the adapted
            layers.
        fan_in_fan_out (bool, default False): all targets store their weight as (in, out), as
            GPT-2's Conv1D; a Conv1D is recognised without it.
        save_bases (bool, default False): save B and A in the adapter's folder, instead of making
            them when it is loaded.
        base_layers (dict[str, Any] | None, default None): sizes of the layers that the adapter was
            made for, and sums of bases; written when it is saved, checked when it is loaded.
    """

    r: int = 32
    num_heads: int = 4
    init: Literal["gram-schmidt", "normal", "constant", "shared-subspace"] = "gram-schmidt"
    base_seed: int = 0
    trainable_scales: bool = True
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    bias: Literal["none", "all", "ravan_only"] = "none"
    fan_in_fan_out: bool = False
    save_bases: bool = False
    base_layers: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = PeftType("RAVAN")
        for name in ("r", "num_heads"):
            if type(number := getattr(self, name)) is not int or number < 1:
                raise ValueError(
                    f"{name} = {number!r}: expected a whole number at least 1; set {name}=4, say"
                )
        if type(self.base_seed) is not int:
            raise ValueError(
                f"base_seed = {self.base_seed!r}: expected a whole number; set base_seed=0, say"
            )
        flags = dict.fromkeys(("trainable_scales", "fan_in_fan_out", "save_bases"), (True, False))
        for name, choices in {"init": tuple(SCHEMES), "bias": BIASES, **flags}.items():
            choice = getattr(self, name)
            if not isinstance(choice, type(choices[0])) or choice not in choices:
                raise ValueError(
                    f"{name} = {choice!r}: expected one of {', '.join(map(str, choices))}; choose "
                    "one"
                )
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(self.target_modules, str) and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} = {getattr(self, name)!r}, and target_modules = "
                    f"{self.target_modules!r} is a regular expression: expected target_modules as "
                    f"a list of names; give one, or leave {name} out"
                )
        for name in ("target_modules", "exclude_modules"):
            if isinstance(names := getattr(self, name), list):
                setattr(self, name, set(names))  # as in PEFT's other configurations
            elif isinstance(names, str):
                _check_expression(name, names)
            elif not isinstance(names, set | tuple | None):
                raise ValueError(
                    f"{name} = {names!r}: expected a list of names of layers, or a regular "
                    "expression; set it to ['query'], say"
                )
        self.adapted: dict[str, Any] | None = None  # `base_layers` of the model it is attached to
        self.unsaved: list[str] = []  # parameters of that model that a reload would draw anew

    def save_pretrained(self, save_directory: str, **options: Any) -> None:
        """Write `adapter_config.json`, which PEFT does after the adapter's tensors.

        Args:
            save_directory: the adapter's folder.
            options: as for PEFT's `PeftConfig`.
        """
        if self.unsaved:
            modules = sorted({name.rpartition(".")[0] for name in self.unsaved})
            warnings.warn(
                f"{save_directory}: {', '.join(self.unsaved)} were trained or newly drawn, and are "
                "not saved, so that the adapter loads onto other values and its result is lost; "
                "expected them in modules_to_save; make the configuration with "
                f'task_type="SEQ_CLS" (classifiers of texts) or modules_to_save={modules}, and '
                "train again",
                stacklevel=3,
            )
        super().save_pretrained(save_directory, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields in a form for JSON, with `base_layers` of the adapted model."""
        fields = asdict(self)
        if self.adapted is not None:
            fields["base_layers"] = self.adapted
        return {name: sorted(v) if isinstance(v, set) else v for name, v in fields.items()}


def _check_expression(name: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(
            f"{name} = {expression!r}: got no regular expression ({error}), expected one of whole "
            f"names; set {name}=r'.*\\.query', say, or a list of names"
        ) from error
