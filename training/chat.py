"""The chat format: a Jinja template for servers, and the same format in plain Python for training.

ChatML with the tool conventions of Qwen. Two writers exist because training has to know which part
of the text the assistant wrote; a test holds them equal. The template needs a `tojson` filter that
is plain `json.dumps(value, ensure_ascii=False)`, as Hugging Face defines it: the filter that Jinja
ships escapes `<` and `>`.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from training.samples import Message, Sample, Tool

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"

_TOOLS_INTRO = "# Tools\nYou may call these functions:\n<tools>"
_TOOLS_OUTRO = (
    "</tools>\nTo call one, answer with its name and arguments:\n"
    '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
)

CHAT_TEMPLATE = (
    """\
{%- macro text(content) -%}
{%- if content is none or content is undefined -%}
{%- elif content is string -%}{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set lead = text(messages[0].content) if messages and messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if lead -%}{{- lead + '\\n\\n' -}}{%- endif -%}
{{- INTRO -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n' + OUTRO + '<|im_end|>\\n' -}}
{%- elif lead -%}
{{- '<|im_start|>system\\n' + lead + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' -}}{{- text(message.content) -}}{{- '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}{{- text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function if call.function is defined else call -%}
{%- if not loop.first or text(message.content) -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": ' -}}{{- call.name | tojson -}}{{- ', "arguments": ' -}}
{%- if call.arguments is string -%}{{- call.arguments -}}
{%- else -%}{{- call.arguments | tojson -}}
{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' -}}{{- text(message.content) -}}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".replace("INTRO", repr(_TOOLS_INTRO))
    .replace("OUTRO", repr(_TOOLS_OUTRO))
    .replace("\n{", "{")
    .rstrip("\n")
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a rendered chat; `is_target` when the assistant has to learn to write it."""

    text: str
    is_target: bool


def to_json(value: Any) -> str:
    """Return `value` as the template's `tojson` filter writes it."""
    return json.dumps(value, ensure_ascii=False)


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """Return the text the assistant writes to call a tool."""
    return f"{CALL_START}\n{to_json({'name': name, 'arguments': arguments})}\n{CALL_END}"


def system_text(system: str, tools: Sequence[Tool]) -> str:
    """Return the content of the system turn, empty when there is none."""
    if not tools:
        return system
    lines = [_TOOLS_INTRO, *(to_json(tool) for tool in tools), _TOOLS_OUTRO]
    return (f"{system}\n\n" if system else "") + "\n".join(lines)


def segments(system: str, samples: Sequence[Sample]) -> Iterator[Segment]:
    """Yield a chat in which `samples` are asked and answered one after the other.

    The last segment is the answer to the last sample. Answers before it are targets as well.
    """
    tools = tuple(tool for sample in samples for tool in sample.tools)
    lead = system_text(system, tools)
    pending = f"{TURN_START}system\n{lead}{TURN_END}\n" if lead else ""
    for sample in samples:
        pending += "".join(_turn(message) for message in sample.messages)
        yield Segment(f"{pending}{TURN_START}assistant\n", is_target=False)
        yield Segment(f"{sample.answer}{TURN_END}", is_target=True)
        pending = "\n"


def prompt(system: str, samples: Sequence[Sample]) -> str:
    """Return the text that asks for the answer to the last of `samples`."""
    return "".join(segment.text for segment in segments(system, samples))[
        : -len(samples[-1].answer + TURN_END)
    ]


def _turn(message: Message) -> str:
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        role, content = "user", f"{RESPONSE_START}\n{content}\n{RESPONSE_END}"
    for call in message.get("tool_calls", ()):
        function = call["function"]
        content += tool_call(function["name"], json.loads(function["arguments"]))
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"
