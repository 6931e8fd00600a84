"""Settings as a user types them on the command line."""

import pytest

from ravan_flwr.cli import EARLIER
from ravan_flwr.config.key import EARLIER as EARLIER_KEYS
from ravan_flwr.config.key import OTHER_NAMES, nearest
from ravan_flwr.config.keys import KEYS, as_key_values, check_key, read_settings
from ravan_flwr.launch.start import read_start
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar
from tests.commands import error_of


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("deliver=false", False),
        ("deliver=False", False),  # Python's spelling
        ("colour=True", "True"),
        ("deliver=no", "no"),
        ("output-dir=2024", "2024"),
        ("output-dir=1e3", "1e3"),
        ("output-dir=true", "true"),
        ("data='a b'", "a b"),
        ("seed=3", 3),
        ("seed=true", "true"),
        ("learning-rate=1e-3", 1e-3),
        ("learning-rate=auto", "auto"),
        ("heads=4.0", 4.0),
        ("colour=3", 3),
    ],
)
def test_a_word_is_read_as_the_type_of_its_key(word, value):
    (got,) = read_settings([word])[0].values()
    assert (type(got), got) == (type(value), value)


def test_settings_round_trip_through_words():
    settings: dict[str, Scalar] = {"deliver": False, "seed": 3, "output-dir": "2", "data": "a b"}
    settings["learning-rate"] = 0.001
    assert read_settings(as_key_values(settings)) == (settings, None)


def test_a_duplicate_key_is_refused():
    with pytest.raises(ValueError, match="seed: got it twice, as 1 and 2"):
        read_settings(["seed=1", "seed=2"])


@pytest.mark.parametrize(
    ("value", "choices", "meant"),
    [
        ("RAVAN", ("ravan", "full"), "ravan"),
        ("num_rounds", ("num-rounds", "seed"), "num-rounds"),
        ("cra", ("Crab", "Ray"), "Crab"),
        ("zzz", ("ravan", "full"), None),
        ("digit", ("glue-llama", "digits-vit"), "digits-vit"),
        ("batch", ("batching", "batch-size"), "batch-size"),
        ("sede", ("seed", "data"), "seed"),
        *((far, [*KEYS, "num-clients"], None) for far in (
            "packing", "warm-up-rounds", "calibration-steps", "server-learning-rate",
            "final-learning-rate", "max-share", "halving",
        )),
    ],
)  # fmt: skip
def test_the_nearest_choice_ignores_case(value, choices, meant):
    assert nearest(value, choices) == meant


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["num-client=5"], "unknown key 'num-client': did you mean 'num-clients'?"),
        (["--num-rounds=3"], "keys are written without dashes: num-rounds=3"),
        (["--num_rounds", "3"], "keys are written without dashes: num-rounds=VALUE"),
        (["--zzzzzz"], "unrecognized argument '--zzzzzz'; --help lists the options\n"),
        (["--seeds", "3"], "unrecognized argument '--seeds'; --help lists the options\n"),
        (["min-replies=2"], "'min-replies': it is a limit; write limits=min-replies=2\n"),
        (["max_share=1"], "unknown key 'max_share': did you mean 'max-share'?"),
        (["sparsity=0.1"], "at most 1, such as 1/4:1/16\n"),
        (["num-clients=0"], "num-clients = 0: expected a whole number at least 1, such as 20\n"),
        (["seed=-1"], "seed = -1: expected a whole number at least 0 and at most 2147483647\n"),
        (["method=hetLoRA"], "method 'hetLoRA' is unknown: did you mean 'hetlora'?"),
        (["method=fedavg"], "method 'fedavg' is unknown: did you mean 'fedit' or 'full'?"),
        (["method=FedAvg"], "method 'FedAvg' is unknown: did you mean 'fedit' or 'full'?"),
        (["method=lora"], "method 'lora' is unknown: did you mean 'fedit'?"),
        # Those of the data and the machine are found after imports.
        (["output-dir=/dev/null/runs"], "'/dev/null/runs': /dev/null is no writable folder"),
        (["num-clients=1439"], "1439 clients share 1438 examples, expected at least one each"),
        (["device=cuda:99"], "device = 'cuda:99' is not there"),
    ],
)
def test_a_mistake_is_reported(words, message, capsys):
    assert message in error_of(capsys, "simulate", *words)


@pytest.mark.parametrize("number", ["3", 2.5, 0, True])
def test_another_number_of_clients_is_refused_in_python_too(number):
    with pytest.raises(ValueError, match=rf"num-clients = {number!r}: expected a whole number at"):
        read_start({}, number)


def test_keys_and_commands_of_earlier_versions_name_the_present_ones(capsys):
    assert EARLIER_KEYS.items() >= {
        "local-epochs": "local-steps=epochs:1", "parameter-budget": "lora-rank=higher",
        "weight-decay": "optimizer=adam:0.01", "max-gradient-norm": "optimizer=adam:0:1",
        "proximal-mu": "optimizer=fedprox:0.01", "report": "tracking=none",
        "beta": "the field data.beta of a preset",
    }.items()  # fmt: skip
    for key, setting in EARLIER_KEYS.items():
        name, equals, value = setting.replace(":COLUMN", ":label").partition("=")
        if equals:  # else it is a field of a preset
            check_key(name, value)
        with pytest.raises(ValueError, match=f"unknown key '{key}': it is now {setting}, say"):
            check_key(key, "1")
    for command, other in EARLIER.items():
        message = f"'{command}' is no command any more, use {other}\n"
        assert message in error_of(capsys, command, "runs/x")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("rate", "'learning-rate'"),  # a part of a name
        ("learning_rate", "'learning-rate'"),
        ("rounds", "'num-rounds'"),
        ("steps", "'local-steps'"),
        ("head", "'heads'"),
        ("lr", "'learning-rate'"),
        ("epochs", "'local-steps=epochs:1'"),
        ("num_epochs", "'local-steps=epochs:1'"),
        ("clients", "'num-clients'"),
        ("alpha", "'partition=dirichlet:0.3' or 'lora-scale'"),
        ("dirichlet", "'partition=dirichlet:0.3'"),
        ("bs", "'batch-size'"),
        ("batch_size", "'batch-size'"),
        ("r", "'rank'"),
        ("lora_r", "'rank' or 'lora-rank'"),
        ("lora_alpha", "'lora-scale'"),
        ("num_heads", "'heads'"),
        ("gpu", "'device=cuda'"),
        ("wandb", "'tracking=wandb'"),
        ("num_rounds", "'num-rounds'"),
        ("local_epochs", "'local-steps=epochs:1'"),
        ("LR", "'learning-rate'"),
    ],
)
def test_the_usual_name_of_a_key_is_answered_with_ours(typed, meant, capsys):
    message = f"unknown key {typed!r}: did you mean {meant}?"
    assert message in error_of(capsys, "simulate", f"{typed}=1")


def test_other_names_lead_to_what_exists():
    """No key or method has another one's other name."""
    for name, meant in OTHER_NAMES.items():
        assert name not in {*KEYS, *METHODS, *EARLIER_KEYS}
        for setting in meant:
            key, _, value = setting.partition("=")
            assert key in {*KEYS, *METHODS, "num-clients"}, name
            if value:
                check_key(key, value)


@pytest.mark.parametrize("engine", ["process", "flower"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=/nowhere"], "resume = '/nowhere': found no config.json there"),
        (["limits=min-replies=3", "num-clients=2"], "min-replies = 3: got num-clients = 2"),
    ],
)
def test_early_errors_are_reported_before_pytorch(engine, words, message, capsys, monkeypatch):
    for heavy in ("cli.running.importing", "launch.superlink.run_in_flower"):
        monkeypatch.setattr(f"ravan_flwr.{heavy}", lambda *_: pytest.fail("too late"))
    assert message in error_of(capsys, "simulate", f"--engine={engine}", *words)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("output-dir=/dev/null/runs", "no writable folder"),
        ("num-clients=1439", "expected at least one each"),
    ],
)
def test_invalid_settings_do_not_start_flowers_engine(word, message, capsys, monkeypatch):
    started = lambda: pytest.fail("too late")  # noqa: E731
    monkeypatch.setattr("ravan_flwr.launch.superlink.LocalSuperLink", started)
    assert message in error_of(capsys, "simulate", "--engine=flower", word)


@pytest.mark.parametrize("words", [["seed=3", "--jobs", "1"], ["--jobs", "1", "seed=3"]])
def test_keys_are_accepted_before_and_after_an_option(words, tmp_path, capsys):
    (file := tmp_path / "study.yaml").write_text("")
    message = "study: got seed=3, expected data or model"
    assert message in error_of(capsys, "study", str(file), *words)
