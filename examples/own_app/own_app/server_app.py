"""Start the strategy, and measure the accuracy after every round."""

from collections.abc import Callable
from functools import partial

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from own_app.task import load_data, load_model
from ravan_flwr.strategies import FedExLoraStrategy, FlexLoraStrategy, RavanStrategy, load_arrays

STRATEGIES: dict[str, Callable[..., FedAvg]] = {
    "ravan": partial(RavanStrategy, head_mean="all"),  # since budgets differ
    "fedit": FedAvg,  # over PEFT's LoRA
    "flexlora": FlexLoraStrategy,
    "fedex-lora": FedExLoraStrategy,
}
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    name = str(context.run_config["strategy"])
    if name not in STRATEGIES:
        raise ValueError(f"strategy = {name!r}: expected one of {', '.join(STRATEGIES)}; set one")
    model = load_model(name)
    images, labels = load_data()

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        load_arrays(model, arrays)
        return MetricRecord({"accuracy": (model(images).argmax(1) == labels).float().mean().item()})

    strategy = STRATEGIES[name](fraction_evaluate=0.0)
    rounds = int(context.run_config["num-server-rounds"])
    initial = ArrayRecord(get_peft_model_state_dict(model))
    strategy.start(grid, initial, num_rounds=rounds, evaluate_fn=evaluate)
