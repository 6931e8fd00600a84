"""Messages for errors of the hub: a fake hub on loopback gives each kind of answer."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from datasets.exceptions import DatasetNotFoundError

from ravan_flwr.config.run_config import read_config
from ravan_flwr.data.hub import NotAvailableError, hub_errors
from ravan_flwr.data.model_folder import model_folder, weight_files
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks import get_task
from ravan_flwr.tasks.text import load_tokenizer
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.network import build_network
from tests.support.tiny import save_data, save_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Fake hub with folders as repositories, and repositories that answer with an error."""

    def __init__(self, folders):
        super().__init__(("127.0.0.1", 0), Answers)
        self.folders = folders
        self.requests = []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


ERRORS = {
    "gated": (403, "GatedRepo"),
    "gone": (404, "RevisionNotFound"),
    "nobody": (401, "RepoNotFound"),
}


LIBRARY_REQUEST = "api/agent-harnesses"  # the library sends it once a day


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0].strip("/")
        if path != LIBRARY_REQUEST:
            self.server.requests.append(path)
        for name, (status, code) in ERRORS.items():
            if f"org/{name}" in path:
                return self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})
        for name, folder in self.server.folders.items():
            if path.startswith(f"api/models/{name}"):
                return self._model(name, folder, path)
            if path.startswith(f"{name}/resolve/"):
                file = folder / path.split("/", 4)[4]
                if file.is_file():
                    return self._send(200, file.read_bytes(), self._file_headers(file))
        return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _model(self, name, folder, path):
        files = [file for file in sorted(folder.iterdir()) if file.is_file()]
        if "/tree/" in path:
            content: Any = [
                {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": file.name}
                for file in files
            ]
        else:
            content = {
                "_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False,
                "siblings": [{"rfilename": file.name} for file in files],
            }  # fmt: skip
        return self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file_headers(self, file):
        return {"ETag": f'"{file.name}-{file.stat().st_size}"', "X-Repo-Commit": COMMIT}

    def _send(self, status, body, headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    save_model("bert", folder / "bert")
    with Hub({"org/bert": folder / "bert"}) as hub:
        yield hub


@pytest.fixture
def run(python_without_hub):
    """Run a command with a hub (None: unreachable) and a separate cache."""

    def run(hub, home, *simulate_words, offline=False):
        arguments = ["-m", "ravan_flwr", *simulate_words]
        return python_without_hub.run(arguments, environment=environment(hub, home, offline))

    return run


def environment(hub, home, offline):
    return os.environ | {
        "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "300",  # seconds: the hub is in this process, which may be busy
        "PYTHONWARNINGS": "ignore",
    }


def simulate_words(folder, model):
    return [
        "simulate", "preset=glue-llama", "glue-task=rte", f"model={model}", f"data={folder}",
        "num-rounds=1", "local-steps=1", "num-clients=2", "max-length=16", "lora-rank=2",
        "tracking=none", f"output-dir={folder}/runs",
    ]  # fmt: skip


NOT_IN_CACHE = "model org/bert: it is not in the cache, .* run `hf download org/bert` where"


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("model", "reachable", "offline", "expected"),
    [
        ("org/gated", True, False, r"model org/gated: the hub refuses it \(GatedRepoError"),
        ("org/nobody", True, False, "log in with `hf auth login`"),
        ("org/gone@abc", True, False, r"model org/gone at revision abc: .* \(RevisionNotFound"),
        ("org/bert", False, False, NOT_IN_CACHE),
        ("org/bert", False, True, NOT_IN_CACHE),
    ],
)
def test_an_unavailable_model_is_an_error(run, hub, model, reachable, offline, expected, tmp_path):
    words = simulate_words(save_data("glue-llama", tmp_path / "data", "rte"), model)
    ended = run(hub if reachable else None, tmp_path / "home", *words, offline=offline)
    assert ended.returncode == 2
    assert re.search(expected, ended.stderr)
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_downloaded_model_needs_no_connection(run, hub, tmp_path):
    data, home = save_data("glue-llama", tmp_path / "data", "rte"), tmp_path / "home"
    command = [
        str(Path(sys.executable).with_name("hf")),
        "download",
        "org/bert",
        "--revision",
        COMMIT,
    ]
    subprocess.run(command, env=environment(hub, home, offline=False), check=True)
    num_requests = len(hub.requests)
    for reached in (None, hub):  # with a connection, too, files in the cache are not requested
        ended = run(reached, home, *simulate_words(data, f"org/bert@{COMMIT}"))
        assert ended.returncode == 0, ended.stderr
    assert hub.requests[num_requests:] == []
    config = json.loads(next((tmp_path / "data" / "runs").glob("*/config.json")).read_text())
    assert config["model"] | {"shape": []} == {
        "source": "hub", "name": "org/bert", "revision": COMMIT, "shape": [], "targets": [],
    }  # fmt: skip


@pytest.mark.slow
def test_an_incomplete_download_is_completed(run, hub, tmp_path):
    command_line = simulate_words(save_data("glue-llama", tmp_path / "data", "rte"), "org/bert")
    assert run(hub, tmp_path / "home", *command_line).returncode == 0
    (weights,) = (tmp_path / "home").rglob("model.safetensors")
    weights.unlink()
    assert run(hub, tmp_path / "home", *command_line).returncode == 0
    assert weights.exists()


def test_data_that_do_not_exist_are_an_error():
    with pytest.raises(ValueError, match="run `hf download org/nothing --repo-type dataset"):
        _ = ModelAndData(read_config({"preset": "mrqa-t5", "data": "org/nothing"})).splits


@pytest.fixture
def bert(tmp_path):
    return save_model("bert", tmp_path / "model")


def test_every_shard_of_the_weights_is_required(bert):
    (bert / "model.safetensors").rename(bert / "model-00001-of-00002.safetensors")
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": dict(zip("ab", parts, strict=True))}
    (bert / "model.safetensors.index.json").write_text(json.dumps(index))
    spec = read_config({"preset": "glue-llama", "model": str(bert)}).model
    with pytest.raises(ValueError, match="has no model-00002-of-00002.safetensors, expected"):
        model_folder(spec)
    (bert / "model-00002-of-00002.safetensors").touch()
    assert model_folder(spec) == bert
    other = json.dumps({"weight_map": {"a": "../other.safetensors"}})  # outside the folder
    for text in (other, '{"weight_map": [1]}', "{}", "[]"):
        (bert / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match="its model.safetensors.index.json cannot be used"):
            weight_files(bert)


DAMAGED: dict[str, list[str | None]] = {
    "config.json": ["{", "[]", "null", '{"model_type": "bert", "hidden_size": "wide"}', "\xff"],
    "model.safetensors": ["", "no safetensors", None],  # None: cut off in the middle
    "tokenizer.json": ["{", "[]", '{"model": 3}'],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, text) for name, texts in DAMAGED.items() for text in texts]
)
def test_a_damaged_file_of_a_model_is_an_error(name, content, bert, tmp_path):
    data, path = save_data("glue-llama", tmp_path / "data", "rte"), bert / name
    if content is None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.write_text(content, encoding="latin-1")
    settings = {"preset": "glue-llama", "glue-task": "rte", "model": str(bert), "data": str(data)}
    loaded = ModelAndData(read_config(settings | {"max-length": 16, "lora-rank": 2}))
    with pytest.raises(ValueError, match=f"model {bert}: its .* cannot be used .*choose another"):
        _ = (loaded.model, load_tokenizer(bert))


@pytest.mark.parametrize("content", ["{", "[]", '{"image_processor_type": "Nothing"}'])
def test_a_damaged_image_processor_is_an_error(content, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(content)
    (tmp_path / "config.json").write_text("{}")
    preset = read_config({"preset": "cifar100-vit-b16", "model": str(tmp_path)})
    task = get_task(preset.task)(preset.data, preset.max_length, lambda: tmp_path)
    with pytest.raises(ValueError, match="its preprocessor_config.json cannot be used .*expected"):
        _ = task.reader


def test_no_code_in_a_models_folder_runs(bert, tmp_path):
    """Neither a configuration, nor a tokenizer, nor an image processor brings its own class."""
    (bert / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    evil = "evil.Evil"
    for name, classes in (
        ("config.json", {"AutoConfig": evil, "AutoModelForSequenceClassification": evil}),
        ("tokenizer_config.json", {"AutoTokenizer": [evil, evil]}),
        ("preprocessor_config.json", {"AutoImageProcessor": evil}),
    ):
        path = bert / name
        content = json.loads(path.read_text()) if path.exists() else {"image_processor_type": "E"}
        content.pop("tokenizer_class", None)
        path.write_text(json.dumps(content | {"auto_map": classes}))
    settings: dict[str, Scalar] = {"preset": "glue-llama", "glue-task": "rte", "max-length": 16}
    config = read_config(settings | {"model": str(bert)})
    task = get_task("text")(config.data, 16, lambda: bert)
    for load in (lambda: build_network(config.model, task, 0), lambda: load_tokenizer(bert)):
        with suppress(ValueError):
            load()
    vision = get_task("vision")(config.data, 16, lambda: bert)
    with pytest.raises(ValueError, match="preprocessor_config.json cannot be used"):
        _ = vision.reader
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("[Errno -2] Name or service not known"),
        httpx.ReadTimeout("The read operation timed out"),
        ConnectionError("reset"),
    ],
)
def test_every_connection_error_gives_the_same_message(error):
    message = "model org/x at revision abc: it is not in the cache.*download org/x --revision abc`"
    with pytest.raises(NotAvailableError, match=message), hub_errors("model", "org/x", "abc"):
        raise error


def test_long_reasons_are_cut_at_a_word():
    message = r"word \.\.\.\); run `hf download org/x --repo-type dataset"
    with pytest.raises(NotAvailableError, match=message), hub_errors("data", "org/x"):
        raise FileNotFoundError("word " * 900)


def test_data_that_are_gated_or_private_need_a_login():
    error = pytest.raises(ValueError, match="data org/x: the hub refuses it .*`hf auth login`")
    with error, hub_errors("data", "org/x"):
        raise DatasetNotFoundError("Dataset 'org/x' is a gated dataset on the Hub.")


def test_the_nodes_cache_folder_is_used(tmp_path, python_without_hub):
    folder = tmp_path / "cache"
    program = (
        f"from ravan_flwr.config.node_config import use_cache; use_cache({str(folder)!r});"
        "import datasets, huggingface_hub;"
        "print(huggingface_hub.constants.HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE)"
    )
    elsewhere = os.environ | {"HF_HUB_CACHE": "/elsewhere"}
    done = python_without_hub.run(["-c", program], environment=elsewhere)
    assert done.stdout.split() == [str(folder / "hub"), str(folder / "datasets")], done.stderr
