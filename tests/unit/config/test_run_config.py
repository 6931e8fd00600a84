"""Every check of the configuration, and its error messages."""

import json
import tomllib

import pytest
import yaml

from ravan_flwr.config.keys import FREE_ON_RESUME, KEYS, LIMITS, NOT_OF_RESULT, RUN, read_settings
from ravan_flwr.config.presets import PresetPath, conf_folder
from ravan_flwr.config.run_config import read_config, recorded_config
from ravan_flwr.lab import spec
from ravan_flwr.launch.start import read_start
from ravan_flwr.methods import METHODS
from ravan_flwr.runs import history
from ravan_flwr.tasks import TASKS
from scripts import list_keys
from tests import ROOT

PUBLIC_KEYS = """preset method seed num-rounds clients-per-round local-steps batch-size
learning-rate partition rank heads init scaling scoring selection budgets classifier eval-every
device precision output-dir resume""".split()


def test_the_reference_lists_all_current_keys():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert list_keys.tables() in page, "python -m scripts.list_keys --write"
    assert all(f"| `{key}` | " in page for key in KEYS)


def test_pyproject_has_the_keys_and_the_defaults():
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = content["tool"]["flwr"]["app"]["config"]
    expected = {key: spec.default for key, spec in KEYS.items()}
    assert declared == expected, "python -m scripts.list_keys --write"
    assert set(PUBLIC_KEYS) <= set(declared)


@pytest.fixture
def preset(tmp_path):
    """Return a function that writes a changed copy of digits-vit, and returns its path."""
    content = yaml.safe_load((conf_folder() / "digits-vit.yaml").read_text())

    def write(name, **changes):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content | changes))
        return PresetPath(path)

    return write


@pytest.mark.parametrize("name", [path.stem for path in sorted(conf_folder().glob("*.yaml"))])
def test_every_preset_resolves(name):
    config = read_config({"preset": name})
    assert "auto" not in {config.init, config.partition, config.classifier}
    assert config.learning_rate > 0
    for method, row in METHODS.items():
        if TASKS[config.task].has_reference and not row.frozen_backbone:
            continue  # the task lacks its reference
        for classifier in ("frozen", "trained"):
            selected = {"preset": name, "method": method, "classifier": classifier}
            assert 0 < read_config(selected).learning_rate < 1


def test_given_settings_override_the_preset():
    config = read_config({"num-rounds": 3, "learning-rate": 1, "heads": 8, "rank": 5})
    assert (config.num_rounds, config.learning_rate, config.heads, config.rank) == (3, 1.0, 8, 5)
    assert isinstance(config.learning_rate, float)


def test_the_rate_of_a_calibration_is_that_of_full_fine_tuning(preset):
    """1e-4 where the preset has none, whatever the rate of the run is."""
    own = preset("own", **{"learning-rate": {"ravan": 3e-3}})
    settings = {"preset": own, "method": "fed-sb", "learning-rate": 0.02}
    assert read_config(settings).calibration_learning_rate == 1e-4
    assert "for method full, or 0.0001" in KEYS["calibration-learning-rate"].help


def test_local_steps_or_local_epochs_set_the_length_of_training(preset):
    def work(**given):
        config = read_config(given)
        return config.local_steps, config.local_epochs

    assert work() == (50, None)
    assert work(**{"local-steps": "epochs:2"}) == (None, 2.0)
    assert work(**{"local-steps": "epochs"}) == (None, 1.0)
    assert work(**{"local-steps": 3}) == (3, None)
    for wrong in (0, -1, float("nan"), 1e9, "one"):
        with pytest.raises(ValueError, match="local-steps = .*: number = .*: .* number above 0"):
            work(**{"local-steps": f"epochs:{wrong}"})
    for wrong in (0, 1.5, "one", "epoch:1"):
        expected = rf"local-steps = {wrong!r}: expected epochs:NUMBER, or a whole number at least 1"
        with pytest.raises(ValueError, match=expected):
            work(**{"local-steps": wrong})
    half = preset("half", run={"local-steps": "epochs:0.5"})
    assert work(preset=half) == (None, 0.5)
    assert work(preset=half, **{"local-steps": 4}) == (4, None)
    assert work(preset=preset("none", run={"local-steps": "auto"})) == (50, None)
    for key, now in {"local-epochs": "local-steps=epochs:1", "beta": "data.beta"}.items():
        with pytest.raises(ValueError, match=f"run.{key} is unknown: did you mean .*{now}"):
            work(preset=preset(f"earlier-{key}", run={key: 1}))


def test_a_natural_partition_takes_its_number_of_clients_from_the_data(preset):
    config = read_config({"partition": "natural:user"})
    assert (config.num_clients, config.data.partition_by) == (None, "user")
    mine = preset("mine", run={"partition": "natural"})
    seven = preset("seven", run={"partition": "natural", "num-clients": 7})
    assert read_config({"preset": mine}).num_clients is None
    assert read_config({"preset": mine, "partition": "iid"}).num_clients == 10
    assert read_config({"preset": seven}).num_clients == 7


@pytest.mark.parametrize(
    ("part", "change", "error"),
    [
        ((), {"heads": 10**9}, "heads = 1000000000: expected a whole number .* at most"),
        ((), {"seed": "x"}, "seed = 'x': expected a whole number"),
        ((), {"method": []}, "method: got .*valid string"),
        ((), {"task": "sing"}, "task 'sing' is unknown"),
        ((), {"model": None}, "model: got None"),
        (("data",), {"columns": ["image"]}, "data.columns.0: got 'image'"),
        (("model",), {"source": "evil"}, "model.source: got 'evil'"),
    ],
)
def test_a_damaged_record_of_the_configuration_is_named(part, change, error):
    written = read_config({}).as_dict()
    for name in part:
        change = {name: written[name] | change}
    with pytest.raises(ValueError, match=f"here: its config.json is damaged: {error}.*restore it"):
        recorded_config(written | change, "here")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"local-steps": "epochs:0.25"},
        {"preset": "glue-llama", "glue-task": "mnli", "targets": "q_proj,v_proj"},
    ],
)
def test_a_resolved_configuration_is_written_in_kebab_case_and_read_again(settings):
    config = read_config(settings)
    written = json.loads(json.dumps(config.as_dict()))
    assert written == config.as_dict()
    assert recorded_config(written, "x") == config
    assert written["local-epochs"] == (0.25 if "local-steps" in settings else None)
    assert written["data"]["partition-by"] == "label"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "ravn"}, "method 'ravn' is unknown: did you mean 'ravan'"),
        ({"preset": "digit-vit"}, "preset 'digit-vit' is unknown: did you mean 'digits-vit'"),
        ({"preset": "../x"}, "preset = '../x': got the path of a file, .* `cp ../x conf/`"),
        ({"sed": 1}, "unknown key 'sed': did you mean 'seed'. .* `ravan-flwr simulate --help`"),
        ({"zzz": 1}, "unknown key 'zzz'. Expected one that `ravan-flwr simulate --help` lists"),
        ({"num-clients": 5}, "num-clients = 5: it is no key of the run config"),
        ({"seed": "one"}, "seed = 'one': expected a whole number at least 0 .*; got a text"),
        ({"seed": 1.0}, "seed = 1.0: expected a whole number .*; got a decimal number"),
        ({"seed": -1}, "seed = -1: expected a whole number at least 0"),
        ({"seed": "auto"}, "seed = 'auto': expected a whole number"),
        ({"num-rounds": 0}, 'num-rounds = 0: expected .* at least 1 .*, or "auto"'),
        ({"learning-rate": 0.0}, "learning-rate = 0.0: expected a number above 0"),
        ({"learning-rate": float("nan")}, "learning-rate = nan: expected a number above 0"),
        ({"learning-rate": float("inf")}, "learning-rate = inf: expected"),
        ({"partition": "irichlet"}, "did you mean 'dirichlet'"),
        ({"classifier": 3}, "classifier = 3: expected one of frozen, trained"),
        ({"device": "gpu"}, "device = 'gpu': expected auto, cpu, cuda, cuda:N or mps"),
        ({"device": "cuda:x"}, "device = 'cuda:x': expected auto"),
        ({"deliver": 1}, "deliver = 1: expected true or false; got a whole number"),
        ({"evaluate-on": "clients", "validation-share": 0}, "needs examples .* validation-share"),
        ({"partition": "dirichlet:0"}, "partition = 'dirichlet:0': alpha = 0: expected a num"),
        ({"partition": "shards:two"}, "partition = 'shards:two': shards = 'two': expected a whole"),
        ({"partition": "iid:3"}, "partition = 'iid:3': got 1 parameters, expected iid"),
        ({"partition": "dirichlt:1"}, "partition 'dirichlt' is unknown: did you mean 'dirichlet'"),
        ({"optimizer": "fedprox:-1"}, "mu = -1: expected a number at least 0"),
        ({"optimizer": "sgd"}, "optimizer 'sgd' is unknown"),
        ({"lora-rank": "highr"}, "expected lower, higher, or a whole"),
        ({"server-optimizer": "adam:1:1"}, "beta = 1: expected a number .* at most 0.9999"),
        ({"learning-rate-schedule": "constant:0.5"}, "warm-up = 0.5: expected a whole number"),
        # Parts of a value, and limits.
        ({"limits": "max-shar=1"}, "limits: 'max-shar' is unknown: did you mean 'max-share'"),
        ({"limits": "max-share=2"}, "max-share = 2: expected a number above 0 and at most 1"),
        ({"limits": "min-replies"}, "min-replies = '': expected a whole number"),
        ({"limits": "min-replies=2,min-replies=3"}, "got min-replies twice, expected once"),
        ({"sparsity": "1/4"}, "expected DOWN:UP"),
        ({"sparsity": 61}, "got a whole number"),  # which YAML makes of 1:1
        ({"method": "full", "sparsity": "1/4:1"}, "need all numbers of its state"),
        ({"method": "fedalt", "sparsity": "1/4:1"}, "need all numbers of its state"),
        ({"method": "fedalt", "sparsity": "1:1/4"}, "need all of their change"),
        ({"lora-scale": "sqrt-clients:0"}, "sqrt-clients:0': alpha = 0.*expected a number above"),
        ({"lora-scale": "sqrt-clients:x"}, "sqrt-clients:x': alpha = 'x'.*expected a number above"),
        ({"lora-scale": "sqrt"}, "= 'sqrt'.*expected sqrt-clients:ALPHA, or a number above 0"),
        ({"until-metric": -1}, "until-metric = -1: expected a number at least 0"),
        # Settings that do not fit a method or preset.
        ({"method": "fedsa-lora", "evaluate-on": "server"}, "evaluate-on = 'server': got method"),
        ({"method": "local", "evaluate-on": "server"}, "each client has a model of its own"),
        ({"method": "local", "validation-share": 0.0}, "needs examples to evaluate on"),
        ({"method": "centralised", "local-steps": "epochs:1"}, "local-steps = 'epochs:1': got m"),
        ({"batching": "packed"}, "batching = 'packed': .*digits-vit.yaml has no text"),
        ({"preset": "glue-llama", "batching": "packed"}, "glue-llama.yaml has task 'text'"),
        ({"glue-task": "rte"}, "glue-task = 'rte': .* has no GLUE tasks"),
        ({"max-length": 9}, "max-length = 9: .* has no texts"),
        ({"data": "./gone"}, "data = './gone': found no such folder"),
        ({"model": "./gone"}, "model = './gone': found no such folder"),
        ({"targets": "q,"}, "targets = 'q,': expected ends"),
        ({"init": "random:4"}, "init .*"),
        ({"init": "normal:4"}, "init .*"),
    ],
)
def test_errors_name_the_key_the_value_and_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        read_config(settings)


def test_command_line_words_are_parsed():
    config, clients = read_settings(
        ["seed=1", "learning-rate=1e-2", "method='ravan'", "num-clients=5", "resume=/a=b"]
    )
    assert config == {"seed": 1, "learning-rate": 0.01, "method": "ravan", "resume": "/a=b"}
    assert clients == 5


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("seed", "got 'seed', expected KEY=VALUE"),
        ("num-clients=many", "num-clients = 'many': expected a whole number"),
        ("resume=", "resume = '': got nothing, expected a value; is a shell variable empty"),
    ],
)
def test_invalid_command_line_words_are_refused(word, message):
    with pytest.raises(ValueError, match=message):
        read_settings([word])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "visoin"}, "task 'visoin' is unknown: did you mean 'vision'"),
        ({"tsak": "vision"}, "tsak is unknown: did you mean 'task'. Expected the fields"),
        ({"model": {"source": "bundled"}}, "model.name is missing; expected the fields"),
        ({"model": None}, "model is no mapping"),
        ({"lora-rank": 4}, "lora-rank is unknown. Expected the fields"),
        ({"learning-rate": {"ravan": -1}}, "learning-rate = -1.0: expected|= -1:"),
        ({"learning-rate": {"x": 1.0}}, "learning-rate.x is unknown. Expected the fields"),
        ({"learning-rate": {"ravan": {"frozen": 0.1}}}, "no .* 'ravan', .*, classifier 'trained'"),
    ],
)
def test_an_invalid_preset_is_refused(change, message, preset):
    with pytest.raises(ValueError, match=message):
        read_config({"preset": preset("mine", **change)})


def names(text):
    return set(text.split())


def test_identifying_keys_decide_whether_two_runs_are_the_same():
    """Resuming, grouping seeds and finding what a study has done follow the flags of the keys."""
    elsewhere = names(
        "clients-per-pass cuda-graphs deliver device output-dir processes resume round-timeout "
        "tracking"
    )
    assert set(NOT_OF_RESULT) == elsewhere
    assert set(FREE_ON_RESUME) == elsewhere | names(
        "eval-every limits max-bytes max-share max-update-norm min-replies num-rounds "
        "straggler-grace until-metric until-time"
    )
    assert set(history._NOT_A_DIFFERENCE) == elsewhere | {"seed"}
    assert set(spec._NOT_COMPARED) == elsewhere | {"rank"}


def test_a_preset_has_the_expected_settings():
    assert RUN.keys() - {"num-clients"} == names(
        "backbone-dtype batch-size classifier clients-per-round eval-every "
        "gradient-checkpointing heads init learning-rate-schedule local-steps "
        "lora-scale max-bytes num-rounds partition precision"
    )
    assert all(KEYS[name].default == "auto" for name in RUN.keys() - {"num-clients"})


@pytest.mark.parametrize("key", ["deliver", "gradient-checkpointing"])
def test_boolean_keys_accept_booleans_alone(key):
    for value, word in ((True, "yes"), (False, "no")):
        assert getattr(read_config({key: value}), key.replace("-", "_")) is value
        assert read_settings([f"{key}={str(value).lower()}"])[0] == {key: value}
        with pytest.raises(ValueError, match=f"{key} = '{word}': expected true or false"):
            read_config({key: word})
    assert KEYS[key].allowed == "true or false"


def test_bounds_are_written_with_all_their_digits():
    assert LIMITS["max-examples"].allowed.endswith("at least 1 and at most 281474976710656")
    assert KEYS["learning-rate"].allowed == "a number above 0 and at most 10"


def test_a_configuration_is_parsed_once_and_cached():
    selected = {"heads": 2, "learning-rate": 1}
    assert read_config(selected) is read_config(dict(selected))
    assert read_config({"heads": 2, "learning-rate": 0.5}) is not read_config(selected)
    read_config({"seed": 1})
    with pytest.raises(ValueError, match="seed = True: expected .*; got a truth value"):
        read_config({"seed": True})


def test_the_parts_of_the_optimizer_are_the_clients_proximal_term_decay_and_norm():
    config = read_config({"optimizer": "fedprox:0.01:0.1:1"})
    assert (config.proximal_mu, config.weight_decay, config.max_gradient_norm) == (0.01, 0.1, 1.0)


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ({"partition": "dirichlet"}, "dirichlet:0.3"),
        ({"partition": "dirichlet:1.0:user"}, "dirichlet:1:user"),
        ({"partition": "pathological::user"}, "pathological:2:user"),
        ({"partition": "shards:03"}, "shards:3"),
        ({"learning-rate-schedule": "cosine:0:2"}, "cosine:0:2"),
        ({"learning-rate-schedule": "cosine::2"}, "cosine::2"),
        ({"learning-rate-schedule": "constant:0"}, "constant"),
        ({"server-optimizer": "adam"}, "adam:0.01:0.9"),
        ({"server-optimizer": "momentum:1:0"}, "momentum:1:0"),
        ({"optimizer": "fedprox:0.01:0.1:1"}, "fedprox:0.01:0.1:1"),
        ({"optimizer": "adam:0:1"}, "adam::1"),
    ],
)
def test_a_setting_with_several_parts_is_parsed(setting, read):
    (key,) = setting
    written = read_config(setting).as_dict()
    assert written[key] == read
    assert read_config({key: read}).as_dict() == written


def test_keys_of_several_parts_have_the_expected_fields():
    config = read_config({"preset": "code", "batching": "packed", "init": "data-aware:3"})
    assert (config.packing, config.calibration_steps) == (True, 3)
    plain = read_config({"preset": "digits-vit", "init": "data-aware"})
    assert (plain.packing, plain.calibration_steps) == (False, 8)
    assert plain.init == "data-aware"  # as records of studies have it
    assert (config.quantize, read_config({"backbone-dtype": "8bit"}).quantize) == ("4bit", "8bit")
    robust = [read_config({"weighting": how}).robust for how in ("examples", "trimmed-mean")]
    assert robust == ["none", "trimmed-mean"]


def test_an_operators_limits_are_one_key():
    config = read_config({"limits": "max-share=0.5, max-examples=1000,min-replies=2"})
    assert (config.max_share, config.max_examples, config.min_replies) == (0.5, 1000, 2)
    assert config.max_update_norm is None
    assert read_config({}).max_share == 1.0


def test_clients_that_evaluate_have_a_validation_split():
    assert read_config({"evaluate-on": "clients"}).validation_share == 0.2
    assert read_config({}).validation_share == 0.0
    assert read_config({"evaluate-on": "clients", "validation-share": 0.1}).validation_share == 0.1


def test_a_key_of_several_values_takes_a_list_in_python():
    assert read_start({"targets": ["query", "value"]}).config.model.targets == ("query", "value")
