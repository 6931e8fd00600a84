"""The method in the docstring of methods/base.py has the properties of all methods."""

import itertools
import sys
import textwrap
from inspect import signature
from types import ModuleType
from typing import Any

import pytest
import torch

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods import METHODS, MethodInfo, base
from ravan_flwr.methods.tensors import check_tensor, flatten, probe
from ravan_flwr.seeding import generator
from tests.properties import test_methods as properties

NAME = "smallest"
VALUES: dict[str, list[Any]] = {"case": list(properties.BAD_TENSORS), "fraction": [0.25, 1.0]}
# Its rank is given, not the largest within a budget.
OTHERS = (
    "test_the_rank_is_the_largest_within_the_budget",
    "test_a_rank_beyond_the_matrices_is_refused",
)


def of_all_methods():
    """Return the properties of all methods, each with its other parameters."""
    found = []
    for name, check in vars(properties).items():
        keys = list(signature(check).parameters) if name.startswith("test_") else []
        if "name" in keys and name not in OTHERS:
            others = [key for key in keys if key in VALUES]
            found += [
                pytest.param(
                    check,
                    dict(zip(others, values, strict=True)),
                    id="-".join([name, *map(str, values)]),
                )
                for values in itertools.product(*(VALUES[key] for key in others))
            ]
    assert len(found) > 20
    return found


def example():
    """Return the code in the docstring: from the class to the next line at the left margin."""
    lines = (base.__doc__ or "").splitlines()
    start = lines.index("    class Smallest(Method[LoRALinear]):")
    length = next(i for i, line in enumerate(lines[start:]) if line and not line.startswith(" "))
    return textwrap.dedent("\n".join(lines[start : start + length]))


@pytest.fixture(autouse=True)
def smallest(monkeypatch):
    names = {
        "LoRALinear": LoRALinear, "Method": base.Method, "check_tensor": check_tensor,
        "flatten": flatten, "generator": generator, "probe": probe, "torch": torch,
    }  # fmt: skip
    exec(example(), names)
    module = ModuleType(NAME)
    monkeypatch.setattr(module, "METHOD", names["Smallest"], raising=False)
    monkeypatch.setitem(sys.modules, f"ravan_flwr.methods.{NAME}", module)
    monkeypatch.setitem(METHODS, NAME, MethodInfo())


@pytest.mark.parametrize(("check", "more"), of_all_methods())
def test_the_documented_method_has_all_properties(check, more):
    check(name=NAME, **more)
