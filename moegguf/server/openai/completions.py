"""POST /v1/completions: continues a prompt, or fills the gap before a suffix."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.generate.options import MAX_TOP_LOGPROBS
from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import ModelEntry
from moegguf.server.common.body import read_body
from moegguf.server.common.lookup import check_capabilities, look_up
from moegguf.server.common.options import MAX_TOKEN
from moegguf.server.openai.answers import respond
from moegguf.server.openai.objects import CompletionReply
from moegguf.server.openai.schema import GenerationBody, one_answer

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def one_prompt(prompt: Any) -> str | list[int]:
    """The prompt from any of its forms: a text, its tokens, or a list with one of these. Raises ValueError."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token <= MAX_TOKEN for token in prompt):
        return prompt
    raise ValueError("must be one text, or the tokens of one; send one request per prompt")


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[str | list[int], BeforeValidator(one_prompt)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, AfterValidator(one_answer)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def max_answer_tokens(self) -> int | None:
        """`max_tokens`, with OpenAI's default."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def generation(self, entry: ModelEntry) -> GenerationRequest:
        """The request; of the entry's defaults, only the options apply."""
        text, tokens = (self.prompt, ()) if isinstance(self.prompt, str) else ("", tuple(self.prompt))
        return GenerationRequest(
            prompt=text,
            context=tokens,
            suffix=self.suffix or None,
            truncate=bool(self.truncate),
            shift=bool(self.shift),
            n_logprobs=self.logprobs,
            sampling=self.sampling(entry),
        )


async def completions(request: Request) -> Response:
    """The completion, whole or streamed."""
    body = await read_body(request, CompletionBody)
    entry, known = await look_up(request.app.state.catalog, body.model)
    check_capabilities(entry, known, {"generate": True, "insert": bool(body.suffix)})
    reply = CompletionReply(
        entry.name,
        entry.digest,
        include_usage=body.include_usage,
        logprobs=body.logprobs is not None,
        echo=await prompt_text(request, entry, body) if body.echo else "",
    )
    return respond(request, body, entry, body.generation(entry), reply)


async def prompt_text(request: Request, entry: ModelEntry, body: CompletionBody) -> str:
    """The prompt as text, for `echo`."""
    if isinstance(body.prompt, str):
        return body.prompt
    async with request.app.state.manager.lease(entry.name, body.overrides(), will_answer=False) as lease:
        return str(await lease.detokenize(body.prompt))


routes = [Route("/v1/completions", completions, methods=["POST"])]
