"""The claims of four papers, and this project's verdicts on them: the first table of docs/evidence.md.

A verdict is derived from recorded figures (`predictors/study/figures.py`). A claim about a gain holds if at least half
of the claimed gain is reached. If the paper does not state the size of a gain, any gain is enough. A claim about
something else has a bound of its own. The bound is another recorded figure, a limit that the paper states, or a limit
that this project has set. For example, a paper states 50 requests for the recovery after a shift. This project has set
0.95 for the evenness of use, and 0.98 for the speed with a smaller collection.

A figure that is measured on several requests has an interval. A claim holds if the whole interval is at or above the
bound, and fails if the whole interval is below. Otherwise the claim is undecided. A claim that needs a GPU or other
programs cannot be judged. Confidence is medium if the simulator uses the paper's times, base and batches, and low
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from predictors.study.figures import NotCountedError, estimate_of, steps_of, text_of

HOLDS, FAILS, UNDECIDED, UNTESTED, OPEN = "holds", "fails", "undecided", "not tested", "cannot be judged"
VERDICTS = (HOLDS, FAILS, UNDECIDED, UNTESTED, OPEN)
ANY = 1.0  # bound of a claim for which any gain is enough: the base's speed
Condition = tuple[str, float | str]


def half(claimed: float, without: float = 1.0) -> float:
    """Returns the bound of a claim: the mean of `claimed` and `without`, the value without the claimed method."""
    return without + (claimed - without) / 2


@dataclass(frozen=True)
class Claim:
    """A paper's headline claim with its place in the paper, and the figures that decide it."""

    paper: str
    text: str
    judged: str | tuple[Condition, ...]  # UNTESTED, OPEN, or conditions: (question, bound or question for the bound)
    figure: str  # text; `text_of` replaces questions in braces with their answers
    confidence: str = "medium"
    only_on: str | None = None  # the model to judge the claim on, if only one resembles the paper's; None: every model

    def verdict(self, model: str) -> str:
        """Returns the verdict on one model, one of VERDICTS. A claim holds only if all its conditions hold."""
        if isinstance(self.judged, str):
            return self.judged
        if self.only_on not in (None, model):
            return OPEN
        try:
            found = [_outcome(*condition, model) for condition in self.judged]
        except NotCountedError:
            return UNTESTED
        return next((outcome for outcome in (FAILS, UNDECIDED) if outcome in found), HOLDS)

    def resolved(self, model: str) -> str:
        """Returns the text that states the figures for one model, with each question replaced by its answer.

        If no figure is recorded, returns a note that names the missing step.
        """
        try:
            return text_of(self.figure, model)
        except NotCountedError as error:
            return str(error)

    @property
    def steps(self) -> set[str]:
        """The names of the steps whose recorded figures decide the claim or appear in its text."""
        asked = () if isinstance(self.judged, str) else self.judged
        found = steps_of(self.figure)
        return found.union(*(steps_of(text) for condition in asked for text in condition if isinstance(text, str)))


def _outcome(question: str, least: float | str, model: str) -> str:
    found = estimate_of(question, model)
    bound = estimate_of(least, model).value if isinstance(least, str) else least
    if found.low >= bound:
        return HOLDS
    return FAILS if found.high < bound else UNDECIDED


def _claims(paper: str, *claims: tuple[Any, ...]) -> Iterator[Claim]:
    """Returns the claims of one paper. Each tuple contains the fields of a `Claim` that follow `paper`."""
    return (Claim(paper, *claim) for claim in claims)


PROGRAMS = "needs those programs on a GPU"
BUDGET = "a store's size is its budget here"
LOW = "low"
# A difference from the papers' baselines, stated in each row that it affects
SAME_SLOTS = "each baseline has the strategy's slots, where the papers' have at most two layers' experts"

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)  # shares of the experts in memory, for ProMoE's sweep of cache sizes

CLAIMS = (
    *_claims(
        "moe-infinity",
        ("3.1 to 16.7 times less time per token than vLLM, Ollama, DeepSpeed, BrainStorm (table 1)", OPEN, PROGRAMS),
        (
            "faster than LRU in the same store (4.2, figures 6, 7)",
            (("speed,link-moe-infinity,moe-infinity,none", ANY),),
            "{speed,link-moe-infinity,moe-infinity,none}",
        ),
        (
            "faster than counting, as BrainStorm does (4.2, figure 6)",
            (("speed,link-moe-infinity,moe-infinity,counting", ANY),),
            "{speed,link-moe-infinity,moe-infinity,counting}",
        ),
        (
            "algorithm 1 evicts better than LRU and counting (4.7)",
            (
                ("speed,link-moe-infinity,algorithm 1 alone,none", ANY),
                ("speed,link-moe-infinity,algorithm 1 alone,counting", ANY),
            ),
            "without prefetching {speed,link-moe-infinity,algorithm 1 alone,none} of LRU,"
            " {speed,link-moe-infinity,algorithm 1 alone,counting} of counting",
        ),
        (
            "its prefetching does not waste the link's time (5.1)",
            (("ahead,link-moe-infinity,moe-infinity,0", half(1, 0)),),
            "{ahead,link-moe-infinity,moe-infinity,0} of what it fetches ahead is there in time and used;"
            " {number,link-moe-infinity,systems,moe-infinity,experts} experts a token moved, LRU"
            " {number,link-moe-infinity,systems,none,experts}",
        ),
        (
            "use is skewed within a request and uniform over many (4.2, figure 2)",
            (("number,reuse,same_size,entropy", "number,reuse,within,entropy"), ("number,reuse,merged,entropy", 0.95)),
            "evenness of use {number,reuse,within,entropy} in a request, {number,reuse,same_size,entropy} in as many"
            " tokens of all requests, {number,reuse,merged,entropy} over all",
        ),
        (
            "a request activates few experts: under 5 % of about 100 (4.1)",
            (("unused,reuse,used_by_request", half(0.95, 0)),),
            "{spread,reuse,used_by_request} of them are used by a request",
            LOW,
        ),
        (
            "matched EAMs predict better than counts of all requests (4.4, 4.5)",
            (("share,accuracy,eamc,1,accuracy", "share,accuracy,popularity,1,accuracy"),),
            "right one layer ahead: {share,accuracy,eamc,1,accuracy}, counts {share,accuracy,popularity,1,accuracy},"
            " the previous token {share,accuracy,previous-token,1,accuracy}, skip {share,accuracy,skip,1,accuracy}",
            LOW,
        ),
        (
            "a collection of 120 is enough (figure 9)",
            (("speed,capacity,120,0", ANY), ("speed,capacity,120,1000", 0.98)),
            "with 120 requests {speed,capacity,120,0} of none, and {speed,capacity,120,1000} of 1,000 windows of"
            " requests, which counts as enough from 0.98 on",
        ),
        (
            "a look-up among 1,000 takes 21 µs, under 1 % of a token (B.1)",
            (("below,look-up,us,1000,0", -half(63, 21)),),
            "{number,look-up,us,1000,0} µs, of 120 {number,look-up,us,120,0} µs, on one core",
            LOW,
        ),
        (
            "recovers within 50 requests of a shift (table 3)",
            (("regained,shift", -50),),
            "after {recovery,shift} of the 12 requests counted it is within 2 % of itself with that kind learned; the"
            " first request after the shift takes {loss,shift} of its time",
        ),
        (
            "its slowest tokens are near the average: 169 of 155 ms (table 1)",
            (("below_tail,link-moe-infinity,moe-infinity", -1.18),),
            "the 99th percentile of tokens {tail,link-moe-infinity,moe-infinity} of the mean, LRU"
            " {tail,link-moe-infinity,none}",
        ),
        ("long contexts; experts placed over several devices", UNTESTED, "experts are not placed by hash here"),
    ),
    *_claims(
        "promoe",
        (
            "2.13 and 2.84 times as fast as offloading in transformers and llama.cpp (abstract)",
            OPEN,
            PROGRAMS,
        ),
        (
            "decodes 1.33 times as fast as LRU in transformers (figure 11)",
            (("speed,link-promoe,promoe,none", half(1.33)),),
            "{speed,link-promoe,promoe,none}; with half of the experts {speed,link-promoe-50,promoe,none}",
        ),
        (
            "1.09 times in llama.cpp (figure 12)",
            (("speed,link-promoe,promoe,none", half(1.09)),),
            "the same figures, at the times of transformers",
            LOW,
        ),
        (
            "1.49 to 1.52 times a static cache (figures 11, 12)",
            (("speed,link-promoe,promoe,static", half(1.49)),),
            "{speed,link-promoe,promoe,static}",
        ),
        (
            "2.6 times less loading on the critical path (abstract)",
            (("stall,link-promoe,promoe,none", half(2.6)),),
            "{stall,link-promoe,promoe,none}; with half of the experts {stall,link-promoe-50,promoe,none}",
        ),
        (
            "prefetching, chunks and early preemption each gain, with reordering 1.37 times (figure 13)",
            (
                ("speed,ablation,+ prefetching", ANY),
                ("speed,ablation,+ chunks,+ prefetching", ANY),
                ("speed,ablation,+ early preemption,+ chunks", ANY),
                ("speed,ablation,+ reordering", half(1.37)),
            ),
            "each with those before, of the base: {speed,ablation,+ prefetching}, {speed,ablation,+ chunks},"
            " {speed,ablation,+ early preemption}, {speed,ablation,+ reordering}; the last one beside the one before:"
            " prefetching is {speed,ablation,+ chunks,+ prefetching} with chunks,"
            " {speed,ablation,+ early preemption,+ chunks} with preemption; reordering is not seen while decoding, as a"
            " layer is computed at once",
        ),
        (
            "faster at every size of the cache, 1.34 times on average (figures 15 to 17)",
            (*((f"speed,shares-promoe:{share},promoe,none", ANY) for share in SHARES),
             ("mean_speed,shares-promoe,promoe,none", half(1.34))),
            "by the share of the experts {medians,shares-promoe,promoe,none}; on average"
            " {mean_speed,shares-promoe,promoe,none}",
        ),
        (
            "gains grow with the batch: 1.16 times LRU for one, 1.34 for four (figure 19)",
            (("speed,batches-promoe:1,promoe,none", half(1.16)), ("speed,batches-promoe:4,promoe,none", half(1.34)),
             ("speed,batches-promoe:4,promoe,none", "speed,batches-promoe:1,promoe,none")),
            "by requests at once, half of the experts, {medians,batches-promoe,promoe,none}",
        ),
        (
            "gains stay with fewer bits: 1.21 times LRU at the same share (figure 23)",
            (("speed,precision-promoe:8 bits; 12.5 %,promoe,none", half(1.21)),
             ("speed,precision-promoe:4 bits; 12.5 %,promoe,none", half(1.21))),
            "12.5 % of the experts in 16, 8 and 4 bits: {speed,precision-promoe:16 bits; 12.5 %,promoe,none},"
            " {speed,precision-promoe:8 bits; 12.5 %,promoe,none}, {speed,precision-promoe:4 bits; 12.5 %,promoe,none}",
        ),
        (
            "skip's accuracy falls with distance, 90.5 to 54.5 % from 1 to 8 (figure 8)",
            (("less,accuracy,skip,8,accuracy,skip,1,accuracy", half(0.905 - 0.545, 0)),),
            "{share,accuracy,skip,1,accuracy} to {share,accuracy,skip,8,accuracy}; the laboratory model's routers"
            " were fitted to it",
            LOW,
        ),
        (
            "the learned predictor keeps its accuracy (figures 8, 9)",
            (("share,accuracy,mlp,4,accuracy", "share,accuracy,skip,4,accuracy"),),
            "four layers ahead {share,accuracy,mlp,4,accuracy}, skip {share,accuracy,skip,4,accuracy}; networks of"
            " {number,learned,weights} weights each, {number,learned,epochs} epochs",
            LOW,
        ),
        (
            "it has the best GOODPRED (4.1, figure 8)",
            (("share,accuracy,mlp,4,good", "share,accuracy,skip,1,good"),
             ("share,accuracy,mlp,4,good", "share,accuracy,skip,4,good"),
             ("share,accuracy,mlp,4,good", "share,accuracy,token-id,4,good")),
            "four layers ahead {share,accuracy,mlp,4,good}; skip {share,accuracy,skip,1,good} one layer ahead,"
            " {share,accuracy,skip,4,good} four; a token's table {share,accuracy,token-id,4,good}, fetched in time"
            " {share,accuracy,token-id,4,fetch} of what was absent, skip {share,accuracy,skip,1,fetch} and"
            " {share,accuracy,skip,4,fetch}",
        ),
        (
            "a token's table is right about 54 % (figure 8)",
            (("share,accuracy,token-id,1,accuracy", half(0.54, 0.125)),),
            "{share,accuracy,token-id,1,accuracy}, after 180 requests",
            LOW,
        ),
        (
            "prefill 2.12 to 2.32 times LRU (figures 11, 12)",
            (("first,ablation,+ reordering", half(2.12)),),
            "{first,ablation,+ reordering} of LRU that takes a prompt's experts as they come; of LRU that sweeps"
            " prompts as well {first,link-promoe,promoe,none}",
        ),
    ),
    *_claims(
        "expertflow",
        (
            "hits 15 to 36 points above LRU's, 27.65 on average (5.5)",
            tuple((f"points,batches-expertflow:{n},expertflow,none", half(0.2765, 0)) for n in (8, 16)),
            "8, 16 and 32 at once, half of the experts: {points,batches-expertflow:8,expertflow,none},"
            " {points,batches-expertflow:16,expertflow,none}, {points,batches-expertflow:32,expertflow,none};"
            " {points,batches-expertflow:2,expertflow,none} with two, which use as many experts on the demo as eight"
            " there",
        ),
        (
            "1.96 times an LRU cache, on Mixtral (5.3)",
            (("speed,batches-expertflow:16,expertflow,none", half(1.96)),),
            "16 at once {speed,batches-expertflow:16,expertflow,none}, 8 {speed,batches-expertflow:8,expertflow,none},"
            " one {speed,link-expertflow,expertflow,none}; at the times of Switch",
        ),
        (
            "2 to 10 times SE-MoE, which fetches the whole next layer (5.3)",
            tuple((f"speed,batches-expertflow:{n},expertflow,whole next layer first", half(2)) for n in (8, 16, 32)),
            "8, 16 and 32 at once {speed,batches-expertflow:8,expertflow,whole next layer first},"
            " {speed,batches-expertflow:16,expertflow,whole next layer first},"
            " {speed,batches-expertflow:32,expertflow,whole next layer first}; where misses overtake"
            " {speed,batches-expertflow:8,expertflow,whole next layer},"
            " {speed,batches-expertflow:16,expertflow,whole next layer},"
            f" {{speed,batches-expertflow:32,expertflow,whole next layer}}; {SAME_SLOTS}",
        ),
        (
            "the routing-path network predicts better than previous token and affinity (table 1)",
            (("less,accuracy,previous-token,1,batch,routing-path,1,batch", half(0.49, 0)),
             ("less,accuracy,affinity,1,batch,routing-path,1,batch", half(0.58, 0))),
            "of 8 requests together {share,accuracy,routing-path,1,batch}, {share,accuracy,previous-token,1,batch} and"
            " {share,accuracy,affinity,1,batch}; of one {share,accuracy,routing-path,1,accuracy},"
            " {share,accuracy,previous-token,1,accuracy} and {share,accuracy,affinity,1,accuracy}",
        ),
        (
            "fewer experts moved (3.2)",
            tuple((f"moved,batches-expertflow:{n},expertflow,none", ANY) for n in (8, 16, 32)),
            "LRU moves {moved,batches-expertflow:8,expertflow,none}, {moved,batches-expertflow:16,expertflow,none} and"
            " {moved,batches-expertflow:32,expertflow,none} as many at 8, 16 and 32 at once, at one"
            " {moved,link-expertflow,expertflow,none}",
        ),
        (
            "hits stay as batches grow: -3 and -6 points from 4 to 8 and 16, LRU -11 and -18 (5.5)",
            (("steadier,batches-expertflow,expertflow,none,4,8", half(0.1099 - 0.0312, 0)),
             ("steadier,batches-expertflow,expertflow,none,4,16", half(0.1824 - 0.0605, 0))),
            "ready by requests at once, half of the experts, {readies,batches-expertflow,expertflow}, LRU"
            " {readies,batches-expertflow,none}",
        ),
        (
            "the token scheduler saves experts, 1.15 times as fast (3.3, table 3)",
            (("saved,scheduler,16,predicted", half(1.15) - 1),),
            "fewer experts a pass at 4, 8 and 16: {saved,scheduler,4,predicted}, {saved,scheduler,8,predicted},"
            " {saved,scheduler,16,predicted}; an oracle {saved,scheduler,16,oracle}: [batches](evidence/batches.md)",
        ),
        ("75 % of the memory saved, 93.72 at most (table 2)", OPEN, BUDGET),
        ("gains grow with the number of experts (5.3)", UNTESTED, "needs a model of each number"),
        ("dual batches hide the predictor and the scheduler (5.5)", UNTESTED, "nothing here computes two batches"),
    ),
    *_claims(
        "duoserve",
        (
            "end to end 1.42 to 7.54 times loading on demand or by layer (figure 5)",
            (("whole,pool-duoserve,duoserve,on demand", half(1.42)),
             ("whole,link-duoserve,duoserve,whole next layer first", half(1.42))),
            "prompt and answer: with slots for two layers' chosen experts, as in the paper,"
            " {whole,pool-duoserve,duoserve,on demand} of on demand; with a quarter"
            " {whole,link-duoserve,duoserve,on demand} of it, which then is an LRU cache,"
            " {whole,link-duoserve,duoserve,whole next layer first} of the whole next layer and"
            " {whole,link-duoserve,duoserve,whole next layer} where misses overtake;"
            f" {SAME_SLOTS}",
        ),
        (
            "throughput 1.78 to 7.04 times (figure 6)",
            (("speed,pool-duoserve,duoserve,on demand", half(1.78)),
             ("speed,link-duoserve,duoserve,whole next layer first", half(1.78))),
            "decoding {speed,pool-duoserve,duoserve,on demand} of on demand in the paper's slots; in a quarter"
            " {speed,link-duoserve,duoserve,whole next layer first} of the whole next layer, and of LRU, which the"
            f" paper does not compare with, {{speed,link-duoserve,duoserve,none}}; {SAME_SLOTS}",
        ),
        (
            "first token 1.78 to 3.8 times as soon (6.2)",
            (("first,pool-duoserve,duoserve,on demand", half(1.78)),
             ("first,link-duoserve,duoserve,whole next layer first", half(1.78))),
            "{first,pool-duoserve,duoserve,on demand} of on demand in the paper's slots; in a quarter"
            " {first,link-duoserve,duoserve,whole next layer first} of the whole next layer, of LRU"
            f" {{first,link-duoserve,duoserve,none}}; {SAME_SLOTS}",
        ),
        (
            "ExpertMLP: all right in 54 to 67 %, one right in over 90 % (table 3)",
            (("share,accuracy,expert-mlp,1,all", half(0.54, 1 / 28)),
             ("share,accuracy,expert-mlp,1,any", half(0.9, 13 / 28))),
            "all right {share,accuracy,expert-mlp,1,all}, one {share,accuracy,expert-mlp,1,any}; right"
            " {share,accuracy,expert-mlp,1,accuracy}. By chance 2 of 8 are all right in 3.6 % and one in 46 %; all"
            " right is the harder the more experts a token uses",
            LOW,
            "eight",
        ),
        ("the predictor costs 0.6 ms, hidden (6.4); 15 % of the memory (table 2)", OPEN, BUDGET),
    ),
)  # fmt: skip
