"""Start the strategy; the clients measure the loss of every round."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict

from own_sft.task import make_model
from ravan_flwr.strategies import FFALoraStrategy, RavanStrategy

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
    model = make_model(name)
    rounds = int(context.run_config["num-server-rounds"])
    initial = ArrayRecord(get_peft_model_state_dict(model))
    STRATEGIES[name]().start(grid, initial, num_rounds=rounds)
