"""Chat templates with the structure of families of models, and tokenizers that have them."""

from __future__ import annotations

from tlt_jax import make_tiny_model

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
_CHATML_TOOLS = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif default %}
{{- '<|im_start|>system\\n' + default + '<|im_end|>\\n' }}
{%- endif %}
"""
# Results of tools that follow each other share one turn of the user.
_RESULTS = """
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>ROLE' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
"""
_ASKS = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
_OTHERS = """
{%- for message in messages %}
{%- if message.role in ('user', 'assistant') or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
"""
QWEN25 = (
    "{%- set default = 'You help.' %}" + _CHATML_TOOLS + _OTHERS + _RESULTS.replace("ROLE", "user") + _ASKS
)  # fmt: skip
HERMES = "{{- bos_token }}" + _CHATML_TOOLS + _OTHERS + _RESULTS.replace("ROLE", "tool") + _ASKS
# Thoughts before the last message of the user are dropped.
QWEN3 = (
    _CHATML_TOOLS
    + """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
{{- content + '<|im_end|>\\n' }}
"""
    + _RESULTS.replace("ROLE", "user")
    + _ASKS
    + "{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
QWEN3_KEPT = QWEN3.replace("loop.index0 > ns.last and (loop.last or thought)", "thought")
LLAMA31 = """
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nDate: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nCall: {"name": NAME, "parameters": OBJECT}.\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
{{- (messages[0].content | trim) + '<|eot_id|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
_GEMMA = """
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if loop.first %}{{- first }}{% endif %}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""
GEMMA2 = (
    "{{- bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{{- raise_exception('System role not supported') }}{% endif %}" + _GEMMA
)
GEMMA3 = (
    "{{- bos_token }}{% set first = '' %}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}"
    + _GEMMA
)
# The tools stand before the last message of the user, and a result needs the id of its call.
MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is not defined) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, roles must alternate') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('Only user, assistant and tool') }}
{%- endif %}
{%- endfor %}
{#- A call is written [TOOL_CALLS] [{...}] #}
"""
SMOLLM2 = (
    "{%- for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are small<|im_end|>\\n' }}{% endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    + _ASKS
)
PLAIN = (  # no token ends an answer
    "{%- for message in messages %}"
    "{{- ('User: ' if message.role == 'user' else 'Bot: ') + message.content + '\\n\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- 'Bot: ' }}{% endif %}"
)
_HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"]
_INST = [
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
]  # fmt: skip
FAMILIES = {  # name -> template, token at the start, EOS, other special tokens
    "own": (make_tiny_model.CHAT_TEMPLATE, None, "<|im_end|>", []),
    "qwen2.5": (QWEN25, None, "<|im_end|>", []),
    "qwen3": (QWEN3, None, "<|im_end|>", []),
    "hermes": (HERMES, "<|begin_of_text|>", "<|im_end|>", []),
    "smollm2": (SMOLLM2, "<|im_start|>", "<|im_end|>", []),
    "llama3.1": (LLAMA31, "<|begin_of_text|>", "<|eot_id|>", _HEADERS),
    "gemma2": (GEMMA2, "<bos>", "<end_of_turn>", ["<start_of_turn>"]),
    "gemma3": (GEMMA3, "<bos>", "<end_of_turn>", ["<start_of_turn>"]),
    "mistral": (MISTRAL, "<s>", "</s>", _INST),
    "plain": (PLAIN, None, "<|im_end|>", []),
}
TEXTS = ["You add numbers. The user asks what two and three are; add them, and answer: 5.\n\n"] * 20


def tokenizer_of(family: str):
    """A byte-level tokenizer with the template and the special tokens of the family."""
    template, start, end, others = FAMILIES[family]
    tokenizer = make_tiny_model.train_tokenizer(TEXTS, 320)
    special = ["<|im_start|>", "<|im_end|>", *others]
    tokenizer.add_special_tokens({"eos_token": end, "extra_special_tokens": special})
    if start:
        tokenizer.add_special_tokens({"bos_token": start})
    tokenizer.chat_template = template
    return tokenizer
