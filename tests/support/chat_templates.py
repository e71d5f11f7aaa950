"""Chat templates in the forms of published models, over a tokenizer of bytes with their marks.

Marks, the order of parts and what is kept of earlier turns are those of the models' templates on the Hugging Face hub;
the sentences about tools are this project's, except Qwen3's, which come from the renderers library.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_QWEN = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- HEADER }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- FOOTER + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
{%- if not ns.found and m.role == 'user' %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{%- set ns.found = true %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set think = '' %}{%- set content = m.content or '' %}
{%- if '</think>' in content %}
{%- set think = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or think) %}{{- '<think>\\n' + think + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

DEEPSEEK = """\
{%- set ns = namespace(tool=false) %}
{{- '<｜begin▁of▁sentence｜>' }}
{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}
{%- for tool in tools or [] %}{{- '\\nTool: ' + (tool | tojson) }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.tool = false %}{{- '<｜User｜>' + m.content }}{%- endif %}
{%- if m.role == 'assistant' %}
{%- if not ns.tool %}{{- '<｜Assistant｜>' }}{%- endif %}{%- set ns.tool = false %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + (call.function.arguments | tojson) }}
{{- '<｜tool▁call▁end｜>' }}
{%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
{%- endfor %}
{{- '<｜end▁of▁sentence｜>' }}
{%- endif %}
{%- if m.role == 'tool' %}{%- set ns.tool = true %}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' }}{%- endif %}"""
# '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' teaches the form

GLM = """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
{%- elif m.role == 'system' %}{{- '<|system|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set think = '' %}{%- set content = m.content or '' %}
{%- if '</think>' in content %}
{%- set think = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].strip('\\n') %}
{%- endif %}
{{- '<|assistant|>\\n<think>' + (think if loop.index0 > ns.last else '') + '</think>' }}
{%- if content %}{{- '\\n' + content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for tool in tools or [] %}{{- 'Tool: ' + (tool | tojson) + '\\n' }}{%- endfor %}
{%- for m in messages %}
{%- if m.tool_calls %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name }}
{{- '", "parameters": ' + (m.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

DROPS = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '').split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

MOVES = """\
{%- for m in messages %}
{%- if loop.last or (loop.index0 == messages | length - 2) %}{{- '[TOOLS]' }}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool.function.name + ' ' + (tool.function.parameters | tojson) + '\\n' }}{%- endfor %}
{{- '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

MARKS = {
    "tools": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "drops": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "moves": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "deepseek": tuple(
        f"<｜{name}｜>"
        for name in (
            *("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end"),
            *("tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁output▁begin", "tool▁output▁end"),
        )
    ),
    "glm": ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "llama": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
}
# added, but not special: a decoder that skips special tokens keeps them
PLAIN_MARKS = {
    "tools": ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    "qwen3": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "drops": ("<think>", "</think>"),
    "glm": ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
}
PLAIN_MARKS["glm"] += ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
ENDS = {
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "llama": ("<|eot_id|>",),
}
END = ("<|im_end|>",)


def qwen3() -> str:
    """With the sentences of the library, so that both write the same."""
    from renderers.qwen3 import _TOOLS_FOOTER, _TOOLS_HEADER

    def quoted(text: str) -> str:
        return '"' + text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'

    return _QWEN.replace("HEADER", quoted(_TOOLS_HEADER)).replace("FOOTER", quoted(_TOOLS_FOOTER))


def template(name: str) -> str:
    known = {
        "chatml": CHATML,
        "deepseek": DEEPSEEK,
        "glm": GLM,
        "llama": LLAMA,
        "drops": DROPS,
        "moves": MOVES,
        "tools": TOOLS,
    }
    return qwen3() if name == "qwen3" else known[name]


@cache
def tokenizer(name: str) -> Any:
    """A byte a token, the marks of the model, and its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS[name]])
    plain.add_tokens([AddedToken(mark) for mark in PLAIN_MARKS.get(name, ())])
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=ends(name)[0])
    made.chat_template = template(name)
    return made


def ends(name: str) -> tuple[str, ...]:
    return ENDS.get(name, END)


def end_ids(name: str) -> tuple[int, ...]:
    return tuple(tokenizer(name).convert_tokens_to_ids(mark) for mark in ends(name))
