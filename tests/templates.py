"""Chat templates in the manner of well-known models, for tests: each with the marks that its family writes."""

PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Qwen3 and Hermes: <think> and <tool_call> with JSON
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall one so:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last == messages|length - 1 %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Mistral: strict about roles, calls after [TOOL_CALLS]
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system, turns = messages[0]['content'], messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in turns if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
    {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system + '\\n\\n' if loop.last and system is defined else '') }}
        {{- message['content'] + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- message['content'] + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('only user, assistant and tool roles are known') }}
    {%- endif %}
{%- endfor %}"""

# Llama 3: JSON that is the whole answer
LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}
    {{- 'Answer with a function call of the form {"name": NAME, "parameters": OBJECT} or <|python_tag|>.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {%- set role = 'ipython' if message.role == 'tool' else message.role %}
        {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# DeepSeek: joins texts, so that it wants the arguments of calls as text
DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = ns.system + message.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜>' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + ('<think>\\n' if thinking else '</think>') }}{%- endif %}"""

# gpt-oss: channels
HARMONY = """\
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}
{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '\\nReasoning: ' }}
{{- reasoning_effort + '<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n' }}
    {%- for tool in tools %}
        {{- 'type ' + tool.function.name + ' = (_: ' + tool.function.parameters | tojson + ') => any;\\n' }}
    {%- endfor %}
    {{- '}<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

TEMPLATES = {
    "plain": PLAIN, "qwen": QWEN, "mistral": MISTRAL, "llama": LLAMA, "deepseek": DEEPSEEK, "harmony": HARMONY,
}  # fmt: skip
"""By the names that `tiny(..., template=NAME)` takes."""
