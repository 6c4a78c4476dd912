"""A tool that the model calls and this program runs.

Prints the call, the tool's result, and the answer that the model bases on this result.
The demo model is too small to choose a tool or a city. `tool_choice="required"`
therefore forces it to make a call.
"""

import json

from moegguf import Engine

TOOL = {
    "type": "function",
    "function": {
        "name": "temperature_in",
        "description": "Returns the temperature in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
            "required": ["city"],
        },
    },
}
DEGREES = {"Oslo": 4, "Paris": 12}


def main() -> None:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "How warm is it in Oslo?"}
    ]
    with Engine("demo", parallel=1, expert_cache="50%", n_ctx=1024) as engine:
        (asked,) = engine.chat(
            messages,
            tools=(TOOL,),
            tool_choice="required",
            temperature=0,
            max_tokens=200,
        )
        (call,) = asked.tool_calls
        result = json.dumps({"degrees": DEGREES[call.arguments["city"]]})
        print(f"{call.name}({dict(call.arguments)}) -> {result}")
        function = {"name": call.name, "arguments": dict(call.arguments)}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call.id, "function": function}],
            }
        )
        messages.append(
            {
                "role": "tool",
                "tool_name": call.name,
                "tool_call_id": call.id,
                "content": result,
            }
        )
        (answer,) = engine.chat(messages, tools=(TOOL,), temperature=0, max_tokens=60)
    print(f"answer: {answer.text}")


if __name__ == "__main__":
    main()
