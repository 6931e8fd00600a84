"""Let a model answer the same test examples at each evaluation, and keep what it writes."""

import json
import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice

import numpy as np
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.callback import Callback
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.runs.samples import SAMPLES, SampleLine, cut
from ravan_flwr.seeding import derive
from ravan_flwr.tasks.extensions import Predicts, Sample, task_with
from ravan_flwr.training.local_steps import predictions
from ravan_flwr.training.model_and_data import ModelAndData

log = logging.getLogger(__name__)

_AT_A_TIME = 8  # answers that are written together


class Samples(Callback):
    """Let the model answer some test examples after each evaluation.

    `untrained` is the state of a run that begins anew, whose answers come first.
    """

    def __init__(
        self, bench: ModelAndData, directory: RunDirectory, untrained: Tensors | None
    ) -> None:
        self._bench, self._directory, self._untrained = bench, directory, untrained
        self._task = task_with(Predicts, bench.task, "evaluate-samples")

    @cached_property
    def _chosen(self) -> list[Sample]:
        """Choose examples of the first test set, as a function of the seed."""
        bench = self._bench
        examples = bench.splits[next(iter(dict(bench.config.data.tests)))]
        random = np.random.default_rng(derive(bench.config.seed, "samples"))
        shuffled = examples.select(random.permutation(len(examples)))
        found = self._task.samples(shuffled, bench.config.evaluate_samples)
        if not found:
            log.warning(
                "evaluate-samples: none of the %d test examples can be asked", len(examples)
            )
        return found

    def on_run_begin(self) -> None:
        if self._untrained is not None:
            self._write(0, self._untrained)

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:
        if record["metrics"]:
            self._write(record["round"], state)

    def _write(self, number: int, state: Mapping[str, Tensor]) -> None:
        """Add the answers of the model with that state, after that round."""
        with self._bench.model.holding(state):
            answers = list(self._answers())
        lines: list[SampleLine] = [
            {
                "round": number,
                "example": place,
                "instruction": cut(sample.asked),
                "expected": cut(sample.right),
                "answer": cut(answer),
            }
            for place, (sample, answer) in enumerate(zip(self._chosen, answers, strict=True))
        ]
        self._directory.append_lines(SAMPLES, [json.dumps(line) for line in lines])

    def _answers(self) -> Iterator[str]:
        """Let the model write, a few answers at a time."""
        bench, rest = self._bench, iter(self._chosen)
        place = self._task.prediction_columns.index("text")
        while few := list(islice(rest, _AT_A_TIME)):
            columns = {role: [one.values[role] for one in few] for role in few[0].values}
            inputs = self._task.inputs(columns)
            for said in predictions(bench.model, bench.task, inputs, bench.config.precision):
                yield str(said[place])
