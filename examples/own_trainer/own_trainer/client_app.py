"""Fine-tune a small vision transformer on handwritten digits: one of many clients."""

from flwr.app import Context
from transformers import Trainer, TrainingArguments

from own_trainer.task import load_examples, make_model
from ravan_flwr.strategies import federated


def make_trainer(context: Context) -> Trainer:
    """Make a Trainer as anywhere."""
    model = make_model(str(context.run_config["strategy"]))
    options = TrainingArguments(
        "digits", max_steps=30, per_device_train_batch_size=32, learning_rate=3e-3,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    examples = load_examples(context.node_config)
    return Trainer(model, options, train_dataset=examples)


app = federated(make_trainer)
