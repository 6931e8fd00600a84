"""Fine-tune a small vision transformer on handwritten digits: one machine, no federation."""

from transformers import Trainer, TrainingArguments

from own_trainer.task import load_examples, make_model


def make_trainer() -> Trainer:
    """Make a Trainer as anywhere."""
    model = make_model("ravan")
    options = TrainingArguments(
        "digits", max_steps=30, per_device_train_batch_size=32, learning_rate=3e-3,
        lr_scheduler_type="constant", report_to="none", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    examples = load_examples()
    return Trainer(model, options, train_dataset=examples)


trainer = make_trainer()
trainer.train()
trainer.save_model("digits-adapter")
