"""Messages for the user: settings that fail, the default learning rate, a run's result."""

from collections.abc import Mapping
from logging import getLogger
from pathlib import Path

from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config, has_default_rate
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Method
from ravan_flwr.methods.multihead import MultiHeadMethod
from ravan_flwr.runs.console import count, megabytes, minutes
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Summary
from ravan_flwr.server.runtime import in_process, simulating
from ravan_flwr.specs import Scalar
from ravan_flwr.training.local_steps import check_precision
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)


def report_default_learning_rate(run_config: Mapping[str, Scalar], config: Config) -> None:
    """Log that the learning rate is the method's default, if it is."""
    if has_default_rate(run_config):
        preset = run_config.get("preset", config.preset)
        log.info(
            "learning rate %g: the default of %s, since the preset names none; `ravan-flwr tune "
            "preset=%s method=%s` chooses a better one",
            *(config.learning_rate, config.method, preset, config.method),
        )


def report_float32(loaded: ModelAndData, config: Config) -> None:
    """Log what a run in float32 on a GPU could do to be faster."""
    exact = config.precision == "float32" and config.float32_matmul == "highest"
    if loaded.model.device.type == "cuda" and exact:
        log.info(
            "matrix products in float32: float32-matmul=tf32 and precision=bfloat16 are several "
            "times as fast on this GPU, and round more (docs/gpu.md)"
        )


def report_start(config: Config, method: Method, steps: list[int], eligible: int) -> None:
    """Log the method, its number of trained parameters, and the clients of a round.

    `steps` are the clients' local steps, and `eligible` is the number of clients that can train.
    """
    low, high, asked = min(steps, default=0), max(steps, default=0), config.clients_per_round
    fewer = eligible < asked and not METHODS[config.method].all_clients
    trained = method.trainable_parameters()
    log.info(
        "%s%s, %d trained parameters%s (%.1f %% of a LoRA of rank %d); %s a round, %s of %d%s",
        config.method, f", rank {method.rank}" if method.rank else "", trained,
        " and the classifier" if config.classifier == "trained" else "",
        100 * trained / method.budget, config.lora_rank,
        count(min(asked, eligible), "client"),
        (f"{low} to " if low < high else "") + count(high, "local step"), config.batch_size,
        f"; clients-per-round is {asked}, but no more can take part" * fewer,
    )  # fmt: skip
    if isinstance(method, MultiHeadMethod) and method.init == "gram-schmidt":
        columns, side = method.heads * method.rank, method.side
        if columns > side:
            log.info(
                "init=gram-schmidt: heads x rank = %d, the smallest layer has %d dimensions: "
                "the bases of %d heads at a time are orthonormal there",
                columns, side, side // method.rank,
            )  # fmt: skip
    if config.secure_aggregation:
        log.info(
            "secure-aggregation: the server sees sums over at least %d clients, head by head; "
            "heads that fewer clients train stay unchanged",
            config.secure_minimum,
        )


def check_devices(grid: Grid, config: Config) -> None:
    """Raise ValueError if `devices` is set and the run is not in process."""
    if config.devices is not None and not in_process(grid):
        where = "Flower's simulation" if simulating(grid) else "SuperNodes of a deployment"
        raise ValueError(
            f"devices = {config.devices!r}: got {where}, whose clients take real time, "
            "expected a run in process; use `ravan-flwr simulate`, or leave devices out"
        )


def check_simulation(grid: Grid, loaded: ModelAndData, config: Config) -> None:
    """Raise ValueError at the start for settings that every simulated client would refuse."""
    check_precision(config.precision, loaded.model.device)
    if config.secure_aggregation and not in_process(grid):
        raise ValueError(
            "secure-aggregation = true: got Flower's simulation, whose nodes have no secure-keys, "
            "expected devices that have some, or `ravan-flwr simulate`, which makes them"
        )
    number = len(list(grid.get_nodes()))
    if not number:
        return
    if not in_process(grid) and config.num_clients not in (None, number):
        log.info(
            "%d nodes, and the preset has %d clients; for as many use flwr run . --stream "
            '--federation-config "num-supernodes=%d client-resources-num-cpus=1"',
            *(number, config.num_clients, config.num_clients),
        )
    sizes = loaded.partition_sizes(number)
    if without := sum(not size for size in sizes):
        message = (
            f"validation-share = {config.validation_share}: {without} of {number} clients would "
            "have no example left to train on, since each needs one for validation at least"
        )
        more_even = (
            "" if config.partition_scheme == "iid" else ", or a partition that is more even, as iid"
        )
        if without == number or METHODS[config.method].pools:
            raise ValueError(f"{message}; use fewer clients{more_even}")
        log.warning("%s; they take no part; use fewer clients%s", message, more_even)
    if in_process(grid):  # the clients use the server's copy of the examples
        _ = loaded.partition(next(n for n, size in enumerate(sizes) if size), number)


def report_result(
    summary: Summary, metric: str, directory: RunDirectory, page: Path | None
) -> None:
    """Log how the run ended, and where its files are."""
    final, best = (summary["metrics"][which].get(metric) for which in ("final", "best"))
    score = "not evaluated" if final is None else f"{metric} {final:.4f} (best {best:.4f})"
    rounds, trained = summary["rounds"], summary["trainable-parameters"]
    took = f"{rounds} round{'s' * (rounds != 1)} in {minutes(summary['seconds'])}"
    up, down = megabytes(summary["bytes-up"]), megabytes(summary["bytes-down"])
    sent = f"{trained} trainable parameters; up {up}, down {down}"
    if "link-bytes-estimate" in summary:
        sent += f"; about {megabytes(summary['link-bytes-estimate'])} on the devices' links"
    log.info("done: %s after %s; %s", score, took, sent)
    if "until-metric" in summary and "reached" not in summary:
        log.warning("until-metric = %g was not reached", summary["until-metric"])
    for problem, numbers in (
        ("its evaluation collapsed", summary["collapsed"]),
        ("no effect", summary["without-effect"]),
    ):
        if numbers:
            log.warning("%s in rounds %s", problem, ", ".join(map(str, numbers)))
    if page is not None:
        log.info("report: %s", page)
    log.info("run directory: %s", directory.path)
