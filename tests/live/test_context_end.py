"""At the end of the context: prompts that are too long are cut, and answers go on after a shift."""

import pytest
from answering import DEMO, QUESTION, Answer, Load, TinyModel, ask, ends_of, reply
from running import random_prompt

from moegguf.engine.llama import Llama
from moegguf.generate import answer as answers
from moegguf.generate.prompt import n_after_shift
from moegguf.generate.request import GenerationRequest


def text_of_prompt(llm: Llama, one: Answer) -> str:
    return llm.detokenize(one.prompt.tokens, special=True).decode()


def test_a_single_message_that_is_too_long_loses_its_beginning(demo: Llama) -> None:
    words = " ".join(f"w{i}" for i in range(900))
    request = GenerationRequest(
        messages=({"role": "system", "content": "Be kind."}, {"role": "user", "content": words})
    )
    one = Answer(demo, request)
    prompt = text_of_prompt(demo, one)
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")
    assert prompt.endswith(" w898 w899<|im_end|>\n<|im_start|>assistant\n")
    assert 200 < len(one.prompt.tokens) <= n_after_shift(512, 30)
    whole = len(demo.tokenize(words.encode()))
    assert one.prompt.cut_messages == 0
    assert one.prompt.cut_tokens == pytest.approx(whole - len(one.prompt.tokens), abs=30)


def test_the_question_stays_when_a_tool_result_is_too_long(demo: Llama) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {}}}
    messages = (
        {"role": "user", "content": "What is in the file?"},
        {"role": "assistant", "content": "I read it.", "tool_calls": [call]},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "word " * 3000},
    )
    prompt = text_of_prompt(demo, Answer(demo, GenerationRequest(messages=messages)))
    assert "Go on." in prompt and prompt.count("word") > 100 and "What is" not in prompt


def test_a_plain_prompt_keeps_its_first_tokens_and_its_end(demo: Llama) -> None:
    tokens = demo.tokenize(b"one two three four five six " * 300, add_bos=False)
    one = Answer(demo, ask(prompt="one two three four five six " * 300, num_keep=7))
    n_first = 7 + len(demo.vocabulary.bos_tokens)
    kept = one.prompt.tokens
    assert len(kept) == n_after_shift(512, n_first)
    assert kept[n_first:] == tokens[-(len(kept) - n_first) :]
    assert one.prompt.cut_tokens == len(tokens) + len(demo.vocabulary.bos_tokens) - len(kept)


def test_a_chat_goes_on_after_its_context_was_full_and_reuses_what_stays(demo: Llama) -> None:
    turns, cached = list[str](), list[int]()
    for i in range(14):
        turns.append(f"Question number {i}: " + "tell me more " * 12)
        text, timing = reply(demo, *turns, max_tokens=20)
        turns.append(text)
        cached.append(timing.cached_tokens)
    assert timing.cut_messages > 0
    in_full_context = cached[8:]
    assert sum(n > 60 for n in in_full_context) >= len(in_full_context) // 2, cached


def endless(llm: Llama) -> dict[int, float]:
    return dict.fromkeys(ends_of(llm), -1000.0)


@pytest.mark.parametrize(("n_keep", "n_shifts"), [(4, 1), (-1, 1)])
def test_an_answer_goes_on_in_a_full_context(demo: Llama, n_keep: int, n_shifts: int) -> None:
    text, timing = reply(demo, QUESTION, max_tokens=560, num_keep=n_keep, logit_bias=endless(demo))
    assert (timing.answer_tokens, timing.finish, timing.n_shifts) == (560, "length", n_shifts)
    first, n_first = demo.input_ids[: demo.n_tokens].tolist(), 20 if n_keep < 0 else n_keep
    assert first == Answer(demo, ask(QUESTION)).prompt.tokens[:n_first], "only these are as if nothing had shifted"
    assert text.startswith(reply(demo, QUESTION, max_tokens=20)[0])


def test_what_stays_after_a_shift_is_computed_again_before_it_is_continued(demo: Llama) -> None:
    def continued(tokens: list[int]) -> str:
        text: str = demo.create_completion(tokens, max_tokens=6, temperature=0)["choices"][0]["text"]
        return text

    reply(demo, QUESTION, max_tokens=560, logit_bias=endless(demo))
    first = demo.input_ids[: demo.n_tokens].tolist()
    after_shift = continued(first)
    demo.reset()
    assert after_shift == continued(first)


def test_without_a_shift_the_answer_ends_with_the_context(demo: Llama) -> None:
    _, timing = reply(demo, QUESTION, logit_bias=endless(demo), shift=False)
    assert (timing.prompt_tokens + timing.answer_tokens, timing.finish, timing.n_shifts) == (512, "length", 0)


def test_an_answer_without_end_has_one(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_CONTEXTS", 2)
    llm = load(DEMO, n_ctx=256, logits_all=False)
    _, timing = reply(llm, QUESTION, logit_bias=endless(llm))
    assert (timing.answer_tokens, timing.finish) == (512, "length")


@pytest.mark.parametrize("preset", ["tiny-qwen2moe", "tiny-deepseek2"])
def test_a_shift_and_the_expert_cache_do_not_disturb_each_other(preset: str, tiny: TinyModel, load: Load) -> None:
    contexts = []
    for share in ("30%", "100%"):
        llm = load(tiny(preset), expert_cache=share, n_ctx=256, n_ubatch=1, logits_all=False)
        prompt = tuple(random_prompt(llm, 60))
        request = ask(prompt="", context=prompt, max_tokens=300, return_context=True, logit_bias=endless(llm))
        one = Answer(llm, request)
        one.deltas()
        assert one.timing.n_shifts == 1
        assert (llm.stats().evictions > 0) == (share == "30%")
        contexts.append(one.timing.context)
    assert contexts[0] == contexts[1]
    assert len(contexts[0]) == 360


def test_a_recurrent_model_cannot_shift_and_ends(demo: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_is_hybrid", True)
    assert not demo.context.can_shift
    _, timing = reply(demo, QUESTION, logit_bias=endless(demo))
    assert (timing.finish, timing.n_shifts) == ("length", 0)


def test_the_assistants_last_message_is_continued(demo: Llama, whole: str) -> None:
    begin = whole[: whole.index(" that")]
    text, timing = reply(demo, QUESTION, begin)
    assert begin + text == whole
    assert timing.finish == "stop"
    other, _ = reply(demo, QUESTION, begin, continue_final_message=False)
    assert begin + other != whole


def test_a_continued_format_is_completed(demo: Llama) -> None:
    form = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
    text, timing = reply(demo, QUESTION, '{"name": "ä', format=form)
    assert timing.finish == "stop" and len(text) < 12 and text.rstrip().endswith("}") and "{" not in text
