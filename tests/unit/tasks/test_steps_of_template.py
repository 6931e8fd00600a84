"""An endless chat template raises an error; other templates are unaffected."""

import resource
import sys

import datasets
import psutil
import pytest
import transformers

from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.causal import Causal
from ravan_flwr.tasks.forms import MOST_MESSAGES, MOST_STEPS, messages_of, render
from testing.tiny import CHAT, save_speaker

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops within loops": LOOP + CHAT,
    "in a macro": f"{{% macro again() %}}{LOOP}{{% endmacro %}}{{{{ again() }}}}" + CHAT,
    "for an answer alone": CHAT.replace("{%- generation %}", LOOP + "{%- generation %}"),
}
DATA = DataSpec("hub", "talks", columns=(("messages", "messages"),), target_length=8)
TALK = [{"role": "user", "content": "ka"}, {"role": "assistant", "content": "ne"}]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    where = save_speaker("llama", tmp_path_factory.mktemp("models") / "llama")
    settings = transformers.AutoConfig.from_pretrained(where).to_dict()
    return lambda template: Causal(
        DataSpec(**{**vars(DATA), "chat_template": template}), 64, lambda: where, lambda: settings
    )


@pytest.mark.parametrize("template", ENDLESS)
def test_an_endless_template_is_refused(template, task):
    examples, before = datasets.Dataset.from_dict({"messages": [TALK]}), sys.gettrace()
    with pytest.raises(ValueError, match=rf"template: it takes more than {MOST_STEPS:,} steps"):
        task(ENDLESS[template]).encode(examples)
    assert sys.gettrace() is before


def test_a_template_that_uses_all_memory_is_reported(task):
    twice = "{% set ns.x = ns.x + ns.x %}"
    template = "{% set ns = namespace(x='ka') %}{% for _ in range(64) %}" + twice + "{% endfor %}"
    reader, limits = task(template + CHAT).reader, resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**29, limits[1]))
    try:
        with pytest.raises(ValueError, match="chat template: memory ran out while it wrote"):
            render(reader, TALK)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_conversation_of_too_many_messages_is_excluded_and_counted(task, caplog):
    most = TALK * (MOST_MESSAGES // 2)
    talks = [TALK, [*most, TALK[0]], TALK * 50_000]
    with caplog.at_level("WARNING"):
        assert len(task("").encode(datasets.Dataset.from_dict({"messages": talks}))) == 1
    assert "2 of 3 are left out: 2: its conversation has more than 1,000 messages" in caplog.text
    assert len(messages_of(most)) == MOST_MESSAGES


def test_a_long_conversation_needs_far_fewer_steps(task):
    """A thousand turns are formatted, and an existing trace function is restored."""

    def trace(_frame, _event, _value):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        text = render(task("").reader, TALK * 1000)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert text.count("<|im_end|>") == 2000
