"""Measure the accuracy lost to lying clients: `digits-vit`, ten clients, of which 0, 1 or 2 lie.

    python -m benchmarks.liars --output liars.jsonl

All ten clients take part in each of six rounds, with ten local steps of eight examples. A liar
trains like the others and then sends another upload, by `LIES`. Each cell is a whole run; its
line is written when it ends, and cells that are in the file already are not run again. `--table`
prints the results in the file.

`limit off` is a fixed limit so large that it refuses nothing, which equals no limit. With mixed
budgets honest clients have a quarter, and liars claim the whole. Krum and multi-Krum, which need
whole updates, are not run there.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor

from ravan_flwr.config.keys import KRUM, ROBUST
from ravan_flwr.launch import in_process as simulation
from ravan_flwr.launch.in_process import simulate
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.seeding import generator
from ravan_flwr.specs import Scalar

CLIENTS = 10
SETTINGS: dict[str, Scalar] = {
    "num-rounds": 6,
    "clients-per-round": CLIENTS,
    "local-steps": 10,
    "batch-size": 8,
    "eval-every": 2,
    "tracking": "none",
}
# Budgets of a mixed federation: the last clients are the liars, and claim that of `whole`.
MIXED = {"full": 1.0, "mixed": 0.25}

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Reply:
    """An honest upload, and its tensors before training."""

    upload: Tensors
    start: Tensors
    first: Tensors | None  # the liar's upload of the first round
    round: int

    def changed(self, change: Callable[[str, Tensor, Tensor], Tensor]) -> Tensors:
        """Return the upload with another change in every tensor of numbers."""
        return {
            name: self.start[name] + change(name, tensor, tensor - self.start[name])
            if name in self.start
            else tensor
            for name, tensor in self.upload.items()
        }


def _random(reply: Reply) -> Tensors:
    """Draw noise as large as the honest change."""

    def noise(name: str, _: Tensor, change: Tensor) -> Tensor:
        drawn = torch.randn(change.shape, generator=generator(reply.round, name))
        return drawn * change.square().mean().sqrt()

    return reply.changed(noise)


# The lies: uploads that replace an honest one.
LIES: dict[str, Callable[[Reply], Tensors]] = {
    "huge norm": lambda r: r.changed(lambda _, __, change: change / change.norm() * 9.9e5),
    "sign flip": lambda r: r.changed(lambda _, __, change: -change),
    "sign flip, 2.5 times": lambda r: r.changed(lambda _, __, change: -2.5 * change),
    "ten times": lambda r: r.changed(lambda _, __, change: 10 * change),
    "random": _random,
    "stale": lambda r: dict(r.first or r.upload),
    "zeros": lambda r: r.changed(lambda _, t, change: change - t),
}


LARGE = ("huge norm", "ten times")  # a limit may refuse these


class LyingGrid(InProcessGrid):
    """The last clients of the federation lie, and may claim the whole budget."""

    liars = 0
    lie = "huge norm"
    budgets = "full"
    claims_whole = False

    def __init__(self, run_config: Mapping[str, Scalar], num_clients: int) -> None:
        super().__init__(run_config, num_clients)
        self._firsts: dict[int, Tensors] = {}
        for node_id, context in self._contexts.items():
            full_budget = self._lies(node_id) and self.claims_whole
            context.node_config["budget"] = 1.0 if full_budget else MIXED[self.budgets]

    def _lies(self, node_id: int) -> bool:
        return node_id > len(self._contexts) - self.liars

    def _deliver(self, message: Message) -> Message:
        reply = super()._deliver(message)
        node_id, kind = message.metadata.dst_node_id, message.metadata.message_type
        if kind == "train" and self._lies(node_id) and reply.has_content():
            sent = from_record(message.content.array_records["arrays"])
            upload = from_record(reply.content.array_records["arrays"])
            reply.content["arrays"] = to_record(
                self._lied(node_id, upload, sent, int(message.metadata.group_id))
            )
        return reply

    def _lied(self, node_id: int, upload: Tensors, sent: Tensors, number: int) -> Tensors:
        first = self._firsts.setdefault(node_id, upload)
        return LIES[self.lie](Reply(upload, _start_of(upload, sent), first, number))


def _start_of(upload: Tensors, sent: Tensors) -> Tensors:
    """Return the broadcast in the upload's shapes; for RAVAN, the heads that its bits mark."""
    start = {}
    for name, tensor in upload.items():
        if tensor.is_floating_point():
            old = sent[name]
            if "heads" in upload and name == "H":
                bits = upload["heads"][:, None].bitwise_right_shift(torch.arange(8)) & 1
                old = old.flatten(0, 1)
                old = old[bits.flatten()[: len(old)].bool()]
            start[name] = old
    return start


Cell = dict[str, Any]


def cells(methods: list[str]) -> Iterator[Cell]:
    """List every run of the table, the honest ones first."""
    ways = [(robust, "auto") for robust in ("none", *ROBUST)] + [("none", "off")]
    lies = [("none", 0), *((lie, liars) for liars in (2, 1) for lie in LIES)]
    for (lie, liars), method in itertools.product(lies, methods):
        for budgets, (robust, limit) in itertools.product(MIXED, ways):
            if budgets == "mixed" and robust in KRUM:
                continue  # refused: it compares whole updates, and no honest client has one
            if limit == "auto" or lie in LARGE:
                yield {
                    "method": method,
                    "budgets": budgets,
                    "robust": robust,
                    "limit": limit,
                    "lie": lie,
                    "liars": liars,
                    "whole": bool(liars) and budgets == "mixed",
                }


def accuracy_of(cell: Cell, seed: int) -> Cell:
    """Make one run; its accuracy is None if it did not finish."""
    LyingGrid.liars, LyingGrid.budgets = cell["liars"], cell["budgets"]
    LyingGrid.lie, LyingGrid.claims_whole = cell["lie"], cell["whole"]
    settings = SETTINGS | {
        "method": cell["method"],
        "weighting": "uniform" if cell["robust"] == "none" else cell["robust"],
        "seed": seed,
    }
    if cell["limit"] == "off":
        settings["limits"] = "max-update-norm=1e12"
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = simulate(settings | {"output-dir": folder}, CLIENTS).summary
        except RuntimeError as error:
            return {"accuracy": None, "why": str(error)[:200]}
    final = summary["metrics"]["final"]["accuracy"]
    return {"accuracy": final, "rejected": summary["rejected"], "collapsed": summary["collapsed"]}


def read(path: Path) -> list[Cell]:
    """Read the finished cells."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(done: list[Cell]) -> str:
    """Return a row for each lie and number of liars, with a column for each defence."""
    lines = []
    for method, budgets in sorted({(c["method"], c["budgets"]) for c in done}):
        mine = [c for c in done if (c["method"], c["budgets"]) == (method, budgets)]
        ways = list(dict.fromkeys((c["robust"], c["limit"]) for c in mine))
        heads = [
            f"`weighting={'uniform' if r == 'none' else r}`"
            + (", limit off" if lim == "off" else "")
            for r, lim in ways
        ]
        lines += [f"\n{method}, {budgets} budgets\n", "| lie | liars | " + " | ".join(heads) + " |"]
        lines.append("| --- " * (2 + len(ways)) + "|")
        for lie, liars in sorted({(c["lie"], c["liars"]) for c in mine}, key=_place):
            cells_ = {
                (c["robust"], c["limit"]): c for c in mine if (c["lie"], c["liars"]) == (lie, liars)
            }
            columns = [_accuracy_text(cells_.get(way)) for way in ways]
            lines.append(f"| {lie} | {liars} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _place(row: tuple[str, int]) -> tuple[int, int]:
    """Order the rows: the honest runs first, then lie by lie."""
    lie, liars = row
    return ([*LIES].index(lie) if lie in LIES else -1), liars


def _accuracy_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell["accuracy"] is None:
        return "stopped"
    return f"{100 * cell['accuracy']:.1f}" + (
        f" ({cell['rejected']} refused)" if cell["rejected"] else ""
    )


def main() -> None:
    """Run the missing cells, and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("liars.jsonl"))
    parser.add_argument("--methods", nargs="+", default=["ravan"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    options = parser.parse_args()
    done = read(options.output)
    known = {json.dumps({k: c[k] for k in KEYS} | {"seed": c["seed"]}) for c in done}
    torch.set_num_threads(1)
    simulation.InProcessGrid = LyingGrid  # type: ignore[attr-defined]
    for cell in [] if options.table else cells(options.methods):
        if json.dumps(cell | {"seed": options.seed}) not in known:
            ended = cell | {"seed": options.seed} | accuracy_of(cell, options.seed)
            done.append(ended)
            with options.output.open("a") as file:
                file.write(json.dumps(ended) + "\n")
    print(table([c for c in done if c["seed"] == options.seed]))


KEYS = ("method", "budgets", "robust", "limit", "lie", "liars", "whole")

if __name__ == "__main__":
    main()
