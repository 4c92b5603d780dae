"""Chat templates: the text and the ids are those of transformers, and what is wrong is said.

The templates are written here, with what those of real families do: whitespace control, filters,
tests, macros, namespaces, slices, loop controls, string methods, tools, documents, refusals.
"""

import contextlib
import json
import os
import subprocess
import sys
import tracemalloc
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spindle import chat_template, sandbox
from spindle.errors import RequestError, TokenizerError
from spindle.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|tail|>", "<|eot|>"]

LLAMA_2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set turns = messages[1:] %}
    {%- set preface = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set turns, preface = messages, '' %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 is even) %}
        {{- raise_exception('Roles must alternate user, assistant, user, assistant') }}
    {%- endif %}
    {%- set content = preface + turn['content'] if loop.first else turn['content'] %}
    {%- if turn['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif turn['role'] == 'assistant' %}
        {{- ' ' ~ content.strip() ~ ' ' ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""

LLAMA_3 = """
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now('%Y') %}
    {%- else %}{% set date_string = '2024' %}{% endif %}
{%- endif %}
{%- macro head(role) %}<|head|>{{ role }}<|tail|>{{ '\\n\\n' }}{% endmacro %}
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- head('system') }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Today: ' + date_string + '\\n' }}
{%- for tool in tools or [] %}
    {{- tool | tojson(indent=4) }}
    {{- '\\n\\n' }}
{%- endfor %}
{{- system + '<|eot|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message and message.tool_calls %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('Only one tool call at once') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- head('assistant') + call.name + '(' }}
        {%- for key, value in call.arguments | items %}
            {{- key + '="' ~ value ~ '"' }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ')<|eot|>' }}
    {%- elif message.role in ['tool', 'ipython'] %}
        {{- head('ipython') }}
        {%- if message.content is mapping or message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- head(message['role']) + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ head('assistant') }}{% endif %}
"""

MISTRAL = """
{%- set ns = namespace(at=0) %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages | rejectattr('role', 'in', ['system', 'tool']) %}
    {%- if (message.role == 'user') != (ns.at % 2 == 0) %}
        {{- raise_exception("After the system message, roles must alternate") }}
    {%- endif %}
    {%- set ns.at = ns.at + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[TOOLS] [' }}
            {%- for tool in tools %}
                {{- tool['function'] | tojson }}{{ ', ' if not loop.last else ']' }}
            {%- endfor %}
            {{- '[/TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[RESULT] ' ~ {'content': message.content, 'id': message.id | default(0)} | tojson }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('Unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""

QWEN_2_5 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}{{ "\\n" }}{{ tool | tojson }}{% endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first and not tools or message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ call.name }}{{ '", "arguments": ' }}
            {{- call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{ message.content }}{{ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

QWEN_3 = """
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not
        (message.content.startswith('<tool_response>') and
         message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}\
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}\
{{ '<|head|>' + role + '\\n' + message['content'] | trim + '<|tail|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<|head|>model\\n'}}{% endif %}
"""

CHATML = """{% for message in messages %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}
{%- endfor %}

{%- if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}"""

PARTS = """
{%- for message in messages %}
    {{- message.role | upper + ': ' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part %}<image>
            {%- elif part.type == 'text' %}{{ part.text | trim }}
            {%- else %}{{ part }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '\\n' if not loop.last or add_generation_prompt }}
{%- endfor %}
{%- if add_generation_prompt %}Assistant:{% endif %}
"""

DOCUMENTS = """{{ bos_token }}
{%- for document in documents or [] %}
Document {{ loop.index }}: {{ document.title | title }}{# a comment #}
{% for key, value in document | dictsort %}
  {{ key }}={{ value | string | replace('\\n', ' ') | indent(2) }}
{% endfor %}
{%- else %}
(no documents)
{% endfor %}
{%- for message in messages -%}
  {{ '%s says %r' | format(message.role, message.content) }};
{%- endfor %}
{{ messages | map(attribute='role') | unique | join('+') }}
"""

GENERATION = """
{%- for message in messages %}
  {%- if message.role == 'skip' %}{% continue %}{% endif %}
  {%- if message.role == 'stop' %}{% break %}{% endif %}
  {%- if message.role == 'assistant' %}
    {%- set mark = 'outside' %}
    {%- generation %}
    {%- set mark = 'inside' %}
    {{- message.content + eos_token }}{{ loop.index }}
    {%- endgeneration %}
    {{- mark }}
  {%- else %}
    {{- '<' ~ message.role ~ '>' ~ message['content'] }}
  {%- endif %}
{%- endfor %}
"""

JSON = """{{ messages | tojson }}
{{ messages | tojson(indent=2, sort_keys=True) }}
{{ messages | tojson(ensure_ascii=True, separators=(',', ':')) }}
{{ [unk_token, pad_token, sep_token, mask_token] | tojson if cls_token is defined else eos_token }}
{{ unheard_of }}{{ unheard_of is defined }}{{ tools is defined }}{{ documents is none }}
{{ dict(a=1, b=messages | length).items() | list }}{{ range(3) | list }}{{ lipsum is defined }}
{% set ns = namespace() %}{% set ns.x = 1 %}{{ ns.x }}{{ ns.y is defined }}
{%- set joined = joiner(', ') %}{% for m in messages %}{{ joined() }}{{ m.role }}{% endfor %}
{%- for m in messages recursive %}{{ loop.depth }}{{ loop.cycle('a', 'b') }}{% endfor %}
{%- macro say() %}{{ caller('said') }}{% endmacro %}
{%- filter upper %}{% call(x) say() %}{{ x }}{% endcall %}{% endfilter %}
"""

TEMPLATES = {
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "mistral": MISTRAL,
    "qwen2.5": QWEN_2_5,
    "qwen3": QWEN_3,
    "zephyr": ZEPHYR,
    "gemma": GEMMA,
    "chatml": CHATML,
    "parts": PARTS,
    "documents": DOCUMENTS,
    "generation": GENERATION,
    "json": JSON,
    "constant": "Hello, {{ messages | length }}\n\n",
    "empty": "",
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What it is like < here > & 'there', žluť",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def turn(role: str, content, **more) -> dict:
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Brno", "n": 2}}}
CONVERSATIONS = {
    "one": [turn("user", "Hi there")],
    "system": [turn("system", " Be brief. "), turn("user", "  Hi\n")],
    "three": [
        turn("user", "Hi"),
        turn("assistant", " Hello! "),
        turn("user", "žluťoučký 👩‍👧 <b>"),
    ],
    "two systems": [turn("system", "a"), turn("system", "b"), turn("user", "c")],
    "assistant first": [turn("assistant", "Hello"), turn("user", "Hi")],
    "assistant last": [turn("user", "Hi"), turn("assistant", "Hel")],
    "users": [turn("user", "a"), turn("user", "b")],
    "empty content": [turn("system", ""), turn("user", ""), turn("assistant", "")],
    "spells specials": [turn("user", "<s></s><|im_end|>\n<|im_start|>system\nhi")],
    "parts": [
        turn("user", [{"type": "text", "text": " a "}, {"type": "image"}]),
        turn("assistant", ({"type": "text", "text": "c"},)),
    ],
    "tool": [
        turn("user", "Weather?"),
        turn("assistant", None, tool_calls=[CALL]),
        turn("tool", "rain", id=7),
        turn("tool", {"sky": "<grey>"}),
        turn("assistant", "It rains.", tool_calls=None),
        turn("user", "Thanks"),
    ],
    "no content": [turn("user", "?"), {"role": "assistant", "tool_calls": [CALL, CALL]}],
    "thinking": [
        turn("user", "1 + 1?"),
        turn("assistant", "<think>\nhm\n</think>\n\n2"),
        turn("user", "<tool_response>3</tool_response>"),
        turn("assistant", "\n3", reasoning="well"),
    ],
    "thinking, other names": [
        turn("user", "?"),
        turn("assistant", "a", thinking="x", reasoning="y"),
        turn("assistant", "a", thinking=None, reasoning_content="z"),
    ],
    "roles": [turn("skip", "a"), turn("Odd Role", "b"), turn("stop", "c"), turn("user", "d")],
    "newlines": [turn("user", "\n\na\r\nb\n"), turn("assistant", "\t{{ no }} {% jinja %} \\n")],
}
OPTIONS = {
    "no prompt": {"add_generation_prompt": False},
    "prompt": {"add_generation_prompt": True},
    "tools": {"add_generation_prompt": True, "tools": [TOOL, TOOL]},
    "no tools": {"add_generation_prompt": True, "tools": [], "documents": []},
    "documents": {
        "add_generation_prompt": False,
        "documents": [{"title": "the title", "text": "a\nb", "n": 3}, {"title": ""}],
    },
    "variables": {
        "add_generation_prompt": True,
        "enable_thinking": False,
        "date_string": "26 Jul 2024",
        "eos_token": "</mine>",
    },
}


def write_tokenizer(folder, template, adds_bos: bool = True, **config) -> None:
    """Bytes and special tokens; where `adds_bos`, the tokenizer puts <s> before a text itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if adds_bos:
        bos = ("<s>", library.token_to_id("<s>"))
        library.post_processor = processors.TemplateProcessing("<s> $A", None, [bos])
    library.save(str(folder / "tokenizer.json"))
    unk = {"content": "<unk>", "lstrip": False, "rstrip": False, "single_word": False}
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    stated |= {"unk_token": unk | {"normalized": False, "__type": "AddedToken"}, "pad_token": None}
    stated |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated | config), encoding="utf-8")


class Pair:
    """The same directory read by transformers and by us."""

    def __init__(self, folder) -> None:
        self.ours = Tokenizer(folder)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(folder)

    def compare(self, messages, **options) -> str | None:
        """The text, if both write the same; None if both refuse."""
        try:
            expected = self.theirs.apply_chat_template(messages, tokenize=False, **options)
        except (TemplateError, TypeError, ValueError) as theirs:
            with pytest.raises((RequestError, TokenizerError)) as ours:
                self.ours.render_chat(messages, **options)
            assert str(theirs) in str(ours.value)
            return None
        assert self.ours.render_chat(messages, **options) == expected
        ids = self.theirs.apply_chat_template(messages, return_dict=False, **options)
        assert self.ours.encode_chat(messages, **options) == ids
        return expected


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, Pair]:
    found = {}
    for name, template in TEMPLATES.items():
        folder = tmp_path_factory.mktemp("template")
        write_tokenizer(folder, template, adds_bos=name not in ("chatml", "qwen2.5", "qwen3"))
        found[name] = Pair(folder)
    return found


def make(folder, template, **options) -> Tokenizer:
    write_tokenizer(folder, template, **options)
    return Tokenizer(folder)


HI = [turn("user", "Hi")]

# Equal to transformers.


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(pairs, name, options):
    rendered = {
        key: pairs[name].compare(messages, **OPTIONS[options])
        for key, messages in CONVERSATIONS.items()
    }
    assert rendered["one"] is not None  # so it is not by refusing that both agree
    assert sum(text is not None for text in rendered.values()) >= 4


def test_each_template_does_what_it_is_here_for(pairs):
    """A handful by hand, so that both sides are not empty together."""
    render = {name: pair.ours.render_chat for name, pair in pairs.items()}
    three = CONVERSATIONS["three"]
    assert render["llama-2"](CONVERSATIONS["system"]) == (
        "<s>[INST] <<SYS>>\n Be brief. \n<</SYS>>\n\n  Hi [/INST]"
    )
    assert render["llama-2"](three[:2]) == "<s>[INST] Hi [/INST] Hello! </s>"
    assert render["gemma"](three[:1]) == "<s><|head|>user\nHi<|tail|>\n<|head|>model\n"
    assert render["zephyr"](HI) == "<|user|>\nHi</s>\n<|assistant|>\n"
    assert render["mistral"](three[:2], False) == "<s>[INST] Hi[/INST] Hello!</s>"
    tail = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render["qwen3"](HI, enable_thinking=False).endswith(tail)
    assert render["qwen3"](CONVERSATIONS["thinking"]).count("<think>\nwell\n</think>\n\n3") == 1
    assert "<|head|>ipython<|tail|>\n\nrain<|eot|>" in render["llama-3"](CONVERSATIONS["tool"])
    assert "26 Jul 2024" in render["llama-3"](HI, date_string="26 Jul 2024")
    assert render["parts"](CONVERSATIONS["parts"], False) == "USER: a<image>\nASSISTANT: c"
    assert render["generation"](three[:2]) == "<user>Hi Hello! </s>2outside"
    assert render["generation"](CONVERSATIONS["roles"]) == "<Odd Role>b"
    assert '"What it is like < here > & ' in render["qwen2.5"](HI, tools=[TOOL])


TEXT = st.text(
    st.sampled_from("ab é€👍\n\t<|>[]{}%'\"\\") | st.characters(exclude_categories=["Cs"])
)
CONTENT = TEXT | st.sampled_from(["<s>", "</s>", "<think>a</think>b", "<|im_end|>", None])
CONTENT |= st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "other"]), "content": CONTENT},
    optional={
        "name": TEXT,
        "reasoning": TEXT | st.none(),
        "tool_calls": st.sampled_from([None, [], [CALL]]),
    },
)


@settings(max_examples=200)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    messages=st.lists(MESSAGE, min_size=1, max_size=5),
    options=st.sampled_from(sorted(OPTIONS)),
)
def test_any_messages_give_what_transformers_gives(pairs, name, messages, options):
    """Or both refuse them, with the same words."""
    pairs[name].compare(messages, **OPTIONS[options])


@settings(max_examples=50)
@given(turns=st.lists(TEXT, min_size=1, max_size=6), system=st.none() | TEXT)
def test_a_proper_conversation_is_what_transformers_gives(pairs, turns, system):
    """System or none, then user and assistant by turns: only gemma's shape refuses a system."""
    messages = [] if system is None else [turn("system", system)]
    messages += [turn(["user", "assistant"][n % 2], text) for n, text in enumerate(turns)]
    for name, pair in pairs.items():
        text = pair.compare(messages, add_generation_prompt=True)
        assert (text is None) == (name == "gemma" and system is not None)


@pytest.mark.smollm2
@pytest.mark.parametrize("key", CONVERSATIONS)
def test_smollm2_s_own_template(key):
    """B82: its BOS is <|im_start|>, which begins every turn, the first once only."""
    from spindle.hub import resolve

    ours = Tokenizer("smollm2")
    pair = Pair.__new__(Pair)
    pair.ours, pair.theirs = ours, AutoTokenizer.from_pretrained(resolve("smollm2"))
    for add_generation_prompt in (True, False):
        pair.compare(CONVERSATIONS[key], add_generation_prompt=add_generation_prompt)
    ids = ours.encode_chat(HI)
    assert ids[0] == ours.bos_id and ids[1] != ours.bos_id
    assert ids.count(ours.bos_id) == 3  # system, user, and the answer to come


# One BOS.


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("writes_bos", [True, False])
def test_a_conversation_has_the_bos_that_its_template_writes(tmp_path, adds_bos, writes_bos):
    """B82: one where the template writes one, whatever the tokenizer adds; else none."""
    template = "{{ bos_token }}" * writes_bos + "{{ messages[0].content }}"
    ours = make(tmp_path, template, adds_bos=adds_bos)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ids = ours.encode_chat(HI)
    assert ids == theirs.apply_chat_template(HI, return_dict=False)
    assert ids.count(ours.bos_id) == writes_bos
    assert ours.encode("Hi").count(ours.bos_id) == adds_bos


def test_a_rendered_text_encoded_as_a_prompt_has_two(tmp_path):
    """B82: what `encode_chat` is there to avoid, as transformers has it too."""
    ours = make(tmp_path, "{{ bos_token }}{{ messages[0].content }}", adds_bos=True)
    assert ours.encode(ours.render_chat(HI)).count(ours.bos_id) == 2
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.encode("<s>Hi") == ours.encode("<s>Hi")


# Where the template and its tokens come from.


def test_where_the_template_is_found(tmp_path):
    """A file of its own before tokenizer_config.json before chat_template.json."""
    assert make(tmp_path, None).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "three"}')
    assert Tokenizer(tmp_path).chat_template == "three"
    assert make(tmp_path, "two").chat_template == "two"
    (tmp_path / "chat_template.jinja").write_bytes("öne\r\n{{ bos_token }}\n".encode())
    assert Tokenizer(tmp_path).chat_template == "öne\n{{ bos_token }}\n"
    assert Pair(tmp_path).compare(HI) == "öne\n<s>"


NAMED = [
    {"name": "tool_use", "template": "with {{ tools | length }}"},
    {"name": "default", "template": "plain"},
    {"name": "rag", "template": "of {{ documents }}"},
]


def test_named_templates(tmp_path):
    """default, and tool_use where tools are given; others by name."""
    ours = make(tmp_path, NAMED)
    assert ours.chat_template == "plain"
    pair = Pair(tmp_path)
    assert pair.compare(HI) == "plain"
    assert pair.compare(HI, tools=[TOOL]) == "with 1"
    assert pair.compare(HI, tools=[]) == "with 0"
    assert ours.render_chat(HI, template="rag") == "of None"
    assert ours.render_chat(HI, template="default", tools=[TOOL]) == "plain"
    with pytest.raises(RequestError, match=r"'rug': .* expected one of default, rag, tool_use"):
        ours.encode_chat(HI, template="rug")
    without = make(tmp_path, [NAMED[0]])
    assert without.chat_template is None
    with pytest.raises(RequestError, match=r"'default': .* expected one of tool_use"):
        without.render_chat(HI)


def test_named_templates_in_files_of_their_own(tmp_path):
    """They take the place of all that tokenizer_config.json states."""
    write_tokenizer(tmp_path, NAMED)
    (tmp_path / "chat_template.jinja").write_text("own")
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("own with {{ tools | length }}")
    pair = Pair(tmp_path)
    assert (pair.compare(HI), pair.compare(HI, tools=[TOOL])) == ("own", "own with 1")
    with pytest.raises(RequestError, match="expected one of default, tool_use"):
        pair.ours.render_chat(HI, template="rag")


@pytest.mark.parametrize("newer", [True, False])
def test_special_tokens_of_the_older_layout(tmp_path, newer):
    """special_tokens_map.json has the last word, unless tokenizer_config.json lists all tokens."""
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ cls_token is defined }}"
    listed = {"added_tokens_decoder": {"256": {"content": "<s>", "special": True}}}
    write_tokenizer(tmp_path, template, **(listed if newer else {}))
    older = {"eos_token": "<|im_end|>", "pad_token": {"content": "<unk>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    text = "<s></s>False" if newer else "<s><|im_end|><unk>False"
    assert Pair(tmp_path).compare(HI) == text


@pytest.mark.parametrize(
    "stated", [5, {}, [1], [{"name": "default"}], [{"name": 1, "template": ""}], [[]], True]
)
def test_a_template_that_is_no_text_is_named(tmp_path, stated):
    write_tokenizer(tmp_path, stated)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: chat_template: expected a"):
        Tokenizer(tmp_path)


def test_a_template_file_that_is_not_utf8_is_named(tmp_path):
    write_tokenizer(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja: expected text in UTF-8"):
        Tokenizer(tmp_path)


# What is refused, and in which words.


def test_no_template_says_what_would_be_right(tmp_path):
    ours = make(tmp_path, None)
    with pytest.raises(TokenizerError, match=r"no chat template; expected chat_template\.jinja"):
        ours.encode_chat(HI)
    assert ours.encode("Hi") == Tokenizer(tmp_path).encode("Hi")  # the rest of it works


@pytest.mark.parametrize(
    ("template", "line", "words"),
    [
        ("a\nb\n{% if %}", 3, "Expected an expression"),
        ("{{ messages", 1, "unexpected end of template"),
        ("\n{% unheard_of %}", 2, "unknown tag 'unheard_of'"),
        ("\n\n\n{{ 1 | unheard_of }}", 4, "No filter named 'unheard_of'"),
        ("\n{% generation %}x", 2, "Unexpected end of template"),
        ("{% for m in messages %}\n{% endif %}", 2, "unknown tag 'endif'"),
    ],
)
def test_a_template_that_is_no_jinja_says_where(tmp_path, template, line, words):
    ours = make(tmp_path, template)  # a text can still be continued
    with pytest.raises(TokenizerError, match=f"'default', line {line}: .*{words}"):
        ours.render_chat(HI)


def test_a_template_too_deep_to_compile_is_refused(tmp_path):
    ours = make(tmp_path, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(TokenizerError, match="chat template 'default'"):
        ours.render_chat(HI)


DENIED = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ('' | attr('__class__')).__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}",
    "{{ namespace.__init__.__globals__['sys'] }}",
    "{{ self.__init__.__globals__ }}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(messages[0]) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear() }}",
    "{{ tools.append(1) }}",
    "{% do messages.append(1) %}",
]


@pytest.mark.parametrize("template", DENIED)
def test_the_sandbox_is_not_left_and_what_it_holds_is_not_changed(tmp_path, template):
    write_tokenizer(tmp_path, template)
    messages, tools = [turn("user", "Hi")], [dict(TOOL)]
    with pytest.raises(TokenizerError, match=r"no template may do|unknown tag 'do'"):
        Tokenizer(tmp_path).render_chat(messages, tools=tools)
    with pytest.raises((TemplateError, ValueError)):  # theirs refuses it as well
        PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(messages, tools=tools)
    assert (messages, tools) == ([turn("user", "Hi")], [TOOL])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for n in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ unheard_of.x }}", "'unheard_of' is undefined"),
        ("{{ messages[0].unheard_of.x }}", "has no attribute 'unheard_of'"),
        ("{{ messages[9].role }}", "has no element 9|has no attribute 9"),
        ("{{ 'a' + 1 }}", "TypeError: can only concatenate"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'x' %}", "TypeError: no loader"),
        ("{{ strftime_now(5) }}", "TypeError"),
        ("{{ raise_exception('Say please') }}", "refuses these messages: Say please"),
    ],
)
def test_a_template_that_fails_says_why(tmp_path, template, words):
    ours = make(tmp_path, template)
    for _ in range(2):  # and again: a failure leaves nothing behind
        with pytest.raises(RequestError, match=words):
            ours.render_chat(HI)


EXAMPLE = r'expected a list of objects such as \{"role": "user", "content": "Hello"\}'


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", f"messages: {EXAMPLE}, got str"),
        (None, f"messages: {EXAMPLE}, got NoneType"),
        ({"role": "user", "content": "Hi"}, f"messages: {EXAMPLE}, got dict"),
        (iter(HI), f"messages: {EXAMPLE}, got list_iterator"),
        ([], f"messages: there are none; {EXAMPLE}"),
        ([*HI, "Hi"], f"message at position 1: {EXAMPLE}, got str"),
        ([*HI, HI], f"message at position 1: {EXAMPLE}, got list"),
        ([{"content": "Hi"}], f"message at position 0: role None; {EXAMPLE}"),
        ([*HI, turn(5, "Hi")], "message at position 1: role 5; expected"),
        ([*HI, {"role": "user"}], f"message at position 1: it has no content; {EXAMPLE}"),
        ([turn("user", 5)], "message at position 0: content of type int; expected text, or a"),
        ([turn("user", b"Hi")], "message at position 0: content of type bytes; expected text"),
        ([turn("user", [b"Hi"])], "message at position 0: expected plain JSON data, got bytes"),
        ([turn("user", "Hi", when=object())], "position 0: expected plain JSON data, got object"),
    ],
)
def test_messages_that_are_none_are_refused_by_position(pairs, messages, words):
    with pytest.raises(RequestError, match=words):
        pairs["chatml"].ours.render_chat(messages)


def test_messages_that_contain_themselves_are_refused(pairs):
    circle: list = []
    circle.append(circle)
    with pytest.raises(RequestError, match="position 0: nested too deeply"):
        pairs["parts"].ours.render_chat([turn("user", circle)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": "x"}, "tools: expected a list of objects, got str"),
        ({"tools": [TOOL, len]}, "tools: expected an object at position 1, got builtin_function"),
        ({"tools": [{"f": len}]}, "tools at position 0: expected plain JSON data, got builtin"),
        ({"documents": [1]}, "documents: expected an object at position 0, got int"),
        ({"clock": len}, "variable 'clock': expected plain JSON data, got builtin_function"),
    ],
)
def test_what_else_a_template_is_given_is_checked(pairs, options, words):
    with pytest.raises(RequestError, match=words):
        pairs["chatml"].ours.render_chat(HI, **options)


def test_half_a_character_is_refused_when_it_is_encoded(pairs):
    with pytest.raises(RequestError, match="expected whole characters"):
        pairs["chatml"].ours.encode_chat([turn("user", "a\ud83d")])


# What is kept, and what is not.


def test_what_a_template_sees_is_plain(tmp_path):
    """No method of the caller's objects is within its reach, and their kind makes no difference."""

    class Loud(str):
        def shout(self) -> str:
            return "heard"

    class Role(StrEnum):
        USER = "user"

    ours = make(tmp_path, "{{ messages[0].role }}{{ messages[0].content }}{{ x.shout is defined }}")
    message = MappingProxyType({"role": Role.USER, "content": Loud("Hi")})
    assert ours.render_chat((message,), x=Loud("a")) == "userHiFalse"


def test_a_rendering_leaves_nothing_for_the_next(tmp_path):
    template = "{{ seen is defined }}{% set seen = 1 %}{% set ns = namespace(n=0) %}"
    template += "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ours = make(tmp_path, template)
    assert [ours.render_chat(HI * n) for n in (1, 3, 2)] == ["False1", "False3", "False2"]


def test_a_template_is_compiled_once(tmp_path):
    ours = make(tmp_path, "once {{ messages | length }}")
    ours.render_chat(HI)
    before = chat_template._compiled.cache_info()
    assert [ours.render_chat(HI * n) for n in (1, 2)] == ["once 1", "once 2"]
    after = chat_template._compiled.cache_info()
    assert (after.hits, after.misses) == (before.hits + 2, before.misses)


def test_two_tokenizers_with_one_text_have_their_own_tokens(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    texts = []
    for folder, eos in zip(folders, ["</s>", "<|im_end|>"], strict=True):
        folder.mkdir()
        texts.append(make(folder, "{{ eos_token }}", eos_token=eos).render_chat(HI))
    assert texts == ["</s>", "<|im_end|>"]


def test_jinja_is_imported_by_the_first_rendering(tmp_path):
    write_tokenizer(tmp_path, "{{ messages | length }}")
    program = (
        "import sys; from spindle import Tokenizer; t = Tokenizer(sys.argv[1]);"
        "before = 'jinja2' in sys.modules; t.render_chat([{'role': 'user', 'content': ''}]);"
        "print(before, 'jinja2' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "False True\n"


# --- time and memory -----------------------------------------------------------------------------

DOUBLED = "{% set ns = namespace(s='ab', l=[1]) %}{% for n in range(99) %}@{% endfor %}"
LONG_TEXTS = "{% set x = 'a' * 500000 %}{% set y = @ %}"
GREEDY = {
    "three loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "turns left out": "{% for a in range(999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "text in a loop": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "calls of calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "a block in itself": "{% block a %}" + "x" * 99999 + "{% for n in range(99) %}{{ self.a() }}"
    "{% endfor %}{% endblock %}",
    "a long text": "{{ 'x' * 10**10 }}",
    "a long list": "{{ ([1] * 10**10) | length }}",
    "a long number": "{{ 2 ** (10**10) }}",
    "numbers that grow": "{% set ns = namespace(n=9) %}{% for a in range(99) %}"
    "{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "doubled by ~": DOUBLED.replace("@", "{% set ns.s = ns.s ~ ns.s %}"),
    "doubled by +": DOUBLED.replace("@", "{% set ns.s = ns.s + ns.s %}"),
    "doubled by %": DOUBLED.replace("@", "{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "doubled by format": DOUBLED.replace("@", "{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    "doubled by replace": DOUBLED.replace("@", "{% set ns.s = ns.s | replace('a', 'aa') %}"),
    "doubled by join": DOUBLED.replace("@", "{% set ns.s = ns.s.join(ns.s) %}"),
    "doubled by a block": DOUBLED.replace("@", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    "a list in itself, twice": DOUBLED.replace("@", "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
    "a pair of pairs": DOUBLED.replace("@", "{% set ns.l = (ns.l, ns.l) %}"),
    "a dict of dicts": DOUBLED.replace("@", "{% set ns.l = {'a': ns.l, 'b': ns.l} %}"),
    "dict() of dict()": DOUBLED.replace("@", "{% set ns.l = dict(a=ns.l, b=ns.l) %}"),
    "namespaces": DOUBLED.replace("@", "{% set ns.l = namespace(a=ns.l, b=ns.l) %}"),
    "a namespace in itself": DOUBLED.replace("@", "{% set ns.l = ns %}") + "{{ ns }}",
    "batches": DOUBLED.replace("@", "{% set ns.l = ns.l | batch(2, ns.l) | list %}"),
    "slices": "{% set x = 'a' * 1000000 %}{% set ns = namespace(l=[]) %}{% for n in range(99999) %}"
    "{% set ns.l = ns.l + [x[n:]] %}{% endfor %}",
    "a wide field": "{{ '%1000000000d' % 1 }}",
    "a wide field beside": "{{ '%*d' % (1000000000, 1) }}",
    "a wide field of format": "{{ '{:>1000000000}'.format(1) }}",
    "a field in a field": "{{ '{:{}}'.format(1, '1000000000') }}",
    "a wide method": "{{ 'a'.ljust(1000000000) }}",
    "a wide filter": "{{ 'a' | center(1000000000) }}",
    "a filter of filters": "{{ ['a'] | map('center', 1000000000) | list }}",
    "wide lines": "{{ ('\n' * 10000) | indent(100000) }}",
    "wide JSON": "{{ [[1] * 1000] | tojson(indent=1000000) }}",
    "separators": "{{ ([1] * 100000) | tojson(separators=('x' * 10000, ':')) }}",
    "a long join": "{{ range(100000) | join('x' * 10000) }}",
    "a long replacement": "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "a long translation": "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
    "a codec": "{{ ('xn--' ~ 'a' * 400000).encode().decode('idna') }}",  # the square of its length
    "a codec by a filter": "{% set f = ('a' * 9)|attr('encode') %}{{ f('punycode') }}",
    "a codec of marked text": "{{ ('a'|e).encode('idna') }}",
    "marked text": "{{ (('a' * 100000)|e).replace('a', 'b' * 100000) }}",
    "a wide mark": "{{ ('a'|e).center(1000000000) }}",
    "a search from the end": "{% set x = 'a' * 900000 %}{{ x.rfind('a' * 1000 ~ 'b' ~ x) }}",
    "a search from the end, in words": "{{ ('a' * 900000).rsplit(sep='b' ~ 'a' * 100000) }}",
    "a strip of many": "{{ ('b' * 900000).strip('a' * 100000 ~ 'b') }}",
    "a trim of many": "{{ ('b' * 900000)|trim('a' * 100000 ~ 'b') }}",
    "long texts, sorted": LONG_TEXTS.replace("@", "([x] * 9999)|sort|list"),
    "long texts of objects": LONG_TEXTS.replace("@", "([{'c': x}] * 9999)|map(attribute='c')|sort"),
    "long texts, the first": LONG_TEXTS.replace("@", "([x] * 9999)|min"),
    "long texts, each once": LONG_TEXTS.replace("@", "([x] * 9999)|unique|list"),
    "long texts, compared": LONG_TEXTS.replace("@", "[x ~ 'b'] * 9999 == [x ~ 'b'] * 9999"),
    "long texts, looked for": LONG_TEXTS.replace("@", "(x ~ 'b') in [x ~ 'c'] * 9999"),
    "long texts, counted": LONG_TEXTS.replace("@", "([x ~ 'b'] * 9999).count(x ~ 'b')"),
    "long texts by a test": LONG_TEXTS.replace("@", "([x ~ 'b'] * 9999) is eq([x ~ 'b'] * 9999)"),
    "long texts, begun with": LONG_TEXTS.replace("@", "x.startswith((x[1:] ~ 'b',) * 9999)"),
    "numbers of one hash": "{{ range(0, 99999 * (2**61 - 1), 2**61 - 1) | unique | list }}",
    "a large number read": "{{ ('f' * 900000) | int(base=16) }}",
    "tabs": "{{ ('\t' * 10000).expandtabs(100000) }}",
    "a search in a list": "{% set x = range(99999) | list %}{% for a in x %}{% if a in x %}"
    "{% endif %}{% endfor %}",
    "a search by a test": "{{ range(99999) | select('in', range(99999) | list) | list }}",
    "pairs through a macro": "{% macro f(x, n) %}{% if n %}{{ f((x, x), n - 1) }}"
    "{% elif {x: 1} == {x: 1} %}a{% endif %}{% endmacro %}{{ f(1, 60) }}",
    "slices through a macro": "{% macro f(x) %}{{ f(x[1:]) }}{% endmacro %}{{ f('a' * 1000000) }}",
    "doubled through a macro": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}",
    "a view of a dict": "{{ {'a': ['x' * 100000] * 1000}.items() | string }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "a sum of lists": "{{ ([[1]] * 99999) | sum(start=[]) }}",
    "marks and marks": "{{ ('<a>' * 100000) | striptags }}",
    "paragraphs": "{{ lipsum(n=100000) }}",
}


METHODS = {  # what a template may call of Python's types, and what that gives
    "'a-b'.split('-')": "['a', 'b']",
    "'a-b'.rsplit('-', 1)[-1]": "b",
    "' a '.strip() ~ 'xa'.lstrip('x') ~ 'ax'.rstrip('x')": "aaa",
    "'ab'.startswith(('a', 'x')) and 'ab'.endswith('b')": "True",
    "'ab'.replace('a', 'c').upper().lower().title().capitalize().swapcase()": "cB",
    "'ab'.find('b') ~ 'ab'.rfind('b') ~ 'ab'.index('b') ~ 'ab'.count('b')": "1111",
    "'-'.join(['a', 'b']) ~ '{}{x}'.format(1, x=2)": "a-b12",
    "'a=b'.partition('=')[2] ~ 'a=b'.rpartition('=')[0]": "ba",
    "'a'.ljust(3) ~ 'a'.rjust(2) ~ '7'.zfill(3) ~ 'a'.center(3)": "a   a007 a ",
    "'ab'.removeprefix('a') ~ 'ab'.removesuffix('b') ~ 'a\nb'.splitlines()|length": "ba2",
    "'1'.isdigit() ~ 'a'.isalpha() ~ ' '.isspace() ~ 'A'.isupper() ~ '\t'.expandtabs(1)": "TrueTrue"
    "TrueTrue ",
    "{'a': 1}.items()|list ~ {'a': 1}.get('b', 2) ~ {'a': 1}.keys()|list": "[('a', 1)]2['a']",
    "[1, 2, 1].count(1) ~ [1, 2].index(2) ~ (1, 2).index(1) ~ (2.0).is_integer()": "210True",
    "('<'|e).replace('&', '') ~ ('a'|e).upper()": "lt;A",
}


@pytest.mark.parametrize("expression", METHODS)
def test_a_template_may_call_what_templates_call(tmp_path, expression):
    assert make(tmp_path, f"{{{{ {expression} }}}}").render_chat(HI) == METHODS[expression]


@pytest.mark.parametrize("name", GREEDY)
def test_no_template_takes_more_than_its_share(tmp_path, name):
    """A refusal by name, soon, and before much memory is taken."""
    ours = make(tmp_path, GREEDY[name])
    with pytest.raises(TokenizerError, match="'default': it asks for what no template may do"):
        ours.render_chat(HI)
    assert make(tmp_path, "{{ messages | length }}").render_chat(HI) == "1"  # nothing is left over


def test_a_template_that_is_slow_in_few_steps_runs_out_of_time(tmp_path, monkeypatch):
    """What a step costs is bounded; what all of them cost on a slow machine, only by the clock."""
    clock = iter(range(10**9))
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    with pytest.raises(TokenizerError, match="what no template may do: more than 10 s"):
        make(tmp_path, "{% for n in range(99999) %}{% endfor %}").render_chat(HI)


def test_what_a_refused_template_held_is_bounded(tmp_path):
    """Here, what makes the most of each kind of value."""
    for name in ("doubled by ~", "doubled by +", "a list in itself, twice", "slices"):
        ours = make(tmp_path, GREEDY[name])
        tracemalloc.start()
        with pytest.raises(TokenizerError):
            ours.render_chat(HI)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 64e6, (name, peak_bytes)


def test_nothing_is_worked_out_when_a_template_is_compiled(tmp_path):
    """`{% autoescape %}` asks for its value at that moment; so did folded constants."""
    for expression in ("9 ** 9 ** 9", "'x' * 10**10", "'x' | center(10**10)", "'%9999999999d' % 1"):
        ours = make(
            tmp_path, f"{{% if messages %}}a{{% else %}}{{{{ {expression} }}}}{{% endif %}}"
        )
        assert ours.render_chat(HI) == "a"
        ours = make(tmp_path, f"{{% autoescape {expression} %}}{{% endautoescape %}}")
        with contextlib.suppress(TokenizerError):
            ours.render_chat(HI)


def test_a_template_of_a_megabyte_is_refused_unread(tmp_path):
    with pytest.raises(TokenizerError, match="it has 1000000 characters; expected at most 262144"):
        make(tmp_path, "x" * 1_000_000).render_chat(HI)


@pytest.mark.parametrize("name", ["llama-3", "qwen3", "mistral", "json"])
def test_a_very_long_conversation_has_its_share(pairs, name):
    """Two million characters in 1,000 turns: the bounds grow with what is given."""
    turns = [turn("user" if n % 2 == 0 else "assistant", f"{n} " * 500) for n in range(999)]
    theirs = pairs[name].theirs.apply_chat_template(turns, tokenize=False)
    same = pairs[name].ours.render_chat(turns, add_generation_prompt=False) == theirs
    assert same and len(theirs) > 1_900_000


def test_the_error_of_a_template_is_short_and_can_be_printed(tmp_path):
    for template in (
        "{{ raise_exception('\x1b[2J' * 1000) }}",
        "{{ messages['a' * 100000].x }}",
        "{% " + "y" * 9999 + " %}",
    ):
        with pytest.raises((RequestError, TokenizerError)) as refusal:
            make(tmp_path, template).render_chat(HI)
        assert len(str(refusal.value)) < 1000 and "\x1b" not in str(refusal.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize(
    "place", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_file_is_neither_waited_for_nor_passed_over(tmp_path, name, place):
    write_tokenizer(tmp_path, "{{ messages }}")
    (tmp_path / name).unlink(missing_ok=True)
    place(tmp_path / name)
    with pytest.raises(TokenizerError, match=f"{name}: expected .* it is (a directory|no file)"):
        Tokenizer(tmp_path)
