"""Train and evaluate by trl's SFTTrainer."""

from flwr.app import Context
from trl import SFTConfig, SFTTrainer

from own_sft.task import load_texts, make_model, make_tokenizer
from ravan_flwr.strategies import federated


def make_trainer(context: Context) -> SFTTrainer:
    """Make the trainer of a node, which evaluates on the texts that it trains on."""
    client, clients = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    texts = load_texts(client, clients)
    options = SFTConfig(
        "sft", max_steps=20, per_device_train_batch_size=8, learning_rate=0.01, bf16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    model = make_model(str(context.run_config["strategy"]))
    return SFTTrainer(
        model, options, train_dataset=texts, eval_dataset=texts, processing_class=make_tokenizer()
    )


app = federated(make_trainer)
