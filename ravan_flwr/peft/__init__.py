"""Provide RAVAN as a tuner of PEFT: `get_peft_model(model, RavanConfig(...))`.

Importing this package registers the tuner with PEFT, so that `PeftModel.from_pretrained` finds it.
"""

from typing import Any

try:
    import peft
except ImportError as error:
    raise ImportError(
        f"ravan_flwr.peft: PEFT cannot be imported ({error}), expected peft 0.19 or newer; "
        "install it, pip install 'peft>=0.19,<0.22'"
    ) from error
from peft.utils import PeftType, register_peft_method

from ravan_flwr.peft.config import RavanConfig
from ravan_flwr.peft.layer import RavanLinear
from ravan_flwr.peft.model import RavanModel

__all__ = ["RavanConfig", "RavanLinear", "RavanModel"]

NAME = "RAVAN"


def _register() -> None:
    """Add RAVAN to PEFT's registry and to its enum `PeftType`.

    PEFT registers external tuners, but only under a name that is a member of `PeftType`. Python has
    no public way to add a member to an enum. Only this function uses the enum's private attributes.
    """
    try:
        if NAME not in PeftType.__members__:
            member: Any = str.__new__(PeftType, NAME)
            member._name_ = member._value_ = NAME
            member.__objclass__ = PeftType
            member._sort_order_ = len(PeftType)
            type.__setattr__(PeftType, NAME, member)
            PeftType._member_map_[NAME] = PeftType._value2member_map_[NAME] = member
            PeftType._member_names_.append(NAME)
        register_peft_method(name=NAME.lower(), config_cls=RavanConfig, model_cls=RavanModel)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ImportError(
            f"ravan_flwr.peft: PEFT {peft.__version__} does not take RAVAN into its registry "
            f"({error}), expected a release from 0.19.0 to 0.21.2, with which this is tested; "
            "install one of them, pip install 'peft>=0.19,<0.22'"
        ) from error


_register()
