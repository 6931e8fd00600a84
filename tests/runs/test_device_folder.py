"""A run on the devices' own folders: no text leaves a device."""

import pytest

from ravan_flwr import simulate
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.specs import Scalar
from tests.short_runs import records_of
from tests.support.tiny import WORDS, newsgroups, save_model

# `datasets` does not close CSV files before garbage collection.
LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
@LEFT_OPEN
def test_no_text_of_a_folder_leaves_the_node(tmp_path, monkeypatch):
    """Every reply has the method's tensors, and no word of a text."""
    folders = []
    for client in range(2):
        folders.append(tmp_path / f"device{client}")
        folders[-1].mkdir()
        newsgroups(20, client).to_csv(folders[-1] / "news.csv")
    replies = []

    class Devices(InProcessGrid):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for context, folder in zip(self._contexts.values(), folders, strict=True):
                context.node_config["data-path"] = str(folder)

        def _deliver(self, message):
            replies.append(super()._deliver(message))
            return replies[-1]

    monkeypatch.setattr("ravan_flwr.launch.in_process.InProcessGrid", Devices)
    # A simulation's server reads the shared data, which do not exist here.
    monkeypatch.setattr("ravan_flwr.server_app.check_simulation", lambda *_: None)
    run_config: dict[str, Scalar] = {
        "preset": "newsgroups-t5", "model": str(save_model("t5", tmp_path / "model")),
        "data": "nobody/has-this", "evaluate-on": "clients", "validation-share": 0.2,
        "max-length": 16, "lora-rank": 2, "num-rounds": 1, "local-steps": 2, "eval-every": 1,
        "output-dir": str(tmp_path / "runs"), "tracking": "none",
    }  # fmt: skip
    run = simulate(run_config, 2)
    (record,) = records_of(run)
    assert [client["examples"] for client in record["clients"]] == [16, 16]
    assert set(record["metrics"]) == {"loss", "accuracy"}
    assert len(replies) == 6  # two queries, two trainings, two evaluations
    for reply in replies:
        arrays = {name: set(part) for name, part in reply.content.array_records.items()}
        assert arrays in ({}, {"arrays": {"H", "heads"}})
        values = f"{reply.content.config_records} {reply.content.metric_records}"
        assert not any(word in values for word in WORDS)
