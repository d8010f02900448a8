"""Chat templates: what Hugging Face templates may use, and what they must not."""

import datetime
import json

import pytest

from octavo.models.chat import ChatTemplate, ChatTemplateError, chat_template_from_directory
from octavo.models.weights import WeightsError

MESSAGES = [{"role": "user", "content": "héllo <b> & 'you'"}]
LOOP = "{% for m in messages %}{{ m.role }}:{{ m['content'] }};{% endfor %}"


def test_the_demo_model_renders_its_conversation(smollm2):
    template = smollm2.chat_template
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    opening = f"<|im_start|>system\n{system}<|im_end|>\n"
    body = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    assert template.render(turn, add_generation_prompt=False) == opening + body
    assert template.render(turn) == opening + body + "<|im_start|>assistant\n"
    own = [{"role": "system", "content": "Be brief."}, turn[0]]
    assert template.render(own) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


RENDERED = {
    "messages": (LOOP, "user:héllo <b> & 'you';"),
    "special tokens": ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
    "generation prompt": ("{% if add_generation_prompt %}go{% endif %}", "go"),
    "no tools": ("{% if tools %}x{% endif %}{% if tools is none %}none{% endif %}", "none"),
    "block lines leave no trace": ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
    "break": (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "01",
    ),
    "continue": (
        "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
        "02",
    ),
    "tojson": ("{{ {'b': \"é<&'\", 'a': [1, none]} | tojson }}", '{"b": "é<&\'", "a": [1, null]}'),
    "tojson indented": ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
    "strftime_now": ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
    "generation block": ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
    "namespace": ("{% set n = namespace(x=1) %}{% set n.x = 2 %}{{ n.x }}", "2"),
    "undefined is empty": ("[{{ enable_thinking }}]", "[]"),
}


@pytest.mark.parametrize("case", RENDERED)
def test_templates_may_use_what_hugging_face_gives_them(case):
    source, expected = RENDERED[case]
    assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(MESSAGES) == expected


FAILING = {
    "its own error": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "attribute of undefined": ("{{ nobody.name }}", "'nobody' is undefined"),
    "type error": ("{{ none + 1 }}", "unsupported operand"),
    "division": ("{{ 1 // 0 }}", "zero"),
    "python internals": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "internals through a function": ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
    "internals through a format": ("{{ '{0.__class__.__mro__[1]}'.format(1) }}", "unsafe"),
    "changing the messages": ("{{ messages.append(1) }}", "unsafe"),
    "changing a message": ("{{ messages[0].update(role='system') }}", "unsafe"),
    "an endless range": ("{% for i in range(10**9) %}x{% endfor %}", "[Rr]ange too big"),
    "including a file": ("{% include 'secret' %}", "no loader"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_template_that_fails_or_reaches_out_raises_one_kind_of_error(case):
    source, message = FAILING[case]
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source).render(MESSAGES)
    assert MESSAGES == [{"role": "user", "content": "héllo <b> & 'you'"}]


@pytest.mark.parametrize(
    "source", ["{% for m in messages %}", "{{ ", "{% nonsense %}", "{{ x | y }}"]
)
def test_a_broken_template_is_refused_when_it_is_loaded(source):
    with pytest.raises(ChatTemplateError, match="not valid"):
        ChatTemplate(source)


def write(directory, *, config=None, file=None):
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": config}))
    if file is not None:
        (directory / "chat_template.jinja").write_bytes(file)
    return chat_template_from_directory(directory, bos_token="<s>", eos_token=None)


NAMED = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d{{ bos_token }}"}]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"config": "c"}, "c"),
        ({"config": NAMED}, "d<s>"),
        ({"config": "c", "file": "ü{{ eos_token }}".encode()}, "ü"),
        ({"file": b"f"}, "f"),
    ],
)
def test_a_directory_gives_its_template(tmp_path, parts, expected):
    template = write(tmp_path, **parts)
    assert template is not None
    assert template.render(MESSAGES) == expected


def test_a_directory_may_have_no_template(tmp_path):
    assert write(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert write(tmp_path) is None


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        (
            {"config": NAMED[:1]},
            ChatTemplateError,
            r"no template named 'default', only \['tools'\]",
        ),
        ({"config": 3}, ChatTemplateError, "is a int"),
        ({"config": [3]}, ChatTemplateError, "no template named 'default'"),
        ({"file": b"\xff"}, WeightsError, "not UTF-8"),
    ],
)
def test_a_broken_template_in_a_directory_is_an_error(tmp_path, parts, error, message):
    with pytest.raises(error, match=message):
        write(tmp_path, **parts)
