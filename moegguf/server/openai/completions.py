"""POST /v1/completions: continues prompts, or fills the gap before a suffix."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moegguf.generate.options import MAX_TOP_LOGPROBS
from moegguf.generate.request import GenerationRequest
from moegguf.models.entry import Details, ModelEntry
from moegguf.server.common import limits
from moegguf.server.common.conversation import answers, read_question, respond
from moegguf.server.common.options import MAX_TOKEN
from moegguf.server.openai.objects import CompletionReply
from moegguf.server.openai.schema import GenerationBody, one_answer
from moegguf.serving.events import Event

DEFAULT_MAX_TOKENS = 16  # OpenAI's


Prompt = str | list[int]


def prompts_of(given: Any) -> list[Prompt]:
    """The prompts from any of their forms: a text, its tokens, or a list of these. Raises ValueError."""
    prompts = given if isinstance(given, list) and given and isinstance(given[0], str | list) else [given]
    if len(prompts) > limits.INPUTS:
        raise ValueError(f"has {len(prompts)} prompts, but at most {limits.INPUTS} are taken; send several requests")
    if not all(isinstance(prompt, str) or _are_tokens(prompt) for prompt in prompts):
        raise ValueError("must be a text, the tokens of one, or a list of texts or tokens")
    return prompts


def _are_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(t) is int and 0 <= t <= MAX_TOKEN for t in prompt)


class CompletionBody(GenerationBody):
    """The body of /v1/completions. A list of prompts gets one choice for each, in their order."""

    prompt: Annotated[list[Prompt], BeforeValidator(prompts_of)]
    suffix: str | None = None
    echo: bool | None = None
    best_of: Annotated[int, AfterValidator(one_answer)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def max_answer_tokens(self) -> int | None:
        """`max_tokens`, with OpenAI's default."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _suffix_follows_text(self) -> CompletionBody:
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise ValueError("suffix needs prompts as text, not as tokens")
        return self

    def generations(self, entry: ModelEntry, known: Details) -> list[GenerationRequest]:
        """A request for each prompt; of the entry's defaults, only the options apply."""
        sampling = self.sampling(entry)
        return [
            GenerationRequest(
                prompt=prompt if isinstance(prompt, str) else "",
                context=() if isinstance(prompt, str) else tuple(prompt),
                suffix=self.suffix or None,
                truncate=bool(self.truncate),
                shift=bool(self.shift),
                n_logprobs=self.logprobs,
                sampling=sampling,
            )
            for prompt in self.prompt
        ]


async def completions(request: Request) -> Response:
    """The completion, whole or streamed."""
    body, entry, generations = await read_question(request, CompletionBody, limits.BODY_BYTES)
    reply = CompletionReply(
        entry.name, entry.digest, logprobs=body.logprobs is not None, n_choices=len(body.prompt), **body.stream_form()
    )
    events = answers(request, body, entry, generations)
    return respond(body, echoed(request, entry, body, reply, events) if body.echo else events, reply)


async def echoed(
    request: Request, entry: ModelEntry, body: CompletionBody, reply: CompletionReply, events: AsyncGenerator[Event]
) -> AsyncGenerator[Event]:
    """The events, after the reply has got the prompts."""
    async with aclosing(events):
        reply.echo(await prompt_texts(request, entry, body))
        async for event in events:
            yield event


async def prompt_texts(request: Request, entry: ModelEntry, body: CompletionBody) -> list[str]:
    """The prompts as text, for `echo`."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    if len(texts) == len(body.prompt):
        return texts
    async with request.app.state.manager.lease(entry.name, body.overrides(), will_answer=False) as lease:
        return [p if isinstance(p, str) else str(await lease.detokenize(p)) for p in body.prompt]


routes = [Route("/v1/completions", completions, methods=["POST"])]
