"""An answer that follows a JSON schema.

Prints a Python object with the fields of the schema. The sampler obeys the schema, so
any model's answer has this form. The demo model is too small to fill in sensible
values.
"""

import json

from moegguf import Engine

SCHEMA = {
    "type": "object",
    "properties": {
        "part": {"enum": ["expert", "router", "cache"]},
        "description": {"type": "string", "maxLength": 40},
        "layers": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["part", "description", "layers"],
}


def main() -> None:
    messages = [{"role": "user", "content": "What is an expert?"}]
    with Engine("demo", parallel=1, expert_cache="50%", n_ctx=512) as engine:
        (answer,) = engine.chat(
            messages, format=SCHEMA, strict=True, temperature=0, max_tokens=200
        )
    found = json.loads(answer.text)
    print(found)
    print(f"fields: {', '.join(found)}")


if __name__ == "__main__":
    main()
