"""Chat templates in the manner of well-known models, for tests: each with the marks that its family writes. The files
are in `chat_templates/`.

PLAIN has no tools. QWEN, of Qwen3 and Hermes: <think>, and <tool_call> with JSON. MISTRAL: strict about roles, calls
after [TOOL_CALLS]. LLAMA, of Llama 3: a call is JSON that is the whole answer. DEEPSEEK joins texts, so that it wants
the arguments of calls as text. HARMONY, of gpt-oss: channels.
"""

from pathlib import Path

FOLDER = Path(__file__).with_name("chat_templates")
TEMPLATES = {path.stem: path.read_text(encoding="utf-8").removesuffix("\n") for path in sorted(FOLDER.iterdir())}
"""By the names that `tiny(..., template=NAME)` takes."""

PLAIN, QWEN, MISTRAL = TEMPLATES["plain"], TEMPLATES["qwen"], TEMPLATES["mistral"]
LLAMA, DEEPSEEK, HARMONY = TEMPLATES["llama"], TEMPLATES["deepseek"], TEMPLATES["harmony"]
