"""Start the strategy, measure the accuracy after every round, and save the adapter."""

from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from own_trainer.task import load_examples, make_model
from ravan_flwr.strategies import FFALoraStrategy, RavanStrategy, load_arrays

STRATEGIES: dict[str, Callable[..., FedAvg]] = {
    "ravan": RavanStrategy, "fedit": FedAvg, "ffa-lora": FFALoraStrategy
}  # fmt: skip
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    name = str(context.run_config["strategy"])
    if name not in STRATEGIES:
        raise ValueError(f"strategy = {name!r}: expected one of {', '.join(STRATEGIES)}; set one")
    model, examples = make_model(name), load_examples(test=True)
    pixels = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["labels"] for example in examples])

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        load_arrays(model, arrays)
        with torch.inference_mode():
            guesses = model.eval()(pixel_values=pixels).logits.argmax(1)
        return MetricRecord({"accuracy": (guesses == labels).float().mean().item()})

    rounds = int(context.run_config["num-server-rounds"])
    initial = ArrayRecord(get_peft_model_state_dict(model))
    strategy = STRATEGIES[name](fraction_evaluate=0.0)
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=evaluate)
