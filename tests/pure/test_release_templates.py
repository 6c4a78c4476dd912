"""Tests the chat templates that the pinned llama.cpp ships.

Each template renders every conversation of CONVERSATIONS. The prompt contains every
text of the messages, and objects as JSON. The tables below list the exceptions.
"""

import re
from typing import Any

import pytest

from moegguf.generate.images import mark_images
from moegguf.generate.request import Message
from moegguf.generate.template import render
from tools import vendor

FOLDER = vendor.VENDOR / "llama.cpp" / "models" / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Text of a tool.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "more": {"type": "object"},
                "days": {"type": "array"},
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {
    "city": "text of an 'argument'",
    "more": {"key": ["text in a list", None, True], "n": 1.5},
    "days": [1, 2],
}
CALL = {"id": "call00001", "function": {"name": "weather", "arguments": ARGUMENTS}}
SYSTEM = {"role": "system", "content": "text of the system"}
QUESTION = {"role": "user", "content": "text of a user"}
ANSWER = {"role": "assistant", "content": "text of an answer"}
RESULT = {
    "role": "tool",
    "content": "text of a result",
    "tool_call_id": "call00001",
    "tool_name": "weather",
}
LAST = {"role": "user", "content": "text of another question"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CONVERSATIONS: dict[str, tuple[list[Message], list[dict[str, Any]]]] = {
    "plain": ([SYSTEM, QUESTION], []),
    "turns": ([SYSTEM, QUESTION, ANSWER, LAST], []),
    "tools": ([SYSTEM, QUESTION], [TOOL]),
    "results": ([SYSTEM, QUESTION, CALLING, RESULT], [TOOL]),
    "turns with calls": ([SYSTEM, QUESTION, CALLING, RESULT, ANSWER, LAST], [TOOL]),
    "no system": ([QUESTION, CALLING, RESULT, ANSWER, LAST], [TOOL]),
    "text beside a call": (
        [
            SYSTEM,
            QUESTION,
            {**CALLING, "content": "text beside a call"},
            RESULT,
            ANSWER,
        ],
        [TOOL],
    ),
}

WITHOUT_TOOLS = {  # templates with no place for tool descriptions
    "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1", "google-gemma-2-2b-it", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
WITHOUT_CALLS = {  # templates that leave out the calls of earlier answers
    "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct", "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct", "llama-cpp-rwkv-world", "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
# Templates that write either the text of a message or its calls.
EITHER_TEXT_OR_CALLS = {
    "Cohere2MoE", "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "MiniMax-M1", "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "llama-cpp-deepseek-r1", "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "mistralai-Mistral-Nemo-Instruct-2407",
    "muse-glimmer", "openai-gpt-oss-120b", "upstage-Solar-Open-100B",
}  # fmt: skip
# Templates that write the system message only if the last message is the user's.
SYSTEM_WITH_LAST_QUESTION = {"mistralai-Mistral-Nemo-Instruct-2407"}
# Templates that write tools as Python's repr, not as JSON.
PYTHON_TOOLS = {"Apriel-1.6-15b-Thinker-fixed", "unsloth-Apriel-1.5"}


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def expected_texts(
    name: str, messages: list[Message], tools: list[dict[str, Any]]
) -> set[str]:
    """Returns the texts that the prompt of this template must contain."""
    texts = {message["content"] for message in messages if message["content"]}
    has_calls = any("tool_calls" in message for message in messages)
    if tools and name not in WITHOUT_TOOLS:
        texts.add("Text of a tool.")
    if has_calls and name not in WITHOUT_CALLS:
        texts |= {"text of an", "text in a list"}
    if name in EITHER_TEXT_OR_CALLS and "text beside a call" in texts:
        texts -= {"text beside a call", "text of an", "text in a list"}
    if name in SYSTEM_WITH_LAST_QUESTION and messages[-1]["role"] != "user":
        texts -= {SYSTEM["content"]}
    return texts


def test_pinned_release_has_at_least_66_templates() -> None:
    assert len(NAMES) >= 66


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_pinned_template_keeps_every_text_of_a_conversation(
    name: str, kind: str
) -> None:
    messages, tools = CONVERSATIONS[kind]
    prompt = render(template(name), messages, tools=tools, bos="<s>", eos="</s>")
    assert {
        text for text in expected_texts(name, messages, tools) if text not in prompt
    } == set()
    if name not in PYTHON_TOOLS:
        assert not re.search(r"\{'|\['|': ", prompt), "objects are JSON"
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
    assert (
        render(
            template(name),
            mark_images(parts).messages,
            tools=tools,
            bos="<s>",
            eos="</s>",
        )
        == prompt
    )


@pytest.mark.parametrize("name", NAMES)
def test_pinned_template_renders_arguments_as_object_or_text_equally(name: str) -> None:
    as_text = {
        **CALL,
        "function": {
            "name": "weather",
            "arguments": '{"city": "text of an \'argument\'"}',
        },
    }
    as_object = {
        **CALL,
        "function": {"name": "weather", "arguments": {"city": "text of an 'argument'"}},
    }
    prompts = {
        render(
            template(name),
            [QUESTION, {**CALLING, "tool_calls": [call]}, RESULT],
            tools=[TOOL],
        )
        for call in (as_text, as_object)
    }
    assert len(prompts) == 1


SWITCHES = {  # the end of the prompt with think=None, True and False
    "Qwen-Qwen3-0.6B": ("assistant\n", "assistant\n", "<think>\n\n</think>\n\n"),
    "deepseek-ai-DeepSeek-V3.1": ("<think>", "<think>", "</think>"),
    "google-gemma-4-31B-it": (
        "<|turn>model\n",
        "<|turn>model\n",
        "<|channel>thought\n<channel|>",
    ),
    "MiniMax-M3": ("]~b]ai\n", "<mm:think>", "</mm:think>"),
    "ByteDance-Seed-OSS": ("assistant\n", "assistant\n", "</seed:think>"),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_think_option_sets_the_end_of_the_prompt(name: str) -> None:
    prompts = [
        render(template(name), [QUESTION], think=think) for think in (None, True, False)
    ]
    assert [
        prompt[-len(end) :] for prompt, end in zip(prompts, SWITCHES[name], strict=True)
    ] == [*SWITCHES[name]]
