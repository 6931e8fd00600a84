"""Make a Flower client of a training loop that exists: a Trainer's, or any function's.

    app = federated(trainer)             a Trainer of transformers or trl, with a PEFT model
    app = federated(build)               build(context) returns the trainer of that node
    app = federated(train_fn, model)     train_fn(model, config) trains, and returns metrics

A round is one call of `trainer.train()` or `train_fn` between the functions of client.py: load the
arrays, choose what the node's budget fraction allows, train, collect, restore. An error ends the
round for that client alone: Flower sends its text, and the strategy lists it as `rejected`.
"""

import copy
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from ravan_flwr.config.key import check_choice
from ravan_flwr.methods.multihead import SCORINGS
from ravan_flwr.seeding import ClientRound
from ravan_flwr.strategies.client import (
    check_trained,
    choose,
    collect_arrays,
    frozen_parameters,
    load_arrays,
    restore,
)
from ravan_flwr.strategies.ranks import Answer, answer_in_ranks

log = getLogger("flwr")

Config = dict[str, Any]
Metrics = Mapping[str, float]
STATE = "federated"  # record of a node's state: names of trained parameters, the optimiser


def federated(
    work: Any, model: nn.Module | Callable[[Context], nn.Module] | None = None, *,
    budget: float | Callable[[Context], float] | None = None, score: str = "random",
    selection: str = "layer", keep_optimizer: bool = False, processes: int = 1,
) -> ClientApp:  # fmt: skip
    """Return a Flower ClientApp that trains a PEFT model by a loop that exists.

    For the strategies of this package, and for Flower's `FedAvg` over a LoRA (FedIT). Freeze
    `lora_A` where the strategy's clients must (FFA-LoRA, FedSVD).

    A Trainer keeps its data, arguments and callbacks. Its seed in a round is a function of
    `args.seed`, round and partition, and it writes to `output_dir/client-<partition>/round-<n>`.
    Its replies have the metrics `train-loss`, `num-examples`, `steps`, and `missing-steps`: above 0
    where the loop ended early.

    Args:
        work: Trainer | Callable. A Trainer of transformers or trl: a round is its `max_steps`, or
            the `local-steps` of the strategy's `train_config`. Or a function of the node's context
            that returns one, called for every message, where nodes share code but no data. With
            `model`, a function of the model and a configuration (the keys of run, node and message)
            that returns metrics, `num-examples` among them. Random numbers are seeded before it.
        model: nn.Module | Callable | None (default: None). The model that `get_peft_model`
            returned, or a function of the context that returns it; only for a function.
        budget: float | Callable | None (default: None). The node's budget fraction, or a function
            of the context that returns it. None: the node config's `budget`, or 1 without one.
        score: str (default: "random"). As in `choose`; "gradient" for a Trainer alone.
        selection: str (default: "layer"). As in `choose`.
        keep_optimizer: bool (default: False). Whether a Trainer's optimiser continues with the
            moments of the node's last round, which Flower keeps in the node's context. The schedule
            of learning rates begins anew. For a Trainer with the full budget alone.
        processes: int (default: 1). How many processes train a Trainer's model on this machine, a
            GPU each, as `torchrun` would. Each calls `work`, which has to be a function at the top
            of a module. The batch of a step is `processes` times as large.

    Returns:
        A ClientApp for training and, of a Trainer with `eval_dataset`, evaluation. A resumed run
        counts rounds on where `train_config` has `rounds-before`.
    """
    check_choice("score", score, SCORINGS)
    check_choice("selection", selection, ("layer", "global"))
    if model is not None and (keep_optimizer or score == "gradient"):
        raise ValueError(
            f"keep_optimizer = {keep_optimizer!r}, score = {score!r}: got a function, expected a "
            "Trainer for the one or the other; keep the optimiser in the function, or pass "
            "score='weight'"
        )
    if not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes = {processes!r}: expected a whole number above 0; pass 2, say")
    if processes > 1 and (model is not None or not callable(work)):
        got = "a trainer" if model is None else "a function that trains"
        raise ValueError(
            f"processes = {processes}: got {got}, expected a function of the context that "
            "returns a Trainer, since each process makes its own; pass build"
        )
    client = Client(work, model, budget, score, selection, keep_optimizer, processes)
    app = ClientApp()

    def reply(answer: Answer, message: Message, context: Context) -> Message:
        content = message.content
        if processes > 1:
            return Message(answer_in_ranks(answer, processes, content, context), reply_to=message)
        return Message(answer(content, context), reply_to=message)

    app.train()(partial(reply, client.train))
    app.evaluate()(partial(reply, client.evaluate))
    return app


@dataclass(frozen=True)
class Client:
    """Answer messages by a loop; the fields are the arguments of `federated`."""

    work: Any
    model: nn.Module | Callable[[Context], nn.Module] | None
    budget: float | Callable[[Context], float] | None
    score: str
    selection: str
    keep_optimizer: bool
    processes: int

    def loop(self, context: Context) -> "TrainerLoop | FunctionLoop":
        """Make the node's loop."""
        if self.model is None:
            return TrainerLoop(self.work, context, self.processes, self.keep_optimizer)
        model = self.model if isinstance(self.model, nn.Module) else self.model(context)
        return FunctionLoop(self.work, model)

    def train(self, content: RecordDict, context: Context) -> RecordDict:
        """Load, choose, train, collect, restore."""
        message = _config(content)
        config = {**context.run_config, **context.node_config, **message}
        loop, state = self.loop(context), context.state.setdefault(STATE, ConfigRecord())
        assert isinstance(state, ConfigRecord)
        trained = check_trained(loop.model)
        _check_same(trained, cast(list[str], state.setdefault("trained", trained)))
        share = self.budget(context) if callable(self.budget) else self.budget
        fraction: Any = context.node_config.get("budget", 1.0) if share is None else share
        if self.keep_optimizer and fraction != 1:
            raise ValueError(
                f"keep_optimizer = True: got the budget fraction {fraction!r}, expected 1, since "
                "other heads are trained in other rounds; leave keep_optimizer out"
            )
        this_round = _round(loop.seed(config), config, context)
        try:
            load_arrays(loop.model, _only(content))
            if fraction != 1:
                loop.seed_round(this_round)  # the mini-batch that scores heads
                choose(
                    loop.model, fraction, self.score, selection=self.selection,
                    generator=this_round.generator("heads"), backward=loop.backward,
                )  # fmt: skip
            if isinstance(loop, TrainerLoop):
                metrics = _record(loop.train(this_round, message.get("local-steps"), state))
            else:
                metrics = _record(loop.train(this_round, config))
            arrays = collect_arrays(loop.model)
        finally:
            restore(loop.model)
        _check_same(check_trained(loop.model), trained)
        for name, array in arrays.items():
            if not np.isfinite(array.numpy()).all():
                raise ValueError(
                    f"array {name!r} is not finite after training, expected finite numbers; lower "
                    "the learning rate, or clip gradients"
                )
        if loop.moments:
            state["optimizer"] = loop.moments
        return RecordDict({"arrays": arrays, "metrics": metrics})

    def evaluate(self, content: RecordDict, context: Context) -> RecordDict:
        """Load, evaluate, restore."""
        config = {**context.run_config, **context.node_config, **_config(content)}
        loop = self.loop(context)
        check_trained(loop.model)
        _seed_everything(_round(loop.seed(config), config, context), "evaluate")
        try:
            load_arrays(loop.model, _only(content))
            metrics = _record(loop.evaluate())
        finally:
            restore(loop.model)
        return RecordDict({"metrics": metrics})


class FunctionLoop:
    """Train by a function of the model and a configuration."""

    backward = None
    moments = b""  # of no optimiser

    def __init__(self, train_fn: Callable[[Any, Config], Metrics], model: nn.Module) -> None:
        self.train_fn, self.model = train_fn, model

    def seed(self, config: Config) -> int:
        """Return the run config's seed, or 0."""
        return int(config.get("seed", 0))

    def seed_round(self, this_round: ClientRound) -> None:
        """Seed all random numbers of a client's round."""
        _seed_everything(this_round)

    def train(self, this_round: ClientRound, config: Config) -> Metrics:
        """Call the function."""
        self.seed_round(this_round)
        return self.train_fn(self.model, config)

    def evaluate(self) -> Metrics:
        """Raise ValueError: the function only trains."""
        raise ValueError(
            "evaluate: got a function that trains, expected a Trainer with eval_dataset; set "
            "fraction_evaluate=0.0 in the strategy, and pass evaluate_fn to start"
        )


class TrainerLoop:
    """Train by a Trainer, whose arguments are others during a round."""

    def __init__(self, work: Any, context: Context, processes: int, keep_optimizer: bool) -> None:
        from transformers import Trainer  # noqa: PLC0415 (heavy, and no function needs it)

        trainer: Any = work(context) if callable(work) else work
        if not isinstance(trainer, Trainer):
            raise ValueError(
                f"federated: got a {type(trainer).__name__}, expected a Trainer of transformers or "
                "trl, or a function of the context that returns one; to a function that trains, "
                "add the model"
            )
        if processes > 1 and trainer.args.world_size != processes:
            raise ValueError(
                f"processes = {processes}: the Trainer found {trainer.args.world_size}, expected "
                "as many; without GPUs pass use_cpu=True in its TrainingArguments"
            )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise ValueError(
                "trainer: got FSDP or DeepSpeed, which divide the parameters among processes, "
                "expected neither, so that one process has all; leave them out of its arguments"
            )
        if getattr(trainer, "model_init", None) is not None:
            raise ValueError(
                "trainer: got model_init, which would replace the model in each round, expected a "
                "model; pass model=model_init() instead"
            )
        self.trainer: Any = trainer
        self.model: Any = self.trainer.model
        self.keep_optimizer = keep_optimizer
        self.moments = b""  # of the optimiser, after a round

    def seed(self, _: Config) -> int:
        """Return the seed of the Trainer's arguments."""
        return int(self.trainer.args.seed)

    def seed_round(self, this_round: ClientRound) -> int:
        """Seed all random numbers of a client's round, and return the seed."""
        seed = _seed_everything(this_round)
        if self.trainer.args.data_seed is not None:  # of which accelerate has a copy
            self.trainer.accelerator.dataloader_config.data_seed = seed
        return seed

    def backward(self) -> None:
        """Run one mini-batch forward and backward; every process gets the mean gradients."""
        self.model.train()  # as in the steps; it may have been evaluated before
        batch = next(iter(self.trainer.get_train_dataloader()))
        self.trainer.compute_loss(self.model, batch).backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = self.trainer.accelerator.reduce(parameter.grad, "mean")

    def train(self, this_round: ClientRound, steps: Any, state: ConfigRecord) -> Metrics:
        """Call `trainer.train()`, with a new optimiser and a new schedule.

        `steps` is the length of the round; None for that of the Trainer's arguments.
        """
        trainer, args = self.trainer, self.trainer.args
        number = args.max_steps if steps is None else steps
        by_epochs = steps is None and number == -1  # a Trainer without max_steps
        if type(number) is not int or (number < 1 and not by_epochs):
            name = "the trainer's max_steps" if steps is None else "train_config's local-steps"
            raise ValueError(f"{name} = {number!r}: expected a whole number above 0; change it")
        if any(made is not None for made in (trainer.optimizer, trainer.lr_scheduler)):
            raise ValueError(
                "trainer: got one with an optimiser or a schedule of learning rates, expected "
                "none, since each round makes new ones; pass optimizer_cls_and_kwargs instead"
            )
        trainer.args = copy.copy(args)
        trainer.args.output_dir = str(
            Path(args.output_dir, f"client-{this_round.partition_id}", f"round-{this_round.round}")
        )
        trainer.args.max_steps = number
        trainer.args.seed = self.seed_round(this_round)
        if args.data_seed is not None:
            trainer.args.data_seed = trainer.args.seed
        for callback in trainer.callback_handler.callbacks:
            if hasattr(callback, "logging_dir") and "TENSORBOARD_LOGGING_DIR" not in os.environ:
                callback.logging_dir = None  # TensorBoard's, which is in the last round's folder
        frozen = frozen_parameters(self.model)

        def freeze(*_: object) -> None:
            for parameter in frozen:
                parameter.requires_grad_(False)

        # PEFT trains all of an adapter that it makes active, which DPOTrainer does in every step.
        hook = self.model.register_forward_pre_hook(freeze)
        trainer.model_wrapped = self.model  # its parameters are others since `choose`
        try:
            if self.keep_optimizer and "optimizer" in state:
                moments = io.BytesIO(cast(bytes, state["optimizer"]))
                optimizer = trainer.create_optimizer()
                kept = torch.load(moments, map_location="cpu", weights_only=True)
                optimizer.load_state_dict(optimizer.state_dict() | {"state": kept})
            with _counting(trainer) as sizes:
                local = trainer.train().training_loss
            loss = trainer.accelerator.reduce(torch.tensor(local, device=args.device), "mean")
            if self.keep_optimizer:
                moments = io.BytesIO()
                torch.save(trainer.optimizer.state_dict()["state"], moments)
                self.moments = moments.getvalue()
        finally:
            hook.remove()
            freeze()
            # Accelerate wraps `forward` for mixed precision, and would wrap it again in each round.
            trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)
            vars(self.model).pop("_is_accelerate_prepared", None)  # or the next round is in float32
            trainer.args, trainer.optimizer, trainer.lr_scheduler = args, None, None
        taken, expected = trainer.state.global_step, trainer.state.max_steps
        if taken < 1:
            raise ValueError(
                "trainer: its loop took no step, expected at least one; give it examples for a "
                "whole batch, or leave dataloader_drop_last out"
            )
        if taken < expected and args.process_index == 0:
            log.warning("round %d: ended after %d of %d steps", this_round.round, taken, expected)
        examples = trainer.train_dataset  # a stream has no length
        seen = torch.tensor(sum(sizes), device=args.device)
        return {
            "train-loss": loss.item(), "steps": taken, "missing-steps": expected - taken,
            "num-examples": len(examples) if isinstance(examples, Sized)
            else int(trainer.accelerator.reduce(seen, "sum")),
        }  # fmt: skip

    def evaluate(self) -> Metrics:
        """Return what `trainer.evaluate()` measures, without times."""
        data = self.trainer.eval_dataset
        if not isinstance(data, Sized):
            raise ValueError(
                f"trainer: eval_dataset is {type(data).__name__}, expected a data set with a "
                "length; pass one, or set fraction_evaluate=0.0 in the strategy"
            )
        with _same_numbers(self.model):
            results = self.trainer.evaluate()
        times = ("_runtime", "_per_second", "_time")
        measured = {
            name.replace("_", "-"): value
            for name, value in results.items()
            if name.startswith("eval_") and not name.endswith(times)
        }
        number = sum(map(len, data.values())) if isinstance(data, dict) else len(data)
        return measured | {"num-examples": number}


@contextmanager
def _counting(trainer: Any) -> Iterator[list[int]]:
    """Yield the numbers of examples of the batches that are trained on: the last may be short."""
    from transformers.trainer_pt_utils import find_batch_size  # noqa: PLC0415

    step, sizes = trainer.training_step, list[int]()

    def counted_step(model: nn.Module, inputs: Any, *others: Any, **named: Any) -> Any:
        sizes.append(find_batch_size(inputs) or 0)
        return step(model, inputs, *others, **named)

    trainer.training_step = counted_step
    try:
        yield sizes
    finally:
        del trainer.training_step  # of this object; its class has one


@contextmanager
def _same_numbers(model: nn.Module) -> Iterator[None]:
    """Restore the numbers of a model, which an evaluation in bfloat16 or float16 casts for good."""
    parameters = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for parameter, numbers in parameters:
            parameter.data = numbers
        for module, earlier in buffers:
            module._buffers |= earlier


def _config(content: RecordDict) -> Config:
    """Return the configuration in a message."""
    return {name: x for record in content.config_records.values() for name, x in record.items()}


def _round(seed: int, config: Config, context: Context) -> ClientRound:
    """Return what the random numbers of a message's work are a function of."""
    number = config.get("server-round", 0) + config.get("rounds-before", 0)
    return ClientRound(seed, number, config.get("partition-id", context.node_id))


def _only(content: RecordDict) -> ArrayRecord:
    (arrays,) = content.array_records.values()
    return arrays


def _check_same(trained: list[str], before: list[str]) -> None:
    """Raise ValueError if other parameters are trained than before."""
    if other := sorted({*trained} ^ {*before}):
        raise ValueError(
            f"model: {other[0]!r} is {'now' if other[0] in trained else 'no longer'} trained, "
            f"expected the same {len(before)} parameters throughout the run; freeze what is not to "
            "be trained before the first round, and change it in no callback"
        )


def _record(metrics: Any) -> MetricRecord:
    """Return metrics in a record; ValueError unless they are finite, with num-examples."""
    if not isinstance(metrics, Mapping) or "num-examples" not in metrics:
        raise ValueError(
            f"metrics: got {metrics!r}, expected numbers by name; return "
            '{"num-examples": len(examples), "train-loss": loss}, say'
        )
    values: Config = {name: v if isinstance(v, int) else float(v) for name, v in metrics.items()}
    if wrong := [name for name, value in values.items() if not math.isfinite(value)]:
        raise ValueError(
            f"metric {wrong[0]!r} is {values[wrong[0]]}, expected a finite number; lower the "
            "learning rate, or clip gradients"
        )
    return MetricRecord(values)


def _seed_everything(this_round: ClientRound, purpose: str = "train") -> int:
    """Seed Python, NumPy and PyTorch for a client's round, and return the seed."""
    from transformers import set_seed  # noqa: PLC0415

    seed = this_round.derive(purpose) % 2**32  # NumPy takes no larger one
    set_seed(seed)
    return seed
