"""Answers are located in conversations, for unusual tokenizers and templates."""

import jinja2
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.tasks.prompts import AnnotatedText, conversation, question
from ravan_flwr.tasks.tokens import Tokens, question_tokens, shortened, tokenize_text
from tests.support.tiny import CHAT, WORDS, save_bytes_tokenizer

# Forms of published chat templates, reduced to the relevant parts.
INST = """\
{{ '<s>' }}{% for m in messages %}\
{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}\
{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '</s>' }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}\
{% endfor %}"""
SYSTEM_LAST = """\
{% if messages[0]['role'] == 'system' %}{% set told = messages[0]['content'] %}\
{% set messages = messages[1:] %}{% endif %}{% for m in messages %}\
{% if m['role'] == 'user' %}{{ '[INST]' }}\
{% if loop.index0 >= messages | length - 2 and told %}{{ told + ' ' }}{% endif %}\
{{ m['content'] + '[/INST]' }}{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"""
THINKING = """\
{% for m in messages %}{% set c = m['content'] %}\
{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}\
{{ '<|im_start|>' + m['role'] + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DEFAULT_SYSTEM = """\
{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}\
{% endif %}""" + CHAT  # fmt: skip


def turns(*contents, system=""):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": one} for role, one in zip(roles, contents, strict=False)]
    return [{"role": "system", "content": system}, *messages] if system else messages


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return save_bytes_tokenizer(tmp_path_factory.mktemp("reader"), [" ".join(WORDS)])


def written(reader, template, messages):
    reader.chat_template = template
    return conversation(reader, messages)


def answers(found):
    return [found.text[start:end] for start, end in found.answers]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT, ["one<|im_end|>\n", "two<|im_end|>\n"]),
        (DEFAULT_SYSTEM, ["one<|im_end|>\n", "two<|im_end|>\n"]),
        (INST, [" one</s>", " two</s>"]),
        (THINKING, ["one<|im_end|>\n", "two<|im_end|>\n"]),
    ],
)
def test_every_turn_of_the_assistant_is_found_with_its_end(reader, template, expected):
    found = written(reader, template, turns("a", "one", "one two?", "two"))
    assert answers(found) == expected
    assert not found.unlearned
    prompt = question(reader, turns("a", "one", "one two?", "two"))
    assert found.text == prompt.text + expected[-1]  # the answer follows its prompt


def test_an_answer_that_also_occurs_in_the_question_is_located(reader):
    found = written(reader, CHAT, turns("yes", "yes", "yes<|im_end|>", "yes"))
    assert answers(found) == ["yes<|im_end|>\n"] * 2
    assert [start for start, _ in found.answers] == [
        len("<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"),
        len(found.text) - len("yes<|im_end|>\n"),
    ]


THOUGHT = turns("a", "<think>hm</think>one", "b", "<think>ah</think>two")


@pytest.mark.parametrize(
    ("template", "messages", "expected", "unlearned"),
    [
        (INST, turns("a", "  one \n", "b", "two"), [" one</s>", " two</s>"], 0),
        (THINKING, THOUGHT, ["<think>ah</think>two<|im_end|>\n"], 1),
        (SYSTEM_LAST, turns("a", "one", "b", "two", system="Be kind."), ["two</s>"], 1),
    ],
)
def test_templates_may_rewrite_earlier_turns(reader, template, messages, expected, unlearned):
    found = written(reader, template, messages)
    assert (answers(found), found.unlearned) == (expected, unlearned)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHAT, turns("a"), "no message of the assistant"),
        (CHAT, turns("a", ""), "its answer is empty"),
        (CHAT, turns("a", " \n"), "its answer is empty"),
        (CHAT, turns("a", "one")[1:], "does not show where its answers are"),
        (INST, turns("a", "one", system="x"), "refuses it: Only user and assistant"),
        ("{{ messages[0]['content'] }}", turns("a", "one"), "does not show where"),
        ("{{ messages[9]['content'] + 1 }}", turns("a", "one"), "chat template"),
        ("{{ ''.__class__.__mro__ }}", turns("a", "one"), "chat template"),
    ],
)
def test_conversations_without_a_trainable_answer_are_refused(reader, template, messages, message):
    with pytest.raises(UnreadableError, match=message):
        written(reader, template, messages)


def test_an_invalid_template_raises_its_own_error(reader):
    with pytest.raises(ValueError, match="chat template: line 1: "):
        written(reader, "{% for %}", turns("a", "one"))


def test_a_template_cannot_read_files(reader, tmp_path):
    """The sandbox is transformers'; this test would detect its removal."""
    (tmp_path / "secret").write_text("hidden")
    for code in (
        f"{{% include '{tmp_path}/secret' %}}",
        f"{{{{ cycler.__init__.__globals__.os.popen('cat {tmp_path}/secret').read() }}}}",
    ):
        try:
            found = written(reader, code, turns("a", "one")).text
        except (UnreadableError, ValueError, jinja2.TemplateError) as error:
            found = str(error)
        assert "hidden" not in found


# From texts to tokens.

PIECES = st.sampled_from(["ka", " ka", "ne", " ", "\n", "é", "🙂", "rane", ":", "Lo", "<|im_end|>"])
TEXTS = st.lists(PIECES, min_size=1, max_size=6).map("".join)


@given(TEXTS, TEXTS)
def test_the_tokens_before_an_answer_equal_those_of_the_prompt_alone(reader_of_all, prompt, answer):
    """Also where tokens would merge over the border."""
    both = AnnotatedText(prompt + answer, ((len(prompt), len(prompt + answer)),))
    found = tokenize_text(reader_of_all, both)
    prompt_tokens = question_tokens(reader_of_all, AnnotatedText(prompt), 99)
    assert found.ids[: len(prompt_tokens)] == prompt_tokens
    assert found.learned == [number >= len(prompt_tokens) for number in range(len(found))]
    assert found.ids[-1] == reader_of_all.eos_token_id
    assert reader_of_all.decode(found.ids[:-1]) == prompt + answer


@pytest.fixture(scope="module")
def reader_of_all(tmp_path_factory):
    texts = ["Lorane: kane kalo", "ka ne ka rane", ": ka\n\n", " ka ka"]
    return save_bytes_tokenizer(tmp_path_factory.mktemp("reader"), texts)


def test_a_space_at_the_end_of_a_prompt_is_not_merged_into_the_answer(reader_of_all):
    """ "Answer: " and "ka" have the token " ka" in common, which a prompt alone does not give."""
    together = reader_of_all("ne: ka", add_special_tokens=False).input_ids
    alone = reader_of_all("ne: ", add_special_tokens=False).input_ids
    assert together[: len(alone)] != alone
    found = tokenize_text(reader_of_all, AnnotatedText("ne: ka", ((4, 6),)))
    assert found.ids[: len(alone)] == alone
    assert reader_of_all.decode(learned(found)) == ("ka" + reader_of_all.eos_token)


def learned(tokens):
    return [n for n, one in zip(tokens.ids, tokens.learned, strict=True) if one]


def sentencepiece_like(*, begins):
    """A tokenizer that marks spaces, as LLaMA 2's, which may begin texts with <s>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS), "[INST] [/INST] user"], trainer)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_the_bos_token_occurs_once(reader):
    reader = sentencepiece_like(begins=True)
    plain = tokenize_text(reader, AnnotatedText("kane lora", ((5, 9),)))
    assert plain.first == 1
    chat = tokenize_text(reader, written(reader, INST, turns("kane", "lora")))
    for tokens in (plain, chat):
        assert tokens.ids[0] == 1
        assert tokens.ids.count(1) == 1
    assert reader.decode(learned(chat)).strip() == "lora</s>"
    without = tokenize_text(sentencepiece_like(begins=False), AnnotatedText("kane lora", ((5, 9),)))
    assert without.ids[0] != 1


# Too long texts.

TEXT = Tokens(
    [1, 10, 11, 12, 20, 21, 13, 22, 23], [False] * 4 + [True] * 2 + [False, True, True], 1
)


def test_too_long_prompts_are_cut_and_keep_their_bos_token():
    assert shortened(TEXT, 9, "drop") is TEXT
    cut = shortened(TEXT, 8, "cut")
    assert cut.ids == [1, 11, 12, 20, 21, 13, 22, 23]
    assert sum(cut.learned) == 4
    with pytest.raises(UnreadableError, match="more tokens than max-length"):
        shortened(TEXT, 8, "drop")


@pytest.mark.parametrize(
    ("most", "expected"), [(7, [20, 21, 22, 23]), (6, [22, 23]), (5, [22, 23]), (4, [22, 23])]
)
def test_an_answer_without_any_context_is_not_learned(most, expected):
    cut = shortened(TEXT, most, "cut")
    assert len(cut) == most
    assert learned(cut) == expected


def test_an_answer_that_fills_the_whole_length_is_excluded():
    with pytest.raises(UnreadableError, match="its answer alone has more tokens than max-length"):
        shortened(TEXT, 3, "cut")
    all_learned = Tokens(TEXT.ids, [True] * 9, 1)
    assert sum(shortened(all_learned, 3, "cut", learn_all=True).learned) == 3


def test_a_text_of_one_token_has_no_target():
    with pytest.raises(UnreadableError, match="no token to learn"):
        shortened(Tokens([5], [True]), 9, "cut", learn_all=True)
