"""Answer messages: the ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from plain_fedit.task import load_model, load_train, train

app = ClientApp()


@app.train()
def train_(message: Message, context: Context) -> Message:
    """Load, train, send back."""
    settings, node = context.run_config, context.node_config
    model = load_model(settings)
    set_peft_model_state_dict(model, message.content.array_records["arrays"].to_torch_state_dict())
    loader = load_train(settings, int(node["partition-id"]), int(node["num-partitions"]))
    loss = train(model, loader, int(settings["local-steps"]), float(settings["learning-rate"]))
    number = len(loader.dataset)  # type: ignore[arg-type]
    content = RecordDict(
        {
            "arrays": ArrayRecord(get_peft_model_state_dict(model)),
            "metrics": MetricRecord({"train-loss": loss, "num-examples": number}),
        }
    )
    return Message(content, reply_to=message)
