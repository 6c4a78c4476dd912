"""Chat templates for tests. Each uses the delimiters of a well-known family of models.

The files are in `chat_templates/`:

- PLAIN has no tools.
- QWEN is like Qwen3 and Hermes: it has <think>, and <tool_call> with JSON.
- MISTRAL refuses an unexpected order of roles, and writes calls after [TOOL_CALLS].
- LLAMA is like Llama 3: a call is JSON that is the whole answer.
- DEEPSEEK joins texts, so it needs the arguments of calls as text.
- HARMONY is like gpt-oss: it has channels.
"""

from pathlib import Path

FOLDER = Path(__file__).with_name("chat_templates")
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8").removesuffix("\n")
    for path in sorted(FOLDER.iterdir())
}
"""{the name that `tiny(..., template=NAME)` takes: the text of the template}."""

PLAIN, QWEN, MISTRAL = TEMPLATES["plain"], TEMPLATES["qwen"], TEMPLATES["mistral"]
LLAMA, DEEPSEEK, HARMONY = (
    TEMPLATES["llama"],
    TEMPLATES["deepseek"],
    TEMPLATES["harmony"],
)
