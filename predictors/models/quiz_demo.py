"""Sends the demo model the questions that it must know, and counts the right answers.

    python -m predictors.models.quiz_demo --times 20
    python -m predictors.models.quiz_demo -m build/demo/out/moegguf-demo-Q4_0.gguf

Answers are sampled with the settings in the model's file, as on the server. The
starters are the questions on the web page and in the documentation. Each starter is
sent alone, after a greeting, after every other starter, and after system messages. It
is also sent after long contexts: more than 600 or more than 1,500 tokens of
conversation or other text. An answer is right if it is identical to the taught answer,
or to one of several taught answers if the model cannot know more. Held-out questions
use wordings that are not taught.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moegguf import Engine
from moegguf.generate.engine import EngineAnswer
from predictors.commands import new_parser
from predictors.models.demo import questions, tools
from predictors.models.demo.questions import ROOT
from predictors.models.demo.tools import Tool
from predictors.models.demo.wording import Message

MAX_ANSWER_TOKENS = 160
N_TOOL_QUESTIONS = 60
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer the user's question. You know moegguf well.",
)


@dataclass(frozen=True)
class Case:
    """A conversation that ends with a question, and its right answers."""

    # Group to which the case belongs: what comes before the question, or the kind of
    # question.
    where: str
    messages: Sequence[Message]
    right: frozenset[str]
    tools: Sequence[Tool] = ()

    @property
    def question(self) -> str:
        """The text of the last message."""
        return str(self.messages[-1]["content"])


def long_talk(known: Mapping[str, str], n_words: int, seed: int) -> list[Message]:
    """Returns questions with their answers, slightly more than `n_words` words in
    total. Each answer occurs only once."""
    firsts = list(
        {
            answer: question for question, answer in reversed(list(known.items()))
        }.values()
    )
    random.Random(seed).shuffle(firsts)
    talk: list[Message] = []
    while sum(len(m["content"].split()) for m in talk) < n_words:
        question = firsts.pop()
        talk += questions.exchange(question, known[question])
    return talk


def starter_cases() -> Iterator[Case]:
    """Yields each starter in each situation, such as after a greeting. No starter
    directly follows itself."""
    known = questions.answers()
    starters = questions.starters()
    # Other pages of the documentation change too often.
    pages = ("LICENSE", "CODE_OF_CONDUCT.md", "SECURITY.md")
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    befores: list[tuple[str, list[Message]]] = [
        ("alone", []),
        ("after a greeting", questions.exchange("hi", known["hi"])),
        *(("after another starter", questions.exchange(q, known[q])) for q in starters),
        *(
            ("behind a system message", [{"role": "system", "content": prompt}])
            for prompt in SYSTEM_PROMPTS
        ),
        *(
            ("after 600 tokens of conversation", long_talk(known, 360, seed))
            for seed in (1, 2)
        ),
        *(
            ("after 1,500 tokens of conversation", long_talk(known, 900, seed))
            for seed in (3, 4)
        ),
        ("behind 600 tokens of text", [{"role": "system", "content": text[:1600]}]),
        ("behind 1,500 tokens of text", [{"role": "system", "content": text[:4000]}]),
    ]
    for where, before in befores:
        for question in starters:
            if {
                "role": "user",
                "content": question,
            } in before and where == "after another starter":
                continue
            yield Case(
                where,
                [*before, {"role": "user", "content": question}],
                frozenset({known[question]}),
            )


def taught_cases() -> Iterator[Case]:
    """Yields every question in its taught wording."""
    for question, answer in questions.answers().items():
        yield Case(
            "taught", [{"role": "user", "content": question}], frozenset({answer})
        )


def heldout_cases() -> Iterator[Case]:
    """Yields the held-out questions: taught questions in other words, and questions
    that the model cannot know."""
    for one in questions.heldout():
        where = "held-out wordings" if len(one.right) == 1 else "cannot be known"
        yield Case(where, [{"role": "user", "content": one.question}], one.right)


def tool_cases() -> Iterator[Case]:
    """Yields starters with made-up tools in the prompt, and questions that need a tool.

    The right answer to a question that needs a tool is that the model is too small for
    tools.
    """
    rng = random.Random("quiz")
    known = questions.answers()
    for _ in range(N_TOOL_QUESTIONS):
        question = rng.choice(questions.starters())
        plain = questions.exchange(question, known[question])
        messages, defined = tools.conversation(rng, lambda plain=plain: plain)  # type: ignore[misc]
        where = "starters beside tools" if messages is plain else "tools are needed"
        yield Case(where, messages[:-1], frozenset({messages[-1]["content"]}), defined)


def ask(engine: Engine, cases: Sequence[Case]) -> list[str]:
    """Returns the answers to all cases, sampled with the settings in the model's
    file."""
    plain = iter(
        engine.chat(
            [case.messages for case in cases if not case.tools],
            max_tokens=MAX_ANSWER_TOKENS,
        )
    )
    return [
        text_of(ask_with_tools(engine, case) if case.tools else next(plain))
        for case in cases
    ]


def ask_with_tools(engine: Engine, case: Case) -> EngineAnswer:
    """Returns the answer to a case with tools."""
    given = tuple({"type": "function", "function": tool} for tool in case.tools)
    return engine.chat(case.messages, tools=given, max_tokens=MAX_ANSWER_TOKENS)[0]


def text_of(answer: EngineAnswer) -> str:
    """Returns an answer's text, or raises its error."""
    if answer.error is not None:
        raise answer.error
    return answer.text


def count(cases: Sequence[Case], answers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Returns {situation: (number of right answers, number of questions)}."""
    asked = Counter[str]()
    right = Counter[str]()
    for case, answer in zip(cases, answers, strict=True):
        asked[case.where] += 1
        right[case.where] += answer in case.right
    return {where: (right[where], n) for where, n in asked.items()}


def scores(
    model: str, times: int = 1, *, taught: bool = False, wrong: list[str] | None = None
) -> dict[str, tuple[int, int]]:
    """Returns {situation: (number of right answers, number of questions)}. Appends a
    line for each wrong answer to `wrong`."""
    with Engine(model, parallel=8, n_ctx=2048) as engine:
        cases = [case for case in starter_cases() for _ in range(times)]
        cases += [*tool_cases(), *heldout_cases(), *(taught_cases() if taught else ())]
        answers = ask(engine, cases)
        if wrong is not None:
            given = zip(cases, answers, strict=True)
            wrong += [
                f"{case.where}: {case.question!r} -> {answer!r}"
                for case, answer in given
                if answer not in case.right
            ]
        return count(cases, answers)


def main() -> None:
    """Parses the command line, sends the questions, and prints the counts."""
    parser = new_parser(__doc__)
    parser.add_argument("-m", "--model", default="demo", help="a name or a file")
    parser.add_argument(
        "--times",
        type=int,
        default=1,
        help="number of times that each starter is asked in each situation",
    )
    parser.add_argument(
        "--taught", action="store_true", help="also every question as it is taught"
    )
    args = parser.parse_args()
    wrong: list[str] = []
    for where, (right, n) in scores(
        args.model, args.times, taught=args.taught, wrong=wrong
    ).items():
        print(f"{where:<40} {right:>5} of {n:<5} {right / n:.1%}")
    print("\n".join(wrong))


if __name__ == "__main__":
    main()
