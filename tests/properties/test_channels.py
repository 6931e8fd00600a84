"""All channels from a device or a private run, and their dependence on an example.

Two data sets are neighbours if they differ in one example of a device (`privacy=example`), in all
data of one client (`privacy=client`), or in the sampled cohorts of earlier rounds. Each channel
must be equal for neighbours, to the byte; only the accounted `uploads` may differ, by the clip
norm.

| channel | content |
| --- | --- |
| `fails` | whether a reply is an error, which drops a client out of a round |
| `error` | its text, which Flower sends: the class of an exception, and its message |
| `records` | names of records and of their entries |
| `metrics` | all values besides tensors, such as `seconds` |
| `sizes` | dtype, shape and bytes of each tensor |
| `log` | no line of the device's log is in a reply |
| `card`, `parcel`, `tracking` | published results of a run |

The time of a reply is not protected, and not tested here (docs/privacy.md).
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

from ravan_flwr.client.client_request import HIDDEN_REASON
from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.delivery.server import PUBLISHED, make_parcel
from ravan_flwr.extras.example_privacy import client as on_client
from ravan_flwr.extras.example_privacy import steps as private_steps
from ravan_flwr.extras.example_privacy.gradients import StepNoise, check_independent
from ravan_flwr.extras.example_privacy.steps import PrivateTrainingLoop
from ravan_flwr.launch.worker_process import compute_reply, identify
from ravan_flwr.messages.arrays import to_record
from ravan_flwr.results.card import fill_card
from ravan_flwr.runs import tracking
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord, Summary
from ravan_flwr.runs.tracking import collect_numbers
from ravan_flwr.seeding import ClientRound
from ravan_flwr.server.privacy_budget import ClientBudget
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import Encoded
from ravan_flwr.training.local_steps import ClientWork, make_training_settings
from ravan_flwr.training.model_and_data import Examples, ModelAndData, get_model_and_data
from tests.unit.results.test_card import CONFIG

# One example of a device: any example, for any message of the server.

# The number of examples, the differing one, and the name in it.
NUMBER, ROW, NAME = (12, 5, "Jane Doe")
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


# name -> (change of the example, exception when it is read)
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


# name -> a state that a server may send to find a value at which an example is visible
STATES = {
    "at rest": lambda tensor, _: tensor,
    "as trained": lambda tensor, random: tensor + torch.randn(tensor.shape, generator=random),
    "large": _all(1e18),
    "at the limit": _all(3e38),
    "next to nothing": _all(1e-42),
    "no number": _all(math.nan),
    "infinite": _all(math.inf),
}
REFUSED = ("no number", "infinite")  # for any examples
CHANNELS = ("fails", "error", "records", "metrics", "sizes", "log")


@pytest.fixture(scope="module")
def loaded():
    identify()
    return get_model_and_data(read_config(DEVICE))


@dataclass(frozen=True)
class UnreadableExamples(Encoded):
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
    return UnreadableExamples(batch, np.arange(NUMBER), (), failure)


def state_of(loaded, name):
    random = torch.Generator().manual_seed(1)
    state = loaded.model.initial_state()
    return {key: STATES[name](tensor, random) for key, tensor in state.items()}


def ask(kind, state, config, node=None):
    """Return a device's reply to a message, as Flower sends it."""
    settings: dict[str, Any] = {
        "round": 1,
        "budget-fraction": 1.0,
        "noise-multiplier": 2.0,
        "earlier-rounds": 0,
    }
    content = RecordDict({"arrays": to_record(state), "config": ConfigRecord(settings)})
    message = Message(content, 1, kind)
    message.metadata.__dict__["_run_id"] = 1
    node_config = {"partition-id": 0, "num-partitions": 20} | (node or {})
    return compute_reply(message, Context(1, 1, node_config, RecordDict(), dict(config)))


def view_of(reply: Any, logged: Any = ()) -> dict[str, Any]:
    """Return an observer's view of the reply by channel, and whether a log line is in it."""
    if reply.has_error():
        view = {"fails": True, "error": reply.error.reason, "text": reply.error.reason}
        return view | {"log": any(line in str(reply.error.reason) for line in logged)}
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


@pytest.fixture
def device(monkeypatch, loaded, caplog):
    """Return a function that asks a device with this example, in this state of the server."""
    monkeypatch.setattr(private_steps, "subsample", lambda number, _: np.arange(number))

    def answer(kind, state, example):
        examples = Examples(examples_of(example), examples_of(example).select(np.arange(0)))
        monkeypatch.setattr(ModelAndData, "partition", lambda *_: examples)
        caplog.clear()
        view = view_of(ask(kind, state_of(loaded, state), DEVICE), caplog.messages)
        if EXAMPLES[example][1] is not None and kind == "train" and not view["fails"]:
            assert NAME in caplog.text  # the device's own log has it
        assert NAME not in view["text"]
        return view

    return answer


def channels(view):
    return {channel: view.get(channel) for channel in CHANNELS}


@pytest.mark.parametrize(
    ("kind", "state"), [*(("train", state) for state in STATES), ("query", "at rest")]
)
def test_no_channel_depends_on_an_example(device, kind, state):
    """A node's registration ("query") neither; free memory would depend on the examples."""
    expected = device(kind, state, "ordinary")
    assert expected["fails"] == (state in REFUSED)
    for example in OTHERS:
        assert channels(device(kind, state, example)) == channels(expected), example


def test_a_reply_has_the_audited_values_alone(device):
    """A new value in a reply needs a decision, and a row above."""
    view = device("train", "as trained", "ordinary")
    assert view["records"] == ["arrays", "metrics"]
    metrics = json.loads(view["metrics"])["metrics"]
    # No seconds, no loss, no number of examples.
    assert set(metrics) == {"round", "fingerprint", "recounted"}


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("state", [name for name in STATES if name not in REFUSED])
def test_an_upload_differs_by_the_clip_norm_at_most(loaded, monkeypatch, state):
    """The accounted channel is the gradient that a step releases, without its noise.

    It is computed one example at a time, as on a device. In larger batches rounding differs,
    which a large state amplifies to the size of the other gradients.
    """
    monkeypatch.setattr(private_steps, "subsample", lambda number, _: np.arange(number))
    norm = 0.5

    def released(example):
        steps = make_training_settings(read_config(DEVICE | {"micro-batch-size": 1}), 1, NUMBER)
        work = ClientWork(examples_of(example), {}, 1.0, steps, ClientRound(0, 1, 3))
        loop = PrivateTrainingLoop(loaded.model, loaded.task, work, StepNoise(1e-12, norm))
        with loaded.model.holding(state_of(loaded, state)):
            loop.train(loaded.model.parameters())
            return torch.cat([p.grad.flatten().double() for p in loaded.model.parameters()])

    without = released("nothing")
    assert without.isfinite().all()
    for example in EXAMPLES:
        moved = float((released(example) - without).norm())
        assert moved <= norm / NUMBER * (1 + 1e-4) + 1e-9, example
    if state in ("at rest", "as trained"):
        assert float((released("ordinary") - without).norm()) > 0.1 * norm / NUMBER


@pytest.mark.parametrize(("on_device", "parts"), [(True, 1), (False, None)])
def test_a_device_computes_one_example_at_a_time(loaded, monkeypatch, on_device, parts):
    """For any settings; a simulation computes them together, which is faster."""
    asked = []
    monkeypatch.setattr(on_client, "is_on_a_device", lambda: on_device)
    monkeypatch.setattr(on_client, "train_privately", lambda *given: asked.append(given[2]))
    ask("train", loaded.model.initial_state(), DEVICE)
    assert [work.settings.micro_batch_size for work in asked] == [parts]


@pytest.mark.parametrize("state", STATES)
def test_the_independence_check_does_not_depend_on_examples(loaded, monkeypatch, state):
    """The check uses neither examples nor the server's state."""
    gradients = []

    def recording(alone, together):
        gradients.append(torch.cat([g[0].flatten() for g in together]))
        check_independent(alone, together)

    monkeypatch.setattr(private_steps, "check_independent", recording)
    for example in ("ordinary", "no number", "nothing"):
        monkeypatch.setattr(loaded.model, "examples_are_independent", False)
        with suppress(ValueError):  # a state that is refused
            work = ClientWork(
                examples_of(example), state_of(loaded, state), 1.0,
                make_training_settings(read_config(DEVICE), 1, NUMBER), ClientRound(0, 1, 3),
            )  # fmt: skip
            private_steps.train_privately(loaded.model, loaded.task, work, StepNoise(1.0, 1.0))
    assert len(gradients) == 3
    assert gradients[0].any()
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize("kind", ["query", "train"])
def test_the_reason_of_unreadable_examples_stays_on_the_device(loaded, monkeypatch, caplog, kind):
    """A server chooses labels, columns and lengths, so that an error's text could reveal one."""
    texts = set()
    for failure in (
        ValueError(f"labels: got unknown labels {NAME}"),
        OSError(2, NAME),
        KeyError(1),
    ):

        def fails(*_, failure=failure):
            raise failure

        monkeypatch.setattr(ModelAndData, "partition", fails)
        view = view_of(ask(kind, loaded.model.initial_state(), DEVICE))
        assert NAME not in view["text"]
        texts.add(view["text"])
    refused = {"refused": {"partition-id": 0, "reason": HIDDEN_REASON}}
    train = f"RuntimeError: {HIDDEN_REASON}"
    assert texts == {json.dumps(refused) if kind == "query" else train}
    assert NAME in caplog.text


# Damage to an image in a device's own folder, or a mismatch with the settings.
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
def test_an_unusable_example_counts_as_zero(loaded, tmp_path, caplog, kind, name):
    """The number of examples is unchanged: a server that chooses labels could learn from it."""
    for number in range(NUMBER):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * number, np.uint8)).save(folder / f"{number}.png")
    FILES[name](tmp_path / str(ROW % 2) / f"{ROW}.png")
    node = {"data-path": str(tmp_path)}
    view = view_of(ask(kind, loaded.model.initial_state(), DEVICE, node), caplog.messages)
    assert not view["fails"], view
    assert NAME not in view["text"]
    assert not view["log"]
    if kind == "query":
        assert json.loads(view["metrics"])["client"]["examples"] == NUMBER
    if name != "ordinary":
        assert f"1 of {NUMBER} examples cannot be used, and count as zero: example" in caplog.text


# Published results of a run are equal for another cohort of the same round.

COHORTS = ({0: 2, 1: 2}, {4: 1, 5: 1, 6: 1, 7: 1})  # two cohorts: rounds by client
KINDS: dict[str, dict[str, Scalar]] = {
    "client": {"privacy": "client", "noise-multiplier": 4.0, "clip-norm": 0.1, "num-rounds": 3},
    "example": {"privacy": "example", "noise-multiplier": 4.0},
}


def account_of(kind):
    """Return the account of a run, which does not depend on the cohort."""
    if kind == "example":  # sampling follows from the seed
        return {"unit": "example", "epsilon": 1.0, "delta": 1e-5, "noise-multiplier": 4.0}
    budget = ClientBudget(read_config(KINDS[kind]), lambda _: None)
    budget.rate, budget.multiplier = 0.05, 4.0
    for _ in range(3):
        budget.spend()
    return budget.as_record()


def summary_of(kind, cohort):
    """Return a summary in which all private values depend on the cohort."""
    known = {
        "method": "ravan", "preset": "digits-vit", "seed": 0, "num-clients": 1000, "rounds": 3,
        "rank": 13, "trainable-parameters": 6410, "run-id": "0" * 16,
        "metrics": {"final": {"accuracy": 0.5}, "best": {"accuracy": 0.5}}, "simulated": True,
    }  # fmt: skip
    others = {
        key: f"drawn: {sorted(cohort)}" for key in get_type_hints(Summary) if key not in known
    }
    spent = {key for key in others if key in PUBLISHED or key.startswith("epsilon")}
    return {k: v for k, v in others.items() if k not in spent} | known | account_of(kind)


def card(kind, cohort, folder):
    data = {"model": {"name": "m", "source": "folder", "revision": ""}}
    config = CONFIG | data | {"data": {"source": "d", "labels": ["a", "b"]}}
    summary: Any = summary_of(kind, cohort)
    fill_card(folder, "peft", config | read_config(KINDS[kind]).as_dict() | data | {
        "task": "vision", "data": {"source": "d", "labels": ["a", "b"]},
    }, summary)  # fmt: skip
    return (folder / "README.md").read_text()


def parcel(kind, cohort, folder):
    summary: Any = summary_of(kind, cohort)
    return make_parcel(RunDirectory(folder), {"H": torch.zeros(2)}, summary).as_config()


def tracked(kind, cohort, folder):
    del folder
    hints = {key: f"drawn: {sorted(cohort)}" for key in get_type_hints(RoundRecord)}
    record: Any = hints | {"metrics": {"accuracy": 0.5}, "privacy": account_of(kind)}
    return collect_numbers(record)


PUBLIC = {"card": card, "parcel": parcel, "tracking": tracked}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channel", PUBLIC)
def test_published_results_do_not_depend_on_the_cohort(kind, channel, tmp_path):
    one, other = (PUBLIC[channel](kind, cohort, tmp_path) for cohort in COHORTS)
    assert one == other
    assert "drawn" not in str(one)
    assert channel == "tracking" or "epsilon" in str(one)


def test_run_ids_are_random(tmp_path):
    ids = set()
    for _ in range(2):
        summary: Any = {"rounds": 1, "metrics": {"final": {}, "best": {}}, "epsilon": 1.0}
        ids.add(make_parcel(RunDirectory(tmp_path), {"H": torch.zeros(2)}, summary).run_id)
        assert summary["run-id"] in ids
    assert len(ids) == 2


@pytest.mark.parametrize(("privacy", "off"), [("none", False), ("client", True)])
def test_no_tracker_gets_log_or_traffic_of_a_private_run(privacy, off, tmp_path, monkeypatch):
    """Weights & Biases sends console output and network traffic."""
    arguments: dict[str, Any] = {}
    monkeypatch.setitem(
        __import__("sys").modules,
        "wandb",
        SimpleNamespace(init=lambda **kwargs: arguments.update(kwargs)),
    )
    tracking.wandb(tmp_path, "run", {"privacy": privacy})
    expected = {"console": "off", "x_disable_stats": True} if off else None
    assert arguments.get("settings") == expected
