"""Train with a plain loop what the client's budget pays for."""

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from own_app.task import load_data, load_model
from ravan_flwr.strategies import choose, collect_arrays, load_arrays, restore

BUDGETS = (1.0, 0.5, 0.25, 0.75)  # by client
STEPS, BATCH = 30, 32
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Load, choose, train, collect."""
    strategy = str(context.run_config["strategy"])
    client, clients = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    model = load_model(strategy)
    load_arrays(model, message.content.array_records["arrays"])
    if strategy in ("ravan", "flexlora"):  # the others have no budgets
        choose(model, BUDGETS[client % len(BUDGETS)], score="weight")
    images, labels = load_data(client, clients)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    for _ in range(STEPS):
        batch = torch.randint(len(labels), (BATCH,))
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train-loss": loss.item(), "num-examples": len(labels)})
    content = RecordDict({"arrays": collect_arrays(model), "metrics": metrics})
    restore(model)  # for the next client of this process
    return Message(content, reply_to=message)
