"""All ways by which something leaves a device, or a private run, and what each tells of an example.

Two worlds are neighbours if they differ in one example of a device (`privacy=example`), in all that
one client has (`privacy=client`), or in who was drawn for the rounds that were held. For
each channel the same must leave in both, to the byte; what differs must be what an account has:
`uploads` are, by the clip norm.

| channel | what it is |
| --- | --- |
| `fails` | whether a reply is an error, which drops a client out of a round |
| `error` | its text, which Flower sends: the class of an exception, and what it says |
| `records` | names of records and of their entries |
| `metrics` | all values beside tensors, `seconds` among them |
| `sizes` | dtype, shape and bytes of each tensor |
| `log` | no line of the device's log is in a reply |
| `card`, `parcel`, `tracking` | what is published of a run |

Not here, and not protected (docs/privacy.md): when a reply comes.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from PIL import Image

from ravan_flwr.client import answers
from ravan_flwr.client.client_request import HIDDEN_REASON
from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.delivery import PUBLISHED, make_parcel
from ravan_flwr.launch.worker_process import identify, reply_of
from ravan_flwr.messages.arrays import to_record
from ravan_flwr.privacy.account import StepNoise
from ravan_flwr.privacy.example_gradients import check_independent
from ravan_flwr.reports.card import fill_card
from ravan_flwr.runs import tracking
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord, Summary
from ravan_flwr.runs.tracking import numbers_of
from ravan_flwr.seeding import ClientRound
from ravan_flwr.server.privacy_budget import ClientBudget
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import Encoded
from ravan_flwr.training import private_steps
from ravan_flwr.training.local_steps import steps_of
from ravan_flwr.training.model_and_data import Examples, ModelAndData, get_model_and_data
from ravan_flwr.training.private_steps import PrivateStepper
from tests.unit.reports.test_card import CONFIG

# One example of a device, whatever it is, and whatever the server sends.

NUMBER, ROW, NAME = 12, 5, "Jane Doe"  # examples, the one that differs, and whose it is
DEVICE: dict[str, Scalar] = {
    "privacy": "example", "noise-multiplier": 2.0, "local-steps": 1, "batch-size": NUMBER,
    "partition": "iid", "lora-rank": 1, "tracking": "none", "classifier": "trained",
}  # fmt: skip


def _pixels(value):
    def change(batch):
        batch["pixel_values"][ROW] = value

    return change


def _label(batch):
    batch["labels"][ROW] = 99


def _nothing(_):
    pass


# By name: what is in it, and what happens to whoever reads it.
EXAMPLES: dict[str, tuple[Any, type[Exception] | None]] = {
    "ordinary": (_nothing, None),
    "nothing": (_nothing, OSError),
    "large": (_pixels(1e20), None),
    "not finite": (_pixels(math.inf), None),
    "no number": (_pixels(math.nan), None),
    "of no class": (_label, None),
    "too large for the memory": (_nothing, MemoryError),
    "of another kind": (_nothing, TypeError),
}
OTHERS = [name for name in EXAMPLES if name != "ordinary"]


def _all(value):
    return lambda tensor, _: torch.full_like(tensor, value)


# By name: a state that a server may send, to find a value at which an example shows.
STATES = {
    "at rest": lambda tensor, _: tensor,
    "as trained": lambda tensor, random: tensor + torch.randn(tensor.shape, generator=random),
    "large": _all(1e18),
    "at the limit": _all(3e38),
    "next to nothing": _all(1e-42),
    "no number": _all(math.nan),
    "infinite": _all(math.inf),
}
REFUSED = ("no number", "infinite")  # whatever the examples are
CHANNELS = ("fails", "error", "records", "metrics", "sizes", "log")


@pytest.fixture(scope="module")
def loaded():
    identify()
    return get_model_and_data(read_config(DEVICE))


@dataclass(frozen=True)
class Held(Encoded):
    """Examples of which one may fail when it is read."""

    failure: type[Exception] | None = None

    def take(self, rows):
        if self.failure is not None and ROW in self.rows[rows]:
            raise self.failure(f"{NAME}: cannot be read")
        return super().take(rows)


@cache
def ordinary():
    chosen = get_model_and_data(read_config(DEVICE)).partition(3, 20).train.take(np.arange(NUMBER))
    return chosen | {"pixel_values": chosen["pixel_values"].float() / 127.5 - 1}


def examples_of(name):
    change, failure = EXAMPLES[name]
    batch = {key: tensor.clone() for key, tensor in ordinary().items()}
    change(batch)
    return Held(batch, np.arange(NUMBER), (), failure)


def state_of(loaded, name):
    random = torch.Generator().manual_seed(1)
    state = loaded.model.initial_state()
    return {key: STATES[name](tensor, random) for key, tensor in state.items()}


def ask(kind, state, config, node=None):
    """A device's reply to a message, as Flower sends it."""
    settings: dict[str, Any] = {
        "round": 1,
        "budget-fraction": 1.0,
        "noise-multiplier": 2.0,
        "earlier-rounds": 0,
    }
    content = RecordDict({"arrays": to_record(state), "config": ConfigRecord(settings)})
    message = Message(content, 1, kind)
    message.metadata.__dict__["_run_id"] = 1
    given = {"partition-id": 0, "num-partitions": 20} | (node or {})
    return reply_of(message, Context(1, 1, given, RecordDict(), dict(config)))


def seen_in(reply: Any, logged: Any = ()) -> dict[str, Any]:
    """By channel, what somebody sees who has the reply; and whether it has a line of the log."""
    if reply.has_error():
        seen = {"fails": True, "error": reply.error.reason, "text": reply.error.reason}
        return seen | {"log": any(line in str(reply.error.reason) for line in logged)}
    content = reply.content
    plain = {**content.metric_records, **content.config_records}
    text = json.dumps({name: dict(record) for name, record in plain.items()}, sort_keys=True)
    arrays = {
        f"{name}/{key}": (array.dtype, array.shape, array.stype, len(array.data))
        for name, record in content.array_records.items()
        for key, array in record.items()
    }
    return {
        "fails": False,
        "records": sorted([*plain, *content.array_records]),
        "metrics": text,
        "sizes": arrays,
        "log": any(line in text for line in logged),
        "text": text,
    }


@pytest.fixture(scope="module")
def asked_before():
    """What devices answered, by question: channel after channel is looked at."""
    return {}


@pytest.fixture
def device(monkeypatch, loaded, caplog, asked_before):
    """Ask a device that has one example of this kind, in that state of the server's."""
    monkeypatch.setattr(private_steps, "subsample", lambda number, _: np.arange(number))

    def device(kind, state, example):
        question = kind, state, example
        if question not in asked_before:
            asked_before[question] = answer(kind, state, example)
        return asked_before[question]

    def answer(kind, state, example):
        held = Examples(examples_of(example), examples_of(example).select(np.arange(0)))
        monkeypatch.setattr(ModelAndData, "partition", lambda *_: held)
        caplog.clear()
        seen = seen_in(ask(kind, state_of(loaded, state), DEVICE), caplog.messages)
        if EXAMPLES[example][1] is not None and kind == "train" and not seen["fails"]:
            assert NAME in caplog.text  # the device's own log says it
        assert NAME not in seen["text"]
        return seen

    return device


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("state", STATES)
def test_no_channel_tells_what_an_example_is(device, state, channel):
    expected = device("train", state, "ordinary")
    assert expected["fails"] == (state in REFUSED)
    for example in OTHERS:
        assert device("train", state, example).get(channel) == expected.get(channel), example


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("example", OTHERS)
def test_what_a_node_says_of_itself_is_the_same_for_any_example(device, example, channel):
    """Its memory, too: how much is free would follow from what the examples take."""
    found, expected = (device("query", "at rest", one) for one in (example, "ordinary"))
    assert not expected["fails"]
    assert found.get(channel) == expected.get(channel)


def test_a_reply_has_nothing_but_what_this_audit_knows(device):
    """What comes to be told needs a thought, and a row above."""
    seen = device("train", "as trained", "ordinary")
    assert seen["records"] == ["arrays", "metrics"]
    told = json.loads(seen["metrics"])["metrics"]
    assert set(told) == {"round", "derived", "recounted"}  # no seconds, loss, number of examples


@pytest.mark.parametrize(
    "state", [name for name in STATES if name not in ("no number", "infinite")]
)
def test_an_upload_differs_by_the_clip_norm_at_most(loaded, monkeypatch, state):
    """The accounted channel: the gradient that a step releases, without its noise.

    In the parts that a device works in. In company rounding differs, which a large state makes as
    large as the gradients of all others.
    """
    monkeypatch.setattr(private_steps, "subsample", lambda number, _: np.arange(number))
    norm, work = 0.5, ClientRound(0, 1, 3)

    def released(example):
        steps = steps_of(read_config(DEVICE | {"micro-batch-size": 1}), 1, NUMBER)
        stepper = PrivateStepper(
            loaded.model, loaded.task, examples_of(example), steps, work, StepNoise(1e-12, norm)
        )
        with loaded.model.holding(state_of(loaded, state)):
            stepper.train(loaded.model.parameters())
            return torch.cat([p.grad.flatten().double() for p in loaded.model.parameters()])

    without = released("nothing")
    assert without.isfinite().all()
    for example in EXAMPLES:
        moved = float((released(example) - without).norm())
        assert moved <= norm / NUMBER * (1 + 1e-4) + 1e-9, example
    if state in ("at rest", "as trained"):
        assert float((released("ordinary") - without).norm()) > 0.1 * norm / NUMBER


@pytest.mark.parametrize(("there", "parts"), [(True, 1), (False, None)])
def test_a_device_works_on_each_example_by_itself(loaded, monkeypatch, there, parts):
    """Whatever the settings say; in a simulation they come together, which is quicker."""
    given = []
    monkeypatch.setattr(answers, "is_on_a_device", lambda: there)
    monkeypatch.setattr(answers, "train_privately", lambda *work: given.append(work[5]))
    ask("train", loaded.model.initial_state(), DEVICE)
    assert [steps.micro_batch_size for steps in given] == [parts]


@pytest.mark.parametrize("state", STATES)
def test_whether_examples_are_apart_is_found_out_without_them(loaded, monkeypatch, state):
    """Nor with the state that a server sends: it is known before either is there."""
    looked = []

    def noted(alone, together):
        looked.append(torch.cat([g[0].flatten() for g in together]))
        check_independent(alone, together)

    monkeypatch.setattr(private_steps, "check_independent", noted)
    for example in ("ordinary", "no number", "nothing"):
        monkeypatch.setattr(loaded.model, "examples_are_independent", False)
        with suppress(ValueError):  # a state that is refused
            private_steps.train_privately(
                loaded.model, loaded.task, examples_of(example), state_of(loaded, state), 1.0,
                steps_of(read_config(DEVICE), 1, NUMBER), ClientRound(0, 1, 3), StepNoise(1.0, 1.0),
            )  # fmt: skip
    assert len(looked) == 3
    assert looked[0].any()
    assert all(torch.equal(one, looked[0]) for one in looked)


@pytest.mark.parametrize("kind", ["query", "train"])
def test_why_examples_cannot_be_read_stays_on_the_device(loaded, monkeypatch, caplog, kind):
    """A server chooses labels, columns and lengths: a text, or its length, would be an answer."""
    told = set()
    for failure in (
        ValueError(f"labels: got unknown labels {NAME}"),
        OSError(2, NAME),
        KeyError(1),
    ):

        def fails(*_, failure=failure):
            raise failure

        monkeypatch.setattr(ModelAndData, "partition", fails)
        seen = seen_in(ask(kind, loaded.model.initial_state(), DEVICE))
        assert NAME not in seen["text"]
        told.add(seen["text"])
    assert told == {f"RuntimeError: {HIDDEN_REASON}"}
    assert NAME in caplog.text


# What becomes of an image among those of a device's own folder, by the settings or by itself.
FILES: dict[str, Callable[[Path], object]] = {
    "ordinary": lambda image: None,
    "of no class": lambda image: image.rename(_folder(image.parent.parent / NAME) / image.name),
    "cut off": lambda image: image.write_bytes(image.read_bytes()[:40]),
    "no image": lambda image: image.write_bytes(NAME.encode()),
    "of 16 bits": lambda image: Image.fromarray(np.ones((8, 8), np.uint16)).save(image),
}


def _folder(path):
    path.mkdir()
    return path


@pytest.mark.parametrize("kind", ["query", "train"])
@pytest.mark.parametrize("name", FILES)
def test_an_example_that_cannot_be_used_is_one_that_counts_as_zero(
    loaded, tmp_path, caplog, kind, name
):
    """Its node has as many as before: a server that chooses labels could read them by that."""
    for number in range(NUMBER):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(folder / f"{number}.png")
    FILES[name](tmp_path / str(ROW % 2) / f"{ROW}.png")
    node = {"data-path": str(tmp_path)}
    seen = seen_in(ask(kind, loaded.model.initial_state(), DEVICE, node), caplog.messages)
    assert not seen["fails"], seen
    assert NAME not in seen["text"]
    assert not seen["log"]
    if kind == "query":
        assert json.loads(seen["metrics"])["client"]["examples"] == NUMBER
    if name != "ordinary":
        assert f"1 of {NUMBER} examples cannot be used, and count as zero: example" in caplog.text


# What is published of a run: another cohort of the same round gives the same.

COHORTS = ({0: 2, 1: 2}, {4: 1, 5: 1, 6: 1, 7: 1})  # two draws: rounds by client
KINDS: dict[str, dict[str, Scalar]] = {
    "client": {"privacy": "client", "noise-multiplier": 4.0, "clip-norm": 0.1, "num-rounds": 3},
    "example": {"privacy": "example", "noise-multiplier": 4.0},
}


def told_of(kind):
    """What the account of a run tells, whoever was drawn."""
    if kind == "example":  # who is asked follows from the seed
        return {"unit": "example", "epsilon": 1.0, "delta": 1e-5, "noise-multiplier": 4.0}
    budget = ClientBudget(read_config(KINDS[kind]), lambda _: None)
    budget.rate, budget.multiplier = 0.05, 4.0
    for _ in range(3):
        budget.spend()
    return budget.as_record()


def summary_of(kind, cohort):
    """A summary in which all that is not meant for others tells of the cohort."""
    known = {
        "method": "ravan", "preset": "digits-vit", "seed": 0, "num-clients": 1000, "rounds": 3,
        "rank": 13, "trainable-parameters": 6410, "run-id": "0" * 16,
        "metrics": {"final": {"accuracy": 0.5}, "best": {"accuracy": 0.5}},
    }  # fmt: skip
    others = {
        key: f"drawn: {sorted(cohort)}" for key in get_type_hints(Summary) if key not in known
    }
    spent = {key for key in others if key in PUBLISHED or key.startswith("epsilon")}
    return {k: v for k, v in others.items() if k not in spent} | known | told_of(kind)


def card(kind, cohort, folder):
    data = {"model": {"name": "m", "source": "folder", "revision": ""}}
    config = CONFIG | data | {"data": {"source": "d", "labels": ["a", "b"]}}
    summary: Any = summary_of(kind, cohort)
    fill_card(folder, "peft", config | read_config(KINDS[kind]).as_dict() | data | {
        "task": "vision", "data": {"source": "d", "labels": ["a", "b"]},
    }, summary, {"accuracy": 0.5})  # fmt: skip
    return (folder / "README.md").read_text()


def parcel(kind, cohort, folder):
    summary: Any = summary_of(kind, cohort)
    return make_parcel(RunDirectory(folder), {"H": torch.zeros(2)}, summary).as_config()


def tracked(kind, cohort, folder):
    del folder
    hints = {key: f"drawn: {sorted(cohort)}" for key in get_type_hints(RoundRecord)}
    record: Any = hints | {"metrics": {"accuracy": 0.5}, "privacy": told_of(kind)}
    return numbers_of(record)


PUBLIC = {"card": card, "parcel": parcel, "tracking": tracked}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channel", PUBLIC)
def test_what_is_published_does_not_tell_who_was_drawn(kind, channel, tmp_path):
    one, other = (PUBLIC[channel](kind, cohort, tmp_path) for cohort in COHORTS)
    assert one == other
    assert "drawn" not in str(one)
    assert channel == "tracking" or "epsilon" in str(one)


def test_a_run_is_named_by_chance_alone(tmp_path):
    ids = set()
    for _ in range(2):
        summary: Any = {"rounds": 1, "metrics": {"final": {}, "best": {}}, "epsilon": 1.0}
        ids.add(make_parcel(RunDirectory(tmp_path), {"H": torch.zeros(2)}, summary).run_id)
        assert summary["run-id"] in ids
    assert len(ids) == 2


@pytest.mark.parametrize(("privacy", "off"), [("none", False), ("client", True)])
def test_a_tracker_is_given_no_log_lines_and_no_traffic_of_a_private_run(
    privacy, off, tmp_path, monkeypatch
):
    """Weights & Biases sends what a process prints, and how many bytes it sent."""
    given: dict[str, Any] = {}
    monkeypatch.setitem(
        __import__("sys").modules,
        "wandb",
        SimpleNamespace(init=lambda **named: given.update(named)),
    )
    tracking.wandb(tmp_path, "run", {"privacy": privacy})
    expected = {"console": "off", "x_disable_stats": True} if off else None
    assert given.get("settings") == expected
