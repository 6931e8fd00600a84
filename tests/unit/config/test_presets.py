"""Handwritten presets: defaults, paths, and errors."""

import pickle
import subprocess

import pytest
from flwr.common.config import parse_config_args

from ravan_flwr.cli import main
from ravan_flwr.config.presets import PresetPath, parse_location, read_preset, with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.config.yaml_file import read_yaml
from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.model_folder import model_folder
from ravan_flwr.launch.submit import COMPLETED
from ravan_flwr.launch.superlink import LocalSuperLink
from ravan_flwr.methods import METHODS

SHORTEST = "task: text\nmodel: org/bert\ndata: org/texts\n"


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a preset and returns its name as a command takes it."""

    def write(text=SHORTEST, name="mine.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def config_of(path, **settings):
    return read_config(with_preset_path({"preset": path} | settings))


def test_task_model_and_data_are_enough(file):
    config = config_of(file())
    assert (config.preset, config.task, config.method) == ("mine", "text", "ravan")
    assert (config.model.source, config.model.name) == ("hub", "org/bert")
    assert dict(config.data.columns) == {"text": "text", "label": "label"}
    assert config.data.labels == ()
    assert not config.data.labels_known
    assert (config.num_clients, config.num_rounds, config.clients_per_round) == (10, 20, 3)
    assert config.partition == "dirichlet-by-client:0.3"
    assert (config.heads, config.classifier) == (4, "trained")
    assert (config.lora_rank, config.max_length) == (8, 256)
    assert config_of(file(), **{"lora-rank": "higher"}).lora_rank == 16


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_learning_rate_that_a_preset_may_override(method, file):
    assert config_of(file(), method=method).learning_rate == METHODS[method].learning_rate
    own = file(f"{SHORTEST}learning-rate: {{{method}: 0.25}}\n")
    assert config_of(own, method=method).learning_rate == 0.25


def test_given_fields_are_used_and_others_keep_their_defaults(file):
    config = config_of(file(SHORTEST + "run: {num-clients: 4, heads: 2}\n"))
    assert (config.num_clients, config.heads, config.num_rounds) == (4, 2, 20)
    config = config_of(file(SHORTEST + "parameter-budgets: {higher: {lora-rank: 6}}\n"))
    assert config.lora_rank == 3
    text = "task: question-answering\nmodel: org/t5\ndata: org/questions\n"
    config = config_of(file(text))
    assert (config.partition, config.data.labels_known) == ("iid", True)  # there are no classes
    assert config.data.prompt == "question: {question} context: {context}"
    assert config_of(file("task: vision\nmodel: o/v\ndata: o/i\n")).max_length == 0


def test_relative_folders_are_resolved_from_the_presets_folder(file, tmp_path):
    text = "task: vision\nmodel: ./model\ndata: {name: ../images, test-share: 0.5}\n"
    config = config_of(file(text))
    assert config.model.name == str(tmp_path / "model")
    assert config.data.name == str(tmp_path.parent / "images")
    assert config.data.test_share == 0.5


def test_a_path_is_accepted_from_local_configuration_alone(file):
    path = file()
    with pytest.raises(ValueError, match=r"got the path of a file, but under .* `cp .*conf/`"):
        read_config({"preset": path})
    preset = with_preset_path({"preset": path, "seed": 1})["preset"]
    assert isinstance(preset, PresetPath)
    assert isinstance(pickle.loads(pickle.dumps(preset)), PresetPath)
    for absent in ("/tmp/nowhere.yaml", f"./{'x' * 300}.yaml"):
        with pytest.raises(ValueError, match=rf"{absent}': found no such file; correct the path"):
            config_of(absent)


def test_a_name_finds_a_preset_of_the_working_folder(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    path = file(name="conf/mine.yaml")
    assert with_preset_path({"preset": "mine"})["preset"] == PresetPath(path)
    assert config_of("mine").model.name == "org/bert"
    file(name="conf/digits-vit.yaml")  # hides none of the app's own
    assert with_preset_path({"preset": "digits-vit"}) == {"preset": "digits-vit"}
    with pytest.raises(ValueError, match="preset 'mine' is unknown"):  # as it arrives by Flower
        read_config({"preset": "mine"})


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """Return the preset that `simulate --engine flower` submits from an app folder."""
    app = tmp_path / "app"
    (app / "conf").mkdir(parents=True)
    (app / "pyproject.toml").touch()
    monkeypatch.chdir(app)
    configs = []

    def record(_, app, config, federation):
        configs.append(config)
        return COMPLETED

    monkeypatch.setattr(LocalSuperLink, "__enter__", lambda link: link)
    monkeypatch.setattr(LocalSuperLink, "run", record)

    def run(preset):
        main(["simulate", "--engine=flower", f"preset={preset}", "device=cpu"])
        return parse_config_args(configs[-1:])["preset"]

    return run


@pytest.mark.parametrize("preset", ["conf/mine.yaml", "./conf/mine.yaml", "mine"])
def test_flower_takes_a_file_of_the_apps_conf(preset, submitted, file, tmp_path):
    file(name="app/conf/mine.yaml")
    assert submitted(preset) == "mine"
    assert submitted(str(tmp_path / "app" / "conf" / "mine.yaml")) == "mine"


def test_flower_takes_no_other_file_and_the_advice_works(submitted, file, tmp_path, capsys):
    for name in ("mine.yaml", "app/conf/mine.yml"):
        path = file(name=name)
        with pytest.raises(SystemExit):
            submitted(path)
        error = capsys.readouterr().err
        command = error.split("`")[1]
        assert command.startswith(f"cp {path} conf/")
        subprocess.run(command.split(), check=True)
        assert "set preset=mine" in error
        assert submitted("mine") == "mine"
        (tmp_path / "app" / "conf" / "mine.yaml").unlink()
    with pytest.raises(ValueError, match="set preset=mine") as error:  # of `flwr run -c`
        read_config({"preset": "conf/mine.yaml"})
    assert "cp " not in str(error.value)


def test_an_unknown_name_lists_the_presets_also_of_the_working_folder(file, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"preset 'min' is unknown.*glue-llama.*`ravan-flwr new`"):
        read_preset("min")
    (tmp_path / "conf").mkdir()
    file(name="conf/mine.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"did you mean 'mine'\? .*: mine, .*and of conf/ here"):
        read_config({"preset": "mien"})
    with pytest.raises(ValueError, match=r"no such file: did you mean .*conf/mine.yaml\?"):
        config_of("conf/mine")


def mistakes():
    """Return texts of presets with a mistake, with words of the error."""
    for more, message in (
        ("lables: [a]\n", "lables is unknown. Expected the fields .*'learning-rate'"),
        ("run: {num-round: 3}\n", "run.num-round is unknown: did you mean 'num-rounds'"),
        ("run: {num-clients: 0}\n", "run.num-clients = 0: expected a whole number"),
        ("run: {heads: few}\n", "heads = 'few': expected a whole number"),
        ("run: 3\n", "run is no mapping"),
        ("run: 0\n", "run is no mapping"),
        ("learning-rate: []\n", "learning-rate is no mapping"),
        ("learning-rate: {by: [classifier]}\n", "learning-rate.by is unknown"),
        ("learning-rate: {ravn: 1}\n", "learning-rate.ravn is unknown: did you mean 'ravan'"),
        ("learning-rate: 0.1\n", "learning-rate is no mapping"),
        ("parameter-budgets: {lower: 3}\n", "parameter-budgets.lower is no mapping"),
    ):
        yield SHORTEST + more, f".*{message}"
    for data, message in (
        ("{}", "data.name is missing; expected an id of the hub, or a folder"),
        ("3", "data is no mapping"),
        ("{name: 3}", "data.name = 3: expected a text"),
        ("{name: a/b, source: hbu}", "data.source 'hbu' is unknown: did you mean 'hub'"),
        ("{name: a/b, labels: []}", r"data.labels = \[\]: expected the names"),
        ("{name: a/b, labels: [1, 2]}", r"data.labels = \[1, 2\]: .* in quotation marks"),
        ("{name: a/b, labels: [a, b, a]}", "data.labels: got a twice"),
        ("{name: a/b, columns: {txt: a, label: b}}", "data.columns.txt .*: did you mean 'text'"),
        ("{name: a/b, columns: {text: a, label: 3}}", "data.columns.label = 3: expected a text"),
        ("{name: a/b, test-share: 1}", "data.test-share = 1: expected a number above 0"),
        ("{name: a/b, max-length: 0}", "data.max-length = 0: expected a whole number at least 1"),
        ("{name: a/b, splits: {train: x}}", "data.splits.test is missing"),
        ("{name: a/b, splits: {train: x, test: x}}", "data.splits: got 'x' to train on and as a"),
        ("{name: a/b, splits: {train: x, test: 5}}", "data.splits.test = 5: expected the name"),
        ("{name: a/b, splits: {train: x, test: {}}}", "data.splits.test = {}: expected the name"),
        ("{name: a/b, splits: {train: x, test: [a]}}", "data.splits.test = .'a'.: expected"),
        ("{name: a/b, columns: {text: a, label: a}}", "data.columns = .*: expected a column of"),
        ("{name: a/b, target-length: 5}", "data.target-length: only task .*causal.* has it; l"),
        ("{name: a/b, prompt: x}", "data.prompt: only task text-to-label or .* has it; leave"),
        ("{name: a/b, max-lenth: 9}", "data.max-lenth is unknown: did you mean 'max-length'"),
    ):
        yield f"task: text\nmodel: org/bert\ndata: {data}\n", f": {message}"
    for data, message in (
        ("prompt: '{foo} {'", "data.prompt = .*, expected braces around {text} alone"),
        ("prompt: '{text.x}'", "data.prompt = .*, expected braces around {text} alone"),
        ("prompt: nothing", "data.prompt = 'nothing': got no column"),
        ("prompt: '{label}'", "data.prompt = .*, expected braces around {text} alone"),
        ("target-length: 0", "data.target-length = 0: expected a whole number at le"),
    ):
        text = f"task: text-to-label\nmodel: org/t5\ndata: {{name: a/b, {data}}}\n"
        yield text, f": {message}"
    for shape in ("5", "[1]", "{hidden_size: 3}"):
        text = f"task: text\ndata: a/b\nmodel: {{name: a/c, shape: {shape}}}\n"
        yield text, ": model.shape"


@pytest.mark.parametrize(("text", "message"), [*mistakes()])
def test_mistakes_are_named(text, message, file):
    with pytest.raises(ValueError, match=f"mine.yaml{message}"):
        config_of(file(text))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"task: [text", r"line 1, column 12: expected ',' or '\]'"),
        (b"a: 1\nb: {c: 1, c: 2}", "line 2, column 11: the key 'c' is repeated"),
        (b"\xff\xfea", "expected YAML in UTF-8"),
        (b"!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        (b"[" * 100_000, "expected"),
    ],
)
def test_invalid_yaml_is_named(content, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"mine.yaml.*{message}"):
        read_yaml(path)


def test_a_hub_id_is_not_replaced_by_a_file_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").touch()
    (tmp_path / "org" / "train.csv").touch()
    assert parse_location("model", "org/name@main") == ("org/name", "main")
    assert parse_location("model", "org/name") == ("org/name", "")
    for text in ("org/train.csv", "./org/name", str(tmp_path / "org" / "name")):
        with pytest.raises(ValueError, match="got a file, expected a folder"):
            parse_location("data", text)


@pytest.mark.parametrize("path", ["/gone/a", "/gone", "./gone", "../gone/a", "~/gone"])
@pytest.mark.parametrize("key", ["data", "model"])
def test_a_missing_folder_is_no_id_of_the_hub(key, path, file):
    """The folder has moved, or is missing on this machine."""
    with pytest.raises(ValueError, match=f"{key} = '{path}': found no such folder"):
        parse_location(key, path)
    names = {"data": "org/texts", "model": "org/bert"} | {key: path}
    config = config_of(file(f"task: text\nmodel: {names['model']}\ndata: {names['data']}\n"))
    with pytest.raises(ValueError, match=f"{key} /.*gone.*: found no such folder") as error:
        load_splits(config.data) if key == "data" else model_folder(config.model)
    assert "hf download" not in str(error.value)
