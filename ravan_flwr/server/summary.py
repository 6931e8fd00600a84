"""Sum a run up, from the records of its rounds."""

import time

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.fingerprint import code_version
from ravan_flwr.messages.parcel import new_run_id
from ravan_flwr.runs.collapse_detection import merit
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord, Summary
from ravan_flwr.server.metric_target import MetricTarget
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.training.model_and_data import ModelAndData


def summary_of(
    bench: ModelAndData, config: Config, records: list[RoundRecord], num_clients: int
) -> Summary:
    """Make what `summary.json` holds, but for the norms of the heads."""
    measured = [record["metrics"] for record in records if record["metrics"]]
    metric = bench.task.metric
    summary: Summary = {
        "method": config.method,
        "preset": config.preset,
        "seed": config.seed,
        "classifier": config.classifier,
        "num-clients": num_clients,
        "rounds": sum(record["round"] > 0 for record in records),  # 0 is the calibration
        "rank": config.rank,
        "learning-rate": config.learning_rate,
        "trainable-parameters": bench.model.trainable_parameters(),
        "adapter-parameters": bench.model.method.trainable_parameters(),
        "metric": metric,
        "metrics": {
            "final": measured[-1] if measured else {},
            "best": max(measured, key=lambda m: merit(m, metric)) if measured else {},
        },
        "bytes-up": sum(record["bytes-up"] for record in records),
        "bytes-down": sum(record["bytes-down"] for record in records),
        "rejected": sum(len(record["rejected"]) for record in records),
        "collapsed": [record["round"] for record in records if "collapsed" in record],
        "without-effect": [record["round"] for record in records if "refused" in record],
        "left-out": records[-1]["left-out"] if records else [],
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "code": code_version(),
    }
    trained = [client for record in records if record["round"] for client in record["clients"]]
    if all("steps" in client for client in trained):
        summary["steps"] = sum(client["steps"] for client in trained)
    if spreads := [record["spread"] for record in records if record.get("spread")]:
        summary["spread"] = spreads[-1]
    if config.until_metric:
        summary["until-metric"] = config.until_metric
        if (reached := MetricTarget.of(config, metric, records).round) is not None:
            summary["reached"] = reached
    if bench.model.method.personal is not None:
        summary["began-anew"] = sum(len(record.get("began-anew", ())) for record in records)
    return summary


def carry_over(directory: RunDirectory, start: ResumePoint, summary: Summary) -> None:
    """Keep the run's id, and who has the result where no round was added to it."""
    if start.done is None or not (directory.path / "summary.json").is_file():
        summary["run-id"] = new_run_id()
        return
    before = directory.read_summary()
    summary["run-id"] = before.get("run-id") or new_run_id()
    if start.done != summary["rounds"]:
        return
    if before["rounds"] == start.done and "delivered" in before:
        summary["delivered"] = before["delivered"]
        summary["not-delivered"] = before["not-delivered"]
