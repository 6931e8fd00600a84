"""Trainers and functions as Flower clients: the numbers of a plain loop, and invalid loops."""

import copy
import math
import random
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ravan_flwr import RavanConfig, strategies
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.seeding import ClientRound
from ravan_flwr.strategies import (
    RavanStrategy,
    choose,
    collect_arrays,
    federated,
    load_arrays,
    restore,
)

LAYERS = ["first", "second"]
BASE = "base_model.model"
BATCH, STEPS, NODES = 8, 3, 2
EXAMPLES = BATCH * STEPS
RATE = 0.01
BUDGETS = (0.5, 1.0)


class Network(nn.Module):
    """Return the loss of a batch, as a Trainer requires."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 12)
        self.classifier = nn.Linear(12, 3)

    def forward(self, x, labels=None):
        x = x.to(next(self.parameters()).dtype)
        logits = self.classifier(self.second(torch.tanh(self.first(x))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def ravan():
    return RavanConfig(r=3, num_heads=4, target_modules=LAYERS, modules_to_save=["classifier"])


def lora():
    return LoraConfig(r=4, lora_alpha=8, target_modules=LAYERS, modules_to_save=["classifier"])


def make_model(config=ravan, frozen=""):
    torch.manual_seed(0)
    model: Any = get_peft_model(Network(), config())
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and frozen not in name)
    return model


def data_of(partition, number=EXAMPLES):
    random = torch.Generator().manual_seed(100 + partition)
    x = torch.randn(number, 12, generator=random)
    return [{"x": row, "labels": int(i % 3)} for i, row in enumerate(x)]


def arguments(folder, **changes):
    settings: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": RATE,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "optim": "adamw_torch",
        "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no",
        "seed": 0, "disable_tqdm": True,
        "remove_unused_columns": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(folder), **settings | changes)


def make_trainer(folder, model, partition=0, callbacks=(), evaluated=None, **changes):
    return Trainer(
        model, arguments(folder, **changes), train_dataset=data_of(partition),
        eval_dataset=evaluated, callbacks=list(callbacks),
    )  # fmt: skip


class Grid(InProcessGrid):
    """Nodes of a ClientApp each; an exception is an error reply, as Flower makes it of one."""

    def __init__(self, apps):
        super().__init__({}, len(apps))
        self.apps = apps

    def _deliver(self, message):
        node = message.metadata.dst_node_id
        try:
            return self.apps[node - 1](message, self._contexts[node])
        except Exception as error:  # noqa: BLE001 (as Flower does)
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)


def train_only(kind=RavanStrategy, **options):
    """Make a strategy that evaluates nowhere, and waits for no second node."""
    few = {"min_train_nodes": 1, "min_available_nodes": 1}
    return kind(fraction_evaluate=0.0, **few, **options)


def run(strategy, apps, model, rounds=2, **options):
    initial = ArrayRecord(get_peft_model_state_dict(model))
    return strategy.start(Grid(apps), initial, num_rounds=rounds, **options)


def numbers(result):
    return {name: array.numpy() for name, array in result.arrays.items()}


def assert_close(got, expected, tolerance=1e-5):
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=0, atol=tolerance)


def steps_of_adam(model, data, optimizer=None):
    """Train for an epoch in the order that PyTorch's seed gives; return the last optimiser."""
    random = torch.Generator().manual_seed(torch.random.initial_seed())
    order = torch.randperm(len(data), generator=random)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    losses = []
    model.train()
    for rows in order.split(BATCH):
        x = torch.stack([data[row]["x"] for row in rows])
        loss = model(x=x, labels=torch.tensor([data[row]["labels"] for row in rows]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return optimizer, sum(losses) / len(losses)


def plain_client(model, budgets):
    """Return the client of examples/own_app: its loop between the functions of the library."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        partition = context.node_config["partition-id"]
        work = ClientRound(0, message.content["config"]["server-round"], partition)
        load_arrays(model, message.content.array_records["arrays"])
        choose(model, budgets[partition], generator=work.generator("heads"))
        torch.manual_seed(work.derive("train") % 2**32)
        _, loss = steps_of_adam(model, data_of(partition))
        metrics = MetricRecord({"train-loss": loss, "num-examples": EXAMPLES})
        content = RecordDict({"arrays": collect_arrays(model), "metrics": metrics})
        restore(model)
        return Message(content, reply_to=message)

    return app


def train_fn(model, config):
    _, loss = steps_of_adam(model, data_of(config["partition-id"]))
    return {"train-loss": loss, "num-examples": EXAMPLES}


METHODS = {
    "ravan": (partial(RavanStrategy, head_mean="all"), ravan, "", BUDGETS),
    "fedit": (FedAvg, lora, "", (1.0, 1.0)),
    "ffa-lora": (strategies.FFALoraStrategy, lora, "lora_A", (1.0, 1.0)),
    "fedex-lora": (strategies.FedExLoraStrategy, lora, "", (1.0, 1.0)),
    "fedmomentum": (strategies.FedMomentumStrategy, lora, "", (1.0, 1.0)),
    "flexlora": (strategies.FlexLoraStrategy, lora, "", BUDGETS),
    "hetlora": (strategies.HetLoraStrategy, lora, "", BUDGETS),
}


@pytest.mark.parametrize("method", METHODS)
def test_trainer_and_function_equal_the_plain_loop(method, tmp_path):
    """Their data, order, seeds and heads are the same, so are the arrays and losses."""
    strategy, config, frozen, budgets = METHODS[method]
    model = make_model(config, frozen)
    initial = {name: t.clone() for name, t in get_peft_model_state_dict(model).items()}

    def budget(context):
        return budgets[context.node_config["partition-id"]]

    def build(context):
        return make_trainer(tmp_path, model, context.node_config["partition-id"])

    def trained(app):
        model.load_state_dict(start)
        result = run(train_only(strategy), [app] * NODES, model)
        return numbers(result), result.train_metrics_clientapp

    start = copy.deepcopy(model.state_dict())
    expected, losses = trained(plain_client(model, budgets))
    moved = {
        name: np.abs(expected[name] - tensor.numpy()).max() for name, tensor in initial.items()
    }
    assert max(moved.values()) > 1e-3
    got, measured = trained(federated(build, budget=budget))
    assert_close(got, expected)
    for number, metrics in losses.items():
        assert measured[number]["train-loss"] == pytest.approx(metrics["train-loss"], abs=1e-5)
        assert (measured[number]["steps"], measured[number]["missing-steps"]) == (STEPS, 0)
    got, measured = trained(federated(train_fn, model, budget=budget))
    assert_close(got, expected)
    assert measured == losses


class Normalised(Network):
    """Normalise the first layer's outputs, and the logits, over a batch."""

    def __init__(self):
        super().__init__()
        for name, size in (("first", 16), ("classifier", 3)):
            setattr(self, name, nn.Sequential(getattr(self, name), nn.BatchNorm1d(size)))


@pytest.mark.parametrize("of_function", [True, False])
def test_batches_change_no_running_statistics_but_those_that_are_sent(of_function, tmp_path):
    """They are of the pretrained weights; those of a trained classifier are averaged."""
    config = RavanConfig(
        r=3, num_heads=4, target_modules=["first.0", "second"], modules_to_save=["classifier"]
    )
    model: Any = get_peft_model(Normalised(), config)
    before = copy.deepcopy(model.state_dict())
    app = federated(train_fn, model) if of_function else federated(make_trainer(tmp_path, model))
    strategy = train_only()
    run(strategy, [app], model)
    assert not strategy.rejected
    moved = {k for k, t in model.state_dict().items() if not torch.equal(t, before[k])}
    ours = f"{BASE}.classifier.modules_to_save.default.1"
    statistics = {f"{ours}.running_mean", f"{ours}.running_var", f"{ours}.num_batches_tracked"}
    assert {name for name in moved if "running" in name or "tracked" in name} == statistics
    model.train()(torch.zeros(4, 12), torch.zeros(4, dtype=torch.long))  # after the round
    assert int(model.base_model.model.first[1].num_batches_tracked) == 1


@pytest.mark.parametrize("keep", [True, False])
def test_the_optimiser_is_new_in_each_round_or_kept(keep, tmp_path):
    """One client of two rounds equals a loop whose Adam is kept, or is not."""
    model, optimizer = make_model(), None
    before = copy.deepcopy(model.state_dict())
    for number in (1, 2):
        torch.manual_seed(ClientRound(0, number, 0).derive("train") % 2**32)
        optimizer, _ = steps_of_adam(model, data_of(0), optimizer if keep else None)
        # The server sends products s H, with scales of one.
        with torch.no_grad():
            for layer in (model.base_model.model.first, model.base_model.model.second):
                layer.ravan_H["default"] *= layer.ravan_s["default"][:, None, None]
                layer.ravan_s["default"].fill_(1.0)
    expected = {k: t.clone().numpy() for k, t in get_peft_model_state_dict(model).items()}
    model.load_state_dict(before)
    app = federated(make_trainer(tmp_path, model), keep_optimizer=keep)
    assert_close(numbers(run(train_only(), [app], model)), expected)


class Watch(TrainerCallback):
    """Note what a Trainer is given in each round."""

    def __init__(self):
        self.rounds: list[dict[str, Any]] = []

    def on_train_begin(self, args, state, control, optimizer=None, train_dataloader=None, **_):
        order = [row for batch in train_dataloader for row in batch["x"][:, 0].tolist()]
        self.rounds.append(
            {"folder": args.output_dir, "steps": args.max_steps, "order": order,
             "moments": len(optimizer.state)}
        )  # fmt: skip


class Overflow(TrainerCallback):
    """Make the numbers of the first round NaN."""

    def on_train_end(self, args, state, control, model=None, **_):
        if args.output_dir.endswith("round-1"):
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.data.fill_(math.nan)


def test_a_rejected_round_leaves_the_kept_optimiser_as_it_was(tmp_path):
    """NaN in its moments would spoil all later rounds of the client."""
    watch = Watch()
    first = make_trainer(tmp_path, make_model(), callbacks=[Overflow(), watch])
    apps = [federated(trainer, keep_optimizer=True) for trainer in (
        first, make_trainer(tmp_path / "other", make_model())
    )]  # fmt: skip
    strategy = train_only()
    run(strategy, apps, make_model())
    assert list(strategy.rejected) == [1]
    assert [each["moments"] for each in watch.rounds] == [0, 0]


@pytest.mark.parametrize("steps", [0, -1, 2.5, "5", True])
def test_a_length_of_a_round_that_is_no_number_of_steps_is_refused(steps, tmp_path):
    app, config = federated(make_trainer(tmp_path, make_model())), ConfigRecord()
    config["local-steps"] = steps
    with pytest.raises(ValueError, match="all 1 .* local-steps = .*: expected a whole number abo"):
        run(train_only(), [app], make_model(), rounds=1, train_config=config)


def test_budget_and_steps_of_the_run_config_are_those_of_other_apps(tmp_path):
    """The page names the node config, and the strategy's `train_config`."""
    watch = Watch()
    app = federated(make_trainer(tmp_path, make_model(), callbacks=[watch]), keep_optimizer=True)
    grid = Grid([app])
    grid._contexts[1].run_config = {"budget": 0.5, "local-steps": 7}
    initial = ArrayRecord(get_peft_model_state_dict(make_model()))
    strategy = train_only()
    strategy.start(grid, initial, num_rounds=1)
    assert not strategy.rejected
    assert [each["steps"] for each in watch.rounds] == [STEPS]


def test_an_evaluation_in_bfloat16_leaves_the_models_numbers(tmp_path):
    model = make_model()
    trainer = make_trainer(tmp_path, model, evaluated=data_of(0), bf16_full_eval=True)
    initial = ArrayRecord(get_peft_model_state_dict(model))
    few: dict[str, Any] = {
        "min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1,
    }  # fmt: skip
    result = RavanStrategy(**few).start(Grid([federated(trainer)]), initial, num_rounds=2)
    assert list(result.evaluate_metrics_clientapp) == [1, 2]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    plain = make_trainer(tmp_path, make_model(), evaluated=data_of(0))
    other = RavanStrategy(**few).start(Grid([federated(plain)]), initial, num_rounds=2)
    assert_close(numbers(result), numbers(other))


@pytest.mark.parametrize("data_seed", [None, 7])
def test_a_round_has_its_own_order_and_folder_and_the_arguments_stay(data_seed, tmp_path):
    def orders(nodes):
        watches = [Watch() for _ in range(nodes)]
        trainers = [
            make_trainer(
                tmp_path, make_model(), callbacks=[watch], save_strategy="steps", save_steps=2,
                data_seed=data_seed,
            )
            for watch in watches
        ]  # fmt: skip
        settings = [trainer.args.to_dict() for trainer in trainers]
        config = ConfigRecord({"local-steps": 4})
        strategy = train_only()
        run(strategy, [federated(each) for each in trainers], make_model(), train_config=config)
        assert [trainer.args.to_dict() for trainer in trainers] == settings
        return [rounds for watch in watches for rounds in watch.rounds]

    rounds = orders(2)
    assert len(rounds) == 4
    assert all(each["steps"] == 4 for each in rounds)
    assert all(each["moments"] == 0 for each in rounds)
    for one in range(4):
        for other in range(one):
            assert rounds[one]["order"] != rounds[other]["order"]
            assert sorted(rounds[one]["order"]) == sorted(rounds[other]["order"])
    for node in range(2):
        for number in (1, 2):
            folder = tmp_path / f"client-{node}" / f"round-{number}"
            assert sorted(path.name for path in folder.iterdir()) == [
                "checkpoint-2",
                "checkpoint-4",
            ]
    assert orders(2) == rounds


def test_mixed_precision_wraps_the_model_once(tmp_path):
    model, wrapped = make_model(), []

    class Wrapped(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            wrapped.append("_original_forward" in vars(model))

    app = federated(make_trainer(tmp_path, model, callbacks=[Wrapped()], bf16=True))
    strategy = train_only()
    run(strategy, [app], make_model(), rounds=3)
    assert not strategy.rejected
    assert wrapped == [True] * 3 * STEPS
    forward, depth = model.forward, 0
    while hasattr(forward, "__wrapped__"):
        forward, depth = forward.__wrapped__, depth + 1
    assert depth == 0
    assert "_original_forward" not in vars(model)


def test_heads_are_chosen_by_the_gradient_of_the_trainers_batch(tmp_path):
    """The second layer's heads have bases of their own, so their gradients differ."""
    model, chosen = make_model(), []

    class Chosen(Watch):
        def on_train_begin(self, args, state, control, optimizer=None, train_dataloader=None, **_):
            layers = (model.base_model.model.first, model.base_model.model.second)
            chosen.append([int(of.ravan_H.parametrizations.default[0].index) for of in layers])

    trainer = make_trainer(tmp_path, model, callbacks=[Chosen()], per_device_train_batch_size=24)
    app = federated(trainer, budget=0.25, score="gradient")
    run(train_only(), [app], make_model(), rounds=1)
    other = make_model()
    examples = data_of(0)
    x, labels = (
        torch.stack([e["x"] for e in examples]),
        torch.tensor([e["labels"] for e in examples]),
    )
    other(x=x, labels=labels)["loss"].backward()
    layers = (other.base_model.model.first, other.base_model.model.second)
    assert chosen == [[int(of.ravan_H["default"].grad.norm(dim=(1, 2)).argmax()) for of in layers]]


class WithDropout(Network):
    def forward(self, x, labels=None):
        return super().forward(nn.functional.dropout(x, 0.8, self.training), labels)


def test_heads_do_not_depend_on_what_the_trainer_did_before(tmp_path):
    """The batch that scores them is one of training, whether the model was evaluated before."""
    heads = []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(WithDropout(), ravan())
        trainer = make_trainer(tmp_path, model.train(), evaluated=data_of(3))
        if evaluated:
            trainer.evaluate()
        content = RecordDict({"arrays": ArrayRecord(get_peft_model_state_dict(make_model()))})
        app = federated(trainer, budget=0.25, score="gradient")
        (reply,) = Grid([app]).send_and_receive([Message(content, 1, "train")])
        arrays = reply.content.array_records["arrays"]
        heads.append([arrays[f"{BASE}.{layer}.ravan_heads"].numpy().tolist() for layer in LAYERS])
    assert heads[0] == heads[1]


class KeepsBatches(Trainer):
    def compute_loss(self, model, inputs, *others, **named):
        vars(self).setdefault("batches", []).append(tuple(inputs["x"].flatten().tolist()))
        return super().compute_loss(model, inputs, *others, **named)


@pytest.mark.parametrize("data_seed", [None, 7])
def test_each_round_of_each_client_scores_heads_by_a_batch_of_its_own(data_seed, tmp_path):
    """Also with a seed of the data; and no matter whether clients share a Trainer."""

    def scoring(trainers):
        apps = [federated(trainer, budget=0.25, score="gradient") for trainer in trainers]
        strategy = train_only()
        run(strategy, apps, make_model())
        assert not strategy.rejected
        # In a round it computes the loss of the batch that scores heads, then that of each step.
        return sorted(batch for each in {*trainers} for batch in each.batches[:: 1 + STEPS])

    def made():
        settings = arguments(tmp_path, data_seed=data_seed)
        return KeepsBatches(make_model(), settings, train_dataset=data_of(0))

    apart, shared = scoring([made(), made()]), scoring([made()] * 2)
    assert len({*apart}) == 4
    assert shared == apart


def test_evaluation_is_the_trainers(tmp_path):
    sets = {"near": data_of(5, 8), "far": data_of(6, 12)}

    def build(context):
        partition = context.node_config["partition-id"]
        return make_trainer(
            tmp_path, make_model(), partition, evaluated=list(sets.values())[partition]
        )

    model = make_model()
    result = run(RavanStrategy(), [federated(build)] * 2, model, rounds=1)
    load_arrays(model, result.arrays)
    total = 0.0
    for data in sets.values():
        x, labels = torch.stack([e["x"] for e in data]), torch.tensor([e["labels"] for e in data])
        with torch.no_grad():
            total += len(data) * model.eval()(x=x, labels=labels)["loss"].item()
    metrics = result.evaluate_metrics_clientapp[1]
    assert list(metrics) == ["eval-loss"]
    assert metrics["eval-loss"] == pytest.approx(total / 20, abs=1e-5)


def test_a_run_resumes_from_a_saved_adapter(tmp_path):
    """With the rounds before, two runs of one round equal a run of two."""

    def app():
        return federated(lambda context: make_trainer(
            tmp_path / "out", make_model(), context.node_config["partition-id"]
        ), budget=0.5)  # fmt: skip

    def strategy():
        return train_only(head_mean="all")

    expected = numbers(run(strategy(), [app()] * 2, make_model()))
    first, saved = strategy(), tmp_path / "adapters"

    def save(number, arrays):
        if number:
            first.save(saved / f"round-{number}", make_model())

    with pytest.raises(ValueError, match="save from round 1 on"):
        first.save(saved, make_model())
    run(first, [app()] * 2, make_model(), rounds=1, evaluate_fn=save)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(Network(), saved / "round-1")
    config = ConfigRecord({"rounds-before": 1})
    second = run(strategy(), [app()] * 2, loaded, rounds=1, train_config=config)
    assert_close(numbers(second), expected, 0)


def test_an_adapter_of_another_name_is_saved_in_a_folder_of_that_name(tmp_path):
    """As PEFT does; clients, too, work on the active adapter, whatever its name."""

    def named():
        torch.manual_seed(0)
        return get_peft_model(Network(), ravan(), adapter_name="ours")

    initial = ArrayRecord(get_peft_model_state_dict(named(), adapter_name="ours"))
    strategy = train_only()
    apps = [federated(train_fn, lambda _: named())] * 2
    expected = numbers(strategy.start(Grid(apps), initial, num_rounds=1))
    strategy.save(tmp_path, named())
    loaded = PeftModel.from_pretrained(Network(), tmp_path / "ours")
    saved = ArrayRecord(get_peft_model_state_dict(loaded))
    assert_close({name: array.numpy() for name, array in saved.items()}, expected, 0)


def test_what_fedex_lora_adds_to_weights_is_in_no_adapter(tmp_path):
    strategy = train_only(strategies.FedExLoraStrategy)
    model = make_model(lora)
    app = federated(train_fn, lambda _: make_model(lora))
    run(strategy, [app] * 2, model, rounds=1)
    with pytest.raises(ValueError, match=r"expected an adapter's .* model.merge_and_unload\(\)"):
        strategy.save(tmp_path, model)


# Invalid loops: the round is that of the other two clients.


class Unfreeze(TrainerCallback):
    """Train the backbone, too, from the first step on, as gradual unfreezing does."""

    def on_step_end(self, args, state, control, model=None, **_):
        model.get_parameter("base_model.model.first.base_layer.weight").requires_grad_(True)


class Freeze(TrainerCallback):
    def on_train_end(self, args, state, control, model=None, **_):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "classifier" not in name)


class End(TrainerCallback):
    """End training after its first step."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = True


def with_data(trainer, data):
    trainer.train_dataset = data
    return trainer


def ia3():
    return IA3Config(target_modules=LAYERS, feedforward_modules=[])


def prompted():
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    decoder = LlamaForCausalLM(LlamaConfig(vocab_size=8, num_attention_heads=2, **sizes))
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return get_peft_model(decoder, config)


def backbone_trained():
    model = make_model()
    model.base_model.model.first.base_layer.weight.requires_grad_(True)
    return model


def not_a_number():
    return [{"x": torch.full((12,), math.nan), "labels": 0}] * BATCH


INVALID: dict[str, tuple[Any, str]] = {
    "no model of PEFT": (lambda f: federated(make_trainer(f, Network())),
        "got a Network .* make it with get_peft_model"),
    "another tuner": (lambda f: federated(make_trainer(f, make_model(ia3))),
        "adapter 'default' is of a IA3Model, expected heads or a LoRA; .* with RavanConfig or"),
    "a prompt": (lambda f: federated(make_trainer(f, prompted())),
        "adapter 'default' is of a PromptTuningConfig, expected heads or a LoRA; .* with RavanCon"),
    "a trained backbone": (lambda f: federated(make_trainer(f, backbone_trained())),
        "'base_model.model.first.base_layer.weight' is trained and not part of the adapter"),
    "trains more during the round": (
        lambda f: federated(make_trainer(f, make_model(), callbacks=[Unfreeze()])),
        "'base_model.model.first.base_layer.weight' is trained and not part of the adapter"),
    "trains less after the round": (
        lambda f: federated(make_trainer(f, make_model(), callbacks=[Freeze()])),
        "classifier.* is no longer trained, expected the same 6 parameters"),
    "NaN": (lambda f: federated(with_data(make_trainer(f, make_model()), not_a_number())),
        "is not finite after training, expected finite numbers; lower"),
    "an optimiser": (lambda f: federated(_optimised(make_trainer(f, make_model()))),
        "got one with an optimiser .* pass optimizer_cls_and_kwargs"),
    "divided parameters": (lambda f: federated(divided(make_trainer(f, make_model()))),
        "got FSDP or DeepSpeed, which divide .* leave them out of its arguments"),
    "a function that makes the model": (lambda f: federated(Trainer(
            model_init=lambda: make_model(ravan), args=arguments(f), train_dataset=data_of(0)
        )),
        "got model_init, .* pass model=model_init"),
    "no steps": (lambda f: federated(make_trainer(f, make_model(), max_steps=0)),
        "max_steps = 0: expected a whole number above 0"),
    "no whole batch": (lambda f: federated(with_data(
            make_trainer(f, make_model(), dataloader_drop_last=True), data_of(0, BATCH - 1)
        )),
        "took no step, expected at least one; .* dataloader_drop_last"),
    "a frozen adapter": (lambda f: federated(make_trainer(f, make_model(frozen="ravan_"))),
        "nothing of its adapter 'default' is trained, .* is_trainable=True"),
    "no trainer": (lambda f: federated(lambda context: make_model()),
        "got a PeftModel, expected a Trainer of transformers or trl"),
    "a kept optimiser of some heads": (
        lambda f: federated(make_trainer(f, make_model()), budget=0.5, keep_optimizer=True),
        "budget fraction 0.5, expected 1.* leave keep_optimizer out"),
    "a function without examples": (
        lambda f: federated(lambda model, config: {"loss": 1.0}, make_model()),
        "metrics: got {'loss': 1.0}, expected .* return {\"num-examples\""),
    "a function that returns NaN": (lambda f: federated(
            lambda *_: {"num-examples": 1, "train-loss": math.nan}, make_model()
        ),
        "metric 'train-loss' is nan, expected a finite number"),
    "a budget above 1": (lambda f: federated(train_fn, make_model(), budget=2.0),
        "fraction = 2.0: expected a number above 0 and at most 1"),
}  # fmt: skip


def divided(trainer):
    trainer.is_fsdp_enabled = True  # as accelerate's environment variables make it
    return trainer


def _optimised(trainer):
    trainer.create_optimizer()
    return trainer


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_loop_is_rejected_alone_with_its_reason(kind, tmp_path):
    make, reason = INVALID[kind]

    def good():
        return federated(lambda context: make_trainer(
            tmp_path, make_model(), context.node_config["partition-id"]
        ))  # fmt: skip

    def loop(apps):
        strategy = train_only()
        return strategy, numbers(run(strategy, apps, make_model()))

    _, expected = loop([good()] * 2)
    strategy, got = loop([good(), good(), make(tmp_path)])
    assert_close(got, expected, 0)
    assert [list(rejected) for rejected in strategy.rejected.values()] == [[3], [3]]
    assert re.search(reason, strategy.rejected[1][3]), strategy.rejected[1][3]


def test_parameters_may_not_change_between_rounds(tmp_path):
    """A factory that freezes the classifier from the second round on."""
    calls: list[str] = []

    def build(context):
        calls.append("classifier" if calls else "nothing")
        return make_trainer(tmp_path, make_model(frozen=calls[-1]))

    strategy = train_only()
    run(strategy, [federated(build)], make_model(), rounds=3)
    assert sorted(strategy.rejected) == [2, 3]
    assert "classifier" in strategy.rejected[2][1]
    assert "no longer trained, expected the same 6" in strategy.rejected[2][1]


@pytest.mark.parametrize("early", [[End()], [EarlyStoppingCallback(1)]], ids=["ended", "stopped"])
def test_a_loop_that_ends_early_counts_and_is_reported(early, tmp_path, caplog):
    """The mean over two clients, of which one misses steps."""
    changes: dict[str, Any] = {}
    if isinstance(early[0], EarlyStoppingCallback):  # the loss of its evaluations never falls
        changes = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 0.0,
                   "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
                   "metric_for_best_model": "loss", "max_steps": 6}  # fmt: skip
    trainer = make_trainer(tmp_path, make_model(), callbacks=early, evaluated=data_of(3), **changes)
    steps = 2 if changes else 1
    app = federated(make_trainer(tmp_path, make_model(), 1, max_steps=trainer.args.max_steps))
    strategy = train_only()
    result = run(strategy, [federated(trainer), app], make_model())
    assert not strategy.rejected
    expected = trainer.args.max_steps
    for metrics in result.train_metrics_clientapp.values():
        assert metrics["missing-steps"] == (expected - steps) / 2
        assert metrics["steps"] == (expected + steps) / 2
    assert f"ended after {steps} of {expected} steps" in caplog.text


@pytest.mark.parametrize("of_function", [True, False])
def test_without_evaluation_data_only_evaluation_fails(of_function, tmp_path):
    model = make_model()
    app = federated(train_fn, model) if of_function else federated(make_trainer(tmp_path, model))
    reasons = []

    class Noting(Grid):
        def _deliver(self, message):
            reply = super()._deliver(message)
            reasons.extend([reply.error.reason] if reply.has_error() else [])
            return reply

    initial = ArrayRecord(get_peft_model_state_dict(model))
    strategy = RavanStrategy()
    result = strategy.start(Noting([app] * 2), initial, num_rounds=1)
    assert not strategy.rejected
    assert not result.evaluate_metrics_clientapp
    assert len(reasons) == 2
    assert all("set fraction_evaluate=0.0 in the strategy" in reason for reason in reasons)


class Noisy(Trainer):
    """Draw an evaluation's loss from each library's random numbers."""

    def evaluate(self, *_, **__):
        return {"eval_loss": random.random() + float(np.random.rand()) + float(torch.rand(()))}


def test_an_evaluation_depends_on_seed_round_and_partition_alone(tmp_path):
    losses: list[list[float]] = []

    class Noting(Grid):
        def _deliver(self, message):
            reply = super()._deliver(message)
            if message.metadata.message_type == "evaluate":
                losses[-1].append(reply.content["metrics"]["eval-loss"])
            return reply

    for used in (0, 5):
        trainer = Noisy(
            make_model(), arguments(tmp_path), train_dataset=data_of(0), eval_dataset=data_of(1)
        )
        losses.append([])
        random.seed(used)
        torch.rand(used)
        initial = ArrayRecord(get_peft_model_state_dict(make_model()))
        RavanStrategy().start(Noting([federated(trainer)] * 2), initial, num_rounds=2)
    first, second = losses
    assert first == second
    assert len({*first}) == 4  # of two clients in two rounds


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.parametrize(("accumulation", "expected"), [(1, 8 + 8 + 4 + 8), (2, 3 * 20 + 8 + 8)])
def test_a_stream_counts_the_examples_of_its_short_batches(accumulation, expected, tmp_path):
    """It has 20 examples in batches of 8, 8 and 4, and begins again until all steps are done.

    The Trainer's step of two batches is done at the second of each pass, so four need four passes.
    """
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 4}
    trainer = make_trainer(tmp_path, make_model(), **options)
    with_data(trainer, Stream(data_of(0, 20)))
    content = RecordDict({"arrays": ArrayRecord(get_peft_model_state_dict(make_model()))})
    (reply,) = Grid([federated(trainer)]).send_and_receive([Message(content, 1, "train")])
    assert reply.content["metrics"]["num-examples"] == expected


@pytest.mark.parametrize("option", [{"score": "wieght"}, {"selection": "layers"}])
@pytest.mark.parametrize("model", [None, make_model])
def test_an_unknown_choice_is_refused_at_once(option, model):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name} '{value}' is unknown: did you mean"):
        federated(train_fn, model, **option)


@pytest.mark.parametrize("options", [{"keep_optimizer": True}, {"score": "gradient"}])
def test_what_only_a_trainer_can_do_is_refused_of_a_function(options):
    with pytest.raises(ValueError, match=r"got a function, expected a Trainer.* score='weight'"):
        federated(train_fn, make_model(), **options)
