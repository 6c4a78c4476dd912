"""What four papers claim, and how it is judged here: the first table of docs/evidence.md.

A verdict follows from figures that were recorded (`predictors/study/figures.py`): a claim holds where all its
conditions do. Their bounds are half of the claimed gain where the paper says how large it is. What needs what is not
here cannot be judged, and what was not done is not tested. Confidence is medium for the simulator at the paper's times
on the laboratory model, low for less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from predictors.study.figures import NotCountedError, number_of, text_of

HOLDS, FAILS, UNTESTED, OPEN = "holds", "fails", "not tested", "cannot be judged"
VERDICTS = (HOLDS, FAILS, UNTESTED, OPEN)
Condition = tuple[str, float | str]


@dataclass(frozen=True)
class Claim:
    """A paper's headline claim, whence, and the figures here; what is in braces is asked of `figures`.

    judged: UNTESTED, OPEN, or conditions: (what is asked, at least this number or what else is asked).
    """

    paper: str
    text: str
    judged: str | tuple[Condition, ...]
    figure: str
    confidence: str = "medium"

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        if isinstance(self.judged, str):
            return self.judged
        try:
            return HOLDS if all(number_of(asked) >= _bound(least) for asked, least in self.judged) else FAILS
        except NotCountedError:
            return UNTESTED

    @property
    def resolved(self) -> str:
        """The figures as text."""
        try:
            return text_of(self.figure)
        except NotCountedError as error:
            return str(error)


def _bound(least: float | str) -> float:
    return number_of(least) if isinstance(least, str) else least


def _claims(paper: str, *claims: tuple[Any, ...]) -> tuple[Claim, ...]:
    """Those of one paper, by the other fields of `Claim`."""
    return tuple(Claim(paper, *claim) for claim in claims)


PROGRAMS = "needs those programs on a GPU"
BUDGET = "a store's size is its budget here"
LOW = "low"

CLAIMS = (
    *_claims(
        "moe-infinity",
        ("3.1 to 16.7 times less time per token than vLLM, Ollama, DeepSpeed, BrainStorm (table 1)", OPEN, PROGRAMS),
        (
            "faster than LRU in the same store (4.2, figures 6, 7)",
            (("speed,link-moe-infinity,moe-infinity,none", 1.01),),
            "{speed,link-moe-infinity,moe-infinity,none}",
        ),
        (
            "faster than counting, as BrainStorm does (4.2, figure 6)",
            (("speed,link-moe-infinity,moe-infinity,counting", 1.01),),
            "{speed,link-moe-infinity,moe-infinity,counting}",
        ),
        (
            "algorithm 1 evicts better than LRU and counting (4.7)",
            (
                ("speed,link-moe-infinity,algorithm 1 alone,none", 1.01),
                ("speed,link-moe-infinity,algorithm 1 alone,counting", 1.01),
            ),
            "without prefetching {speed,link-moe-infinity,algorithm 1 alone,none} of LRU,"
            " {speed,link-moe-infinity,algorithm 1 alone,counting} of counting",
        ),
        (
            "its prefetching does not load the link in vain (5.1)",
            (("ahead,link-moe-infinity,moe-infinity,0", 0.5),),
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
            (("unused,reuse,used_by_request", 0.9),),
            "{spread,reuse,used_by_request} of them are used by a request of some 80 tokens",
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
            (("speed,capacity,120,1000", 0.98),),
            "with 120 requests {speed,capacity,120,1000} of 1,000 windows of requests; without any"
            " {speed,capacity,0,1000}",
        ),
        (
            "a look-up among 1,000 takes 21 µs, under 1 % of a token (B.1)",
            (("below,look-up,us,1000,0", -42),),
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
            (("speed,link-promoe,promoe,none", 1.165),),
            "{speed,link-promoe,promoe,none}; with half of the experts {speed,link-promoe-50,promoe,none}",
        ),
        (
            "1.09 times in llama.cpp (figure 12)",
            (("speed,link-promoe,promoe,none", 1.045),),
            "the same figures, at the times of transformers",
            LOW,
        ),
        (
            "1.49 to 1.52 times a static cache (figures 11, 12)",
            (("speed,link-promoe,promoe,static", 1.245),),
            "{speed,link-promoe,promoe,static}",
        ),
        (
            "2.6 times less loading on the critical path (abstract)",
            (("stall,link-promoe,promoe,none", 1.8),),
            "{stall,link-promoe,promoe,none}; with half of the experts {stall,link-promoe-50,promoe,none}",
        ),
        (
            "prefetching, chunks and early preemption each gain, with reordering 1.37 times (figure 13)",
            (
                ("speed,ablation,+ prefetching", 1.01),
                ("speed,ablation,+ chunks,+ prefetching", 1.005),
                ("speed,ablation,+ early preemption,+ chunks", 1.005),
            ),
            "each with those before: {speed,ablation,+ prefetching}, {speed,ablation,+ chunks},"
            " {speed,ablation,+ early preemption}; reordering: not seen where a layer is computed at once",
        ),
        (
            "faster at every size of the cache, 1.34 times on average (figures 15 to 17)",
            (("speed,shares-promoe/0.125,promoe,none", 1.0), ("mean_speed,shares-promoe,promoe,none", 1.17)),
            "12.5 to 75 % of the experts: {medians,shares-promoe,promoe,none}",
        ),
        (
            "gains grow with the batch: 1.16 times LRU for one, 1.34 for four (figure 19)",
            (("speed,batches-promoe/4,promoe,none", "speed,batches-promoe/1,promoe,none"),),
            "1, 2, 4 and 8 at once, half of the experts: {medians,batches-promoe,promoe,none}",
        ),
        (
            "gains stay with fewer bits: 1.21 times LRU at the same share (figure 23)",
            (("speed,precision-promoe/8 bits; 12.5 %,promoe,none", 1.105),
             ("speed,precision-promoe/4 bits; 12.5 %,promoe,none", 1.105)),
            "12.5 % of the experts in 16, 8 and 4 bits: {median,precision-promoe/16 bits; 12.5 %,promoe,none},"
            " {median,precision-promoe/8 bits; 12.5 %,promoe,none},"
            " {median,precision-promoe/4 bits; 12.5 %,promoe,none}",
        ),
        (
            "skip's accuracy falls with distance, 90.5 to 54.5 % from 1 to 8 (figure 8)",
            (("less,accuracy,skip,8,accuracy,skip,1,accuracy", 0.18),),
            "{share,accuracy,skip,1,accuracy} to {share,accuracy,skip,8,accuracy}; the model's routers were fitted to"
            " it",
            LOW,
        ),
        (
            "the learned predictor keeps its accuracy (figures 8, 9)",
            (("share,accuracy,mlp,4,accuracy", "share,accuracy,skip,4,accuracy"),),
            "four layers ahead {share,accuracy,mlp,4,accuracy}, skip {share,accuracy,skip,4,accuracy}",
            LOW,
        ),
        (
            "it has the best GOODPRED (4.1, figure 8)",
            (("share,accuracy,mlp,4,good", "share,accuracy,skip,1,good"),
             ("share,accuracy,mlp,4,good", "share,accuracy,token-id,8,good")),
            "four layers ahead {share,accuracy,mlp,4,good}; skip {share,accuracy,skip,1,good} one layer ahead,"
            " {share,accuracy,skip,4,good} four; a token's table {share,accuracy,token-id,8,good} eight",
        ),
        (
            "a token's table is right about 54 % (figure 8)",
            (("share,accuracy,token-id,1,accuracy", 0.44),),
            "{share,accuracy,token-id,1,accuracy}, after 180 requests",
            LOW,
        ),
        (
            "prefill 2.12 to 2.32 times LRU (figures 11, 12)",
            (("first,link-promoe,promoe,none", 1.56),),
            "prompts of some 38 tokens {first,link-promoe,promoe,none}; of `lru`, which sweeps prompts as well,"
            " {first,link-promoe,promoe,lru}",
        ),
    ),
    *_claims(
        "expertflow",
        (
            "hits 15 to 36 points above LRU's, 27.65 on average (5.5)",
            (("less,link-expertflow,systems,none,ready,systems,expertflow,ready", 0.138),),
            "{share,link-expertflow,systems,expertflow,ready} ready and"
            " {share,link-expertflow,systems,expertflow,late} on their way, LRU"
            " {share,link-expertflow,systems,none,ready}",
        ),
        (
            "1.96 times an LRU cache, on Mixtral (5.3)",
            (("speed,link-expertflow,expertflow,none", 1.48),),
            "{speed,link-expertflow,expertflow,none}",
        ),
        (
            "2 to 10 times SE-MoE, which fetches the whole next layer (5.3)",
            (("speed,link-expertflow,expertflow,whole next layer", 1.5),),
            "{speed,link-expertflow,expertflow,whole next layer}",
        ),
        (
            "the routing-path network predicts better than previous token and affinity (table 1)",
            (("share,accuracy,routing-path,1,batch", "share,accuracy,previous-token,1,batch"),
             ("share,accuracy,routing-path,1,batch", "share,accuracy,affinity,1,batch")),
            "of 8 requests together {share,accuracy,routing-path,1,batch}, {share,accuracy,previous-token,1,batch} and"
            " {share,accuracy,affinity,1,batch}; of one {share,accuracy,routing-path,1,accuracy},"
            " {share,accuracy,previous-token,1,accuracy} and {share,accuracy,affinity,1,accuracy}",
        ),
        (
            "fewer experts moved (3.2)",
            (("number,link-expertflow,systems,none,experts", "number,link-expertflow,systems,expertflow,experts"),),
            "{number,link-expertflow,systems,expertflow,experts} a token against"
            " {number,link-expertflow,systems,none,experts}",
        ),
        (
            "hits stay as batches grow: -3 and -6 points from 4 to 8 and 16, LRU -11 and -18 (5.5)",
            (("less,batches-expertflow,settings,2,none,ready,settings,8,none,ready",
              "less,batches-expertflow,settings,2,expertflow,ready,settings,8,expertflow,ready"),
             ("less,batches-expertflow,settings,2,expertflow,ready,settings,8,expertflow,ready", -0.12)),
            "ready at 1, 2, 4 and 8 at once, half of the experts: {readies,batches-expertflow,expertflow}, LRU"
            " {readies,batches-expertflow,none}",
        ),
        (
            "the token scheduler saves experts, 1.15 times as fast (3.3, table 3)",
            (("saved,scheduler,16,predicted", 0.07),),
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
            (("whole,link-duoserve,duoserve,on demand", 1.21),
             ("whole,link-duoserve,duoserve,whole next layer", 1.21)),
            "prompt and answer {whole,link-duoserve,duoserve,on demand} of on demand,"
            " {whole,link-duoserve,duoserve,whole next layer} of the whole next layer",
        ),
        (
            "throughput 1.78 to 7.04 times (figure 6)",
            (("speed,link-duoserve,duoserve,on demand", 1.39),
             ("speed,link-duoserve,duoserve,whole next layer", 1.39)),
            "decoding {speed,link-duoserve,duoserve,on demand} and {speed,link-duoserve,duoserve,whole next layer}; of"
            " LRU, which the paper does not compare with, {speed,link-duoserve,duoserve,none}",
        ),
        (
            "first token 1.78 to 3.8 times as soon (6.2)",
            (("first,link-duoserve,duoserve,on demand", 1.39),),
            "{first,link-duoserve,duoserve,on demand} of on demand,"
            " {first,link-duoserve,duoserve,whole next layer} of the whole next layer, of LRU"
            " {first,link-duoserve,duoserve,none}",
        ),
        (
            "ExpertMLP: all right in 54 to 67 %, one right in over 90 % (table 3)",
            (("share,accuracy,expert-mlp,1,all", 0.27), ("share,accuracy,expert-mlp,1,any", 0.9)),
            "{share,accuracy,expert-mlp,1,all} and {share,accuracy,expert-mlp,1,any}, for 8 of 64 experts instead of 2"
            " of 8; right {share,accuracy,expert-mlp,1,accuracy}",
            LOW,
        ),
        ("the predictor costs 0.6 ms, hidden (6.4); 15 % of the memory (table 2)", OPEN, BUDGET),
    ),
)  # fmt: skip
