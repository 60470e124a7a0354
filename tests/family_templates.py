"""Short chat templates that show tool calls as those of the families do, with what each of them insists on."""

from __future__ import annotations

from dataclasses import dataclass

_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_LIST = "[" + _EACH + _OBJECT + "{{ ', ' if not loop.last }}{% endfor %}]"
_LINE_FEED = "{{ '\n' if not loop.last }}"
_VALUE = "{{ v if v is string else v | tojson }}"


@dataclass(frozen=True)
class FamilyTemplate:
    """calls: how the calls of message `m` are written; control: the marks that are control tokens; extra: what else the
    template says; parallel: whether it shows more than one call of a message."""

    calls: str
    control: tuple[str, ...] = ()
    extra: str = ""
    parallel: bool = True

    @property
    def source(self) -> str:
        return (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' and m.tool_calls %}" + self.calls + "{% else %}{{ m.content }}{% endif %}"
            "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}" + self.extra
        )


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
FAMILY_TEMPLATES = {
    "qwen3": FamilyTemplate(_EACH + "<tool_call>\n" + _OBJECT + "\n</tool_call>" + _LINE_FEED + "{% endfor %}"),
    "qwen3-coder": FamilyTemplate(
        _EACH + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
        + _VALUE + "\n</parameter>\n{% endfor %}</function>\n</tool_call>" + _LINE_FEED + "{% endfor %}"
    ),
    "glm": FamilyTemplate(
        _EACH + "<tool_call>{{ f.name + '\n' }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>" + _VALUE + "</arg_value>\n{% endfor %}</tool_call>" + _LINE_FEED + "{% endfor %}"
    ),
    "minimax": FamilyTemplate(
        "<minimax:tool_call>\n" + _EACH + '<invoke name="{{ f.name }}">\n'
        '{% for k, v in f.arguments | items %}<parameter name="{{ k }}">' + _VALUE + "</parameter>\n{% endfor %}"
        "</invoke>\n{% endfor %}</minimax:tool_call>"
    ),
    "deepseek-v3": FamilyTemplate(
        "{% if m['content'] is none %}{{ '<｜tool▁calls▁begin｜>' }}" + _EACH + "{{ '\n' if not loop.first }}"
        "{{ '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' + f['name'] }}"
        "{{ '\n```json\n' + f['arguments'] + '\n```' }}"
        "{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}{% else %}lost{% endif %}",
        _DEEPSEEK,
    ),
    "deepseek-v3.1": FamilyTemplate(
        "{{ '<｜tool▁calls▁begin｜>' }}" + _EACH + "{{ '<｜tool▁call▁begin｜>' ~ f.name }}"
        "{{ '<｜tool▁sep｜>' ~ f.arguments }}{{ '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}",
    ),
    "kimi": FamilyTemplate(
        "<|tool_calls_section_begin|>" + _EACH + "<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>"
        "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
        "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
        _KIMI, "{# tool_call_id #}",
    ),
    "mistral": FamilyTemplate(
        "[TOOL_CALLS] [" + _EACH + "{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
        "{{ f | tojson }}{{ ', ' if not loop.last }}{% endfor %}]",
        ("[TOOL_CALLS]",),
    ),
    "mistral-named": FamilyTemplate(
        _EACH + "{% set a = f.arguments %}{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + (a if a is string else a | tojson) }}"
        "{% endfor %}",
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    "granite3": FamilyTemplate("<|tool_call|>" + _LIST, ("<|tool_call|>",)),
    "phi4": FamilyTemplate("<|tool_call|>" + _LIST + "<|/tool_call|>", ("<|tool_call|>", "<|/tool_call|>")),
    "hunyuan": FamilyTemplate("<tool_calls>" + _LIST + "</tool_calls>"),
    "nemotron-h": FamilyTemplate("<TOOLCALL>" + _LIST + "</TOOLCALL>"),
    "lfm2": FamilyTemplate(
        "<|tool_call_start|>[" + _EACH + "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "llama3": FamilyTemplate(
        _EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}', parallel=False
    ),
    "gpt-oss": FamilyTemplate(
        "{% if m.content and m.thinking %}{{ raise_exception('one of both') }}{% endif %}{# message.content and "
        "message.thinking #}{% set f = m.tool_calls[0].function %}{{ '<|channel|>commentary to=functions.' + f.name }}"
        " <|constrain|>json<|message|>{{ f.arguments | tojson }}",
        ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"), parallel=False,
    ),
}  # fmt: skip
