"""Run the rounds: Flower's FedAvg, and a timestamp after every round."""

import itertools
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from plain_fedit.task import accuracy, load_model, load_test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run rounds of FedAvg."""
    settings = context.run_config
    clients = int(settings["clients-per-round"])
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.5)
    times, scores = [], []

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        model = load_model(settings)
        set_peft_model_state_dict(model, arrays.to_torch_state_dict())
        scores.append(accuracy(model, load_test(settings)))
        times.append(time.perf_counter())
        return MetricRecord({"accuracy": scores[-1]})

    FedAvg(
        fraction_train=clients / len(nodes),
        fraction_evaluate=0.0,
        min_train_nodes=clients,
        min_available_nodes=clients,
    ).start(
        grid=grid,
        initial_arrays=ArrayRecord(get_peft_model_state_dict(load_model(settings))),
        num_rounds=int(settings["num-rounds"]),
        evaluate_fn=evaluate,
    )
    seconds = [after - before for before, after in itertools.pairwise(times)]
    Path(str(settings["times"])).write_text(json.dumps({"seconds": seconds, "accuracy": scores}))
