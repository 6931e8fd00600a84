"""Make the example's Trainer, and spoil it."""

import math

import torch
from flwr.app import ConfigRecord
from own_trainer import client_app
from own_trainer.task import make_model
from peft import IA3Config, get_peft_model
from transformers import Trainer, TrainerCallback

from ravan_flwr.strategies import federated
from tests.flower.faulty_trainers import FAULTS


class Early(TrainerCallback):
    """End training after seven steps."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 7


def build(context):
    """Make the trainer of a node."""
    trainer = client_app.make_trainer(context)
    match list(FAULTS)[context.node_config["partition-id"]]:
        case "ends early":
            trainer.add_callback(Early())
        case "has no model of PEFT":
            return Trainer(make_model("ravan").unload(), trainer.args)
        case "has another tuner":
            config = IA3Config(target_modules=["q_proj", "fc1"], feedforward_modules=["fc1"])
            return Trainer(get_peft_model(make_model("ravan").unload(), config), trainer.args)
        case "trains less from the second round on":
            asked_before = "asked" in context.state
            context.state["asked"] = ConfigRecord()
            assert trainer.model is not None
            for name, parameter in trainer.model.named_parameters():
                if asked_before and "classifier" in name:
                    parameter.requires_grad_(False)
        case "learns from NaN":
            wrong = {"pixel_values": torch.full((1, 8, 8), math.nan), "labels": 0}
            trainer.train_dataset = [wrong] * 64
    return trainer


app = federated(build)
