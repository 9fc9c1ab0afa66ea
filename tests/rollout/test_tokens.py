"""Tokenizer and chat template read from a checkpoint's files, held against transformers where it is installed."""

import pytest

from rollout.tokens import TokenizerView

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


@pytest.fixture
def make_model(tmp_path, write_tokenizer):
    """A checkpoint directory with a byte-level tokenizer, without weights."""

    def make(*, adds_bos=False, files=None, **settings):
        return write_tokenizer(tmp_path, adds_bos=adds_bos, files=files, **settings)

    return make


@pytest.mark.parametrize("text", ["sort 52914 =", "", "Grüße, 世界 🌊", "<eos> in the text"])
def test_text_survives_the_round_trip(make_model, text):
    view = TokenizerView(make_model())
    assert view.decode(view.encode(text), skip_special_tokens=False) == text


def test_a_text_prompt_goes_in_as_it_is(make_model):
    view = TokenizerView(make_model(chat_template=CHATML))
    assert view.prompt_ids("hi") == view.encode("hi")
    assert view.decode(view.prompt_ids("hi"), skip_special_tokens=False) == "hi"


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_bos_is_there_only_when_the_tokenizer_adds_it(make_model, adds_bos):
    view = TokenizerView(make_model(adds_bos=adds_bos, chat_template=CHATML))
    assert (view.prompt_ids("hi")[0] == 1) is adds_bos
    assert view.prompt_ids([{"role": "user", "content": "hi"}])[0] != 1, "a template writes its own"


def test_messages_are_rendered_with_the_assistants_turn_opened(make_model):
    view = TokenizerView(make_model(chat_template=CHATML))
    text = "<|user|>hi<eos><|assistant|>"
    assert view.decode(view.prompt_ids([{"role": "user", "content": "hi"}]), skip_special_tokens=False) == text
    assert view.prompt_ids("hi", apply_chat_template=True) == view.prompt_ids([{"role": "user", "content": "hi"}])
    assert view.has_chat_template


def test_N7_the_same_tokens_as_transformers(make_model):
    transformers = pytest.importorskip("transformers")
    directory = make_model(chat_template=CHATML)
    view = TokenizerView(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "user", "content": "2+2 <b>?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Grüße"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert view.prompt_ids(messages) == expected
    assert view.prompt_ids("sort 31 =") == theirs("sort 31 =")["input_ids"]


def test_the_usual_tools_of_templates_are_there(make_model):
    template = "{{ strftime_now('%Y') | length }}{% for m in messages %}{{ m | tojson }}{% if true %}{% break %}{% endif %}{% endfor %}"
    view = TokenizerView(make_model(chat_template=template + "{% generation %}x{% endgeneration %}"))
    assert view.render([{"role": "user", "content": "<é>"}, {"role": "user", "content": ""}]) == '4{"role": "user", "content": "<é>"}x'


def test_a_template_that_refuses_says_why(make_model):
    view = TokenizerView(make_model(chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="roles must alternate"):
        view.prompt_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "hi"}], 7])
def test_H3_a_template_that_fails_with_an_error_of_pythons_refuses_the_messages(make_model, content):
    view = TokenizerView(make_model(chat_template="{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"))
    with pytest.raises(ValueError, match="refused the messages: can only concatenate str"):
        view.prompt_ids([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "attack", ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}", "{{ messages.append(1) }}"]
)
def test_a_template_cannot_reach_out_of_its_sandbox(make_model, attack):
    view = TokenizerView(make_model(chat_template=attack))
    with pytest.raises(ValueError, match="refused"):
        view.prompt_ids([{"role": "user", "content": "hi"}])


def test_N9_a_template_cannot_change_the_callers_messages(make_model):
    view = TokenizerView(make_model(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"))
    messages = [{"role": "user", "content": "hi"}]
    view.prompt_ids(messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_without_a_template_messages_are_refused_with_a_remedy(make_model):
    view = TokenizerView(make_model())
    assert not view.has_chat_template
    with pytest.raises(ValueError, match="no chat template; give prompts as text"):
        view.prompt_ids([{"role": "user", "content": "hi"}])


def test_a_broken_template_is_named_at_once(make_model):
    with pytest.raises(ValueError, match="cannot be read"):
        TokenizerView(make_model(chat_template="{% for %}"))


def test_a_template_file_wins_and_a_list_gives_its_default(make_model):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert TokenizerView(make_model(chat_template=named)).render([]) == "plain"
    assert TokenizerView(make_model(chat_template=named, files={"chat_template.jinja": "from file"})).render([]) == "from file"


@pytest.mark.parametrize(
    ("files", "settings", "expected"),
    [
        ({}, {}, (2,)),
        ({"generation_config.json": {"eos_token_id": [5, 2]}}, {}, (2, 5)),
        ({"config.json": {}}, {"eos_token": {"content": "<bos>", "lstrip": False}}, (1,)),
        ({"config.json": {"eos_token_id": None}}, {"eos_token": None}, ()),
        ({"config.json": {}}, {"eos_token": "not in the vocabulary"}, ()),
    ],
)
def test_the_ends_of_an_answer_are_found_where_engines_find_them(make_model, files, settings, expected):
    assert TokenizerView(make_model(files=files, **settings)).eos_ids == expected


def test_the_vocabulary_is_as_large_as_the_models(make_model):
    assert TokenizerView(make_model()).vocab_size == 320
    assert TokenizerView(make_model(files={"config.json": {}})).vocab_size == 261


def test_a_directory_without_a_tokenizer_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match="does not exist; give the directory of a Hugging Face checkpoint"):
        TokenizerView(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ValueError, match="copy the checkpoint again"):
        TokenizerView(tmp_path)
