"""A delivered result and the node's answer are validated before use."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.extras.delivery.parcel import (
    Parcel,
    check_run_name,
    check_state,
    confirmation,
    read_answer,
    read_parcel,
    refusal,
)
from ravan_flwr.methods.tensors import checksum

PARCEL = Parcel("20260101-120000-digits-vit-ravan-seed0", "a" * 16, 3, "0" * 16, '{"rounds": 3}')


def test_a_parcel_round_trips():
    assert read_parcel(PARCEL.as_config()) == PARCEL
    assert read_parcel(PARCEL.as_config() | {"round": 3, "budget-fraction": 0.5}) == PARCEL
    assert PARCEL.run_summary == {"rounds": 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": 7}, "run is 7, expected"),
        ({"run": ""}, "the run's name is ''"),
        ({"run": ".."}, "the run's name is"),
        ({"run": "../../etc"}, "the run's name is"),
        ({"run": "/etc"}, "the run's name is"),
        ({"run": "a/b"}, "the run's name is"),
        ({"run": "a\\b"}, "the run's name is"),
        ({"run": ".ssh"}, "the run's name is"),
        ({"run": "run\n"}, "the run's name is"),
        ({"run": "run\0"}, "the run's name is"),
        ({"run": "run."}, "the run's name is"),
        ({"run": "x" * 151}, "the run's name is"),
        ({"run-id": "../../../../etc/x"}, "run-id is"),
        ({"run-id": None}, "run-id is None, expected"),
        ({"checksum": "0" * 15}, "checksum is"),
        ({"last-round": True}, "last-round is True, expected"),
        ({"last-round": -1}, "last-round is -1"),
        ({"summary": "[]"}, "summary is no JSON object"),
        ({"summary": "{"}, "Expecting property name"),
        ({"summary": '"' + "x" * (1 << 20) + '"'}, "summary has 1048578 characters"),
    ],
)
def test_an_invalid_parcel_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read_parcel(PARCEL.as_config() | changes)


@given(st.text() | st.from_regex(r"[./\\ a\0-]{0,12}"))
def test_an_accepted_name_is_one_folder_below_its_parent(name):
    try:
        check_run_name(name)
    except ValueError:
        return
    place = Path("/results")
    assert (place / name).resolve().parent == place
    assert (place / name).name == name
    assert not name.startswith(".")
    assert len(name.encode()) <= 150


NAMES = ["20260101-120000-digits-vit-ravan-seed0", "my run, again".replace(",", ""), "a", "x" * 150]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_runs_are_accepted(name):
    assert check_run_name(name) == name


STATE = {"H": torch.arange(24.0).view(6, 2, 2), "classifier": torch.ones(3)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"H": STATE["H"]}, r"got tensors \['H'\], expected \['H', 'classifier'\]"),
        (STATE | {"more": torch.ones(1)}, "got tensors"),
        (STATE | {"H": STATE["H"].clone().fill_(torch.nan)}, "H has values that are not finite"),
        (STATE | {"H": STATE["H"] + 1}, "has checksum .*, expected .*: it was damaged"),
        (STATE | {"H": STATE["H"].view(6, 4)}, "has checksum"),
        (STATE | {"H": STATE["H"].half()}, "has checksum"),
    ],
)
def test_a_state_that_differs_from_its_checksum_is_refused(changed, message):
    check_state(STATE, STATE, checksum(STATE))
    with pytest.raises(ValueError, match=message):
        check_state(changed, STATE, checksum(STATE))


def test_answers_round_trip():
    assert read_answer(confirmation(PARCEL, "merged"), PARCEL) == "merged"
    with pytest.raises(ValueError, match=r"^no space left\\n\\x1b\[2K$"):
        read_answer(refusal("no space left\n\x1b[2K"), PARCEL)


ANSWERS: list[tuple[Any, str]] = [
    ({}, "kept = None, folder = None, expected true"),
    ({"kept": 1, "folder": "adapter", "checksum": "0" * 16}, "kept = 1"),
    ({"kept": True, "folder": "../..", "checksum": "0" * 16}, r"folder = '../..', expected true"),
    ({"kept": True, "folder": ["adapter"], "checksum": "0" * 16}, r"folder = \['adapter'\]"),
    ({"kept": True, "folder": "adapter", "checksum": "1" * 16}, "it reports checksum '1111"),
    ({"kept": True, "folder": "adapter"}, "it reports checksum None"),
    ({"kept": False}, "no reason given"),
    ({"kept": False, "reason": 7}, "no reason given"),
    ({"kept": False, "reason": "x" * 10**6}, r"^x{496} \.\.\.$"),
]


@pytest.mark.parametrize(("answer", "message"), ANSWERS, ids=lambda one: json.dumps(one)[:40])
def test_an_invalid_answer_is_refused(answer, message):
    with pytest.raises(ValueError, match=message):
        read_answer(answer, PARCEL)
