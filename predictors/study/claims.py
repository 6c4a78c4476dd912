"""The claims of four papers, and this project's verdicts on them: the first table of
docs/evidence.md.

A verdict is derived from recorded figures (`predictors/study/figures.py`). A claim
about a gain holds if at least half of the claimed gain is reached. If the paper does
not state the size of a gain, any gain is enough. A claim about something else has a
bound of its own. The bound is another recorded figure, a limit that the paper states,
or a limit that this project has set. For example, a paper states 50 requests for the
recovery after a shift. This project has set 0.95 for the evenness of use, and 0.98 for
the speed with a smaller collection.

A figure that is measured on several requests has an interval. A claim holds if the
whole interval is at or above the bound, and fails if the whole interval is below.
Otherwise the claim is undecided. A claim that needs a GPU or other programs cannot be
judged. Confidence is medium if the simulator uses the paper's times, base and batches,
and low otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from predictors.study.figures import NotCountedError, estimate_of, steps_of, text_of

HOLDS, FAILS, UNDECIDED, UNTESTED, OPEN = (
    "holds",
    "fails",
    "undecided",
    "not tested",
    "cannot be judged",
)
VERDICTS = (HOLDS, FAILS, UNDECIDED, UNTESTED, OPEN)
ANY = 1.0  # bound of a claim for which any gain is enough: the base's speed
Condition = tuple[str, float | str]


def half(claimed: float, without: float = 1.0) -> float:
    """Returns the bound of a claim: the mean of `claimed` and `without`, the value
    without the claimed method."""
    return without + (claimed - without) / 2


@dataclass(frozen=True)
class Claim:
    """A paper's headline claim with its place in the paper, and the figures that decide
    it."""

    paper: str
    text: str
    # UNTESTED, OPEN, or conditions: (question, bound or question for the bound).
    judged: str | tuple[Condition, ...]
    figure: str  # text; `text_of` replaces questions in braces with their answers
    confidence: str = "medium"
    # The model to judge the claim on, if only one resembles the paper's; None: every
    # model.
    only_on: str | None = None
    # A difference from the paper, or a definition; sentences that are the same for
    # every model.
    note: str = ""

    def verdict(self, model: str) -> str:
        """Returns the verdict on one model, one of VERDICTS. A claim holds only if all
        its conditions hold."""
        if isinstance(self.judged, str):
            return self.judged
        if self.only_on not in (None, model):
            return OPEN
        try:
            found = [_outcome(*condition, model) for condition in self.judged]
        except NotCountedError:
            return UNTESTED
        return next(
            (outcome for outcome in (FAILS, UNDECIDED) if outcome in found), HOLDS
        )

    def resolved(self, model: str) -> str:
        """Returns the text that states the figures for one model, with each question
        replaced by its answer.

        If no figure is recorded, returns a note that names the missing step.
        """
        try:
            return text_of(self.figure, model)
        except NotCountedError as error:
            return str(error)

    @property
    def steps(self) -> set[str]:
        """The names of the steps whose recorded figures decide the claim or appear in
        its text."""
        asked = () if isinstance(self.judged, str) else self.judged
        found = steps_of(self.figure)
        return found.union(
            *(
                steps_of(text)
                for condition in asked
                for text in condition
                if isinstance(text, str)
            )
        )


def _outcome(question: str, least: float | str, model: str) -> str:
    found = estimate_of(question, model)
    bound = estimate_of(least, model).value if isinstance(least, str) else least
    if found.low >= bound:
        return HOLDS
    return FAILS if found.high < bound else UNDECIDED


def _claims(paper: str, *claims: tuple[Any, ...]) -> Iterator[Claim]:
    """Returns the claims of one paper. Each tuple contains the fields of a `Claim` that
    follow `paper`."""
    return (Claim(paper, *claim) for claim in claims)


BUDGET = "In moegguf, the memory for experts is a setting, and does not depend on the strategy."
UNTIMED = "In moegguf, the memory for experts is a setting, and the simulator does not time predictors."
MEDIUM, LOW = "medium", "low"
# A difference from the papers' baselines, stated in each row that it affects
SAME_SLOTS = (
    "In the simulation, each baseline has as many slots as the strategy. The paper's baselines keep at most two layers'"
    " experts."
)
FITTED = "The laboratory model's routers were fitted in a way that raised the accuracy of the predictor `skip`."
POOL = "Slots for a token's experts in two layers imitate the small memory for experts of the paper's system."

# Shares of the experts in memory, for ProMoE's sweep of cache sizes.
SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)

CLAIMS = (
    *_claims(
        "moe-infinity",
        (
            "MoE-Infinity generates tokens 3.1 to 16.7 times as fast as vLLM, Ollama, DeepSpeed and BrainStorm"
            " (abstract)",
            OPEN,
            "A comparison needs vLLM, Ollama, DeepSpeed and BrainStorm on a GPU.",
        ),
        (
            "MoE-Infinity is faster than LRU in the same store (section 4.2, figures 6 and 7)",
            (("speed,link-moe-infinity,moe-infinity,none", ANY),),
            "MoE-Infinity decodes {speed,link-moe-infinity,moe-infinity,none} times as fast as LRU.",
        ),
        (
            "MoE-Infinity is faster than eviction by counts of uses, as in BrainStorm (section 4.2, figure 6)",
            (("speed,link-moe-infinity,moe-infinity,counting", ANY),),
            "MoE-Infinity decodes {speed,link-moe-infinity,moe-infinity,counting} times as fast as eviction by counts.",
        ),
        (
            "MoE-Infinity's algorithm 1 evicts better than LRU and better than counting (section 4.7)",
            (
                ("speed,link-moe-infinity,algorithm 1 alone,none", ANY),
                ("speed,link-moe-infinity,algorithm 1 alone,counting", ANY),
            ),
            "Without prefetching, algorithm 1 reaches {speed,link-moe-infinity,algorithm 1 alone,none} times the speed"
            " of LRU, and {speed,link-moe-infinity,algorithm 1 alone,counting} times the speed of eviction by counts.",
        ),
        (
            "MoE-Infinity's prefetching does not waste the link's time (section 5.1)",
            (("ahead,link-moe-infinity,moe-infinity,0", half(1, 0)),),
            "{ahead,link-moe-infinity,moe-infinity,0} of the experts that MoE-Infinity prefetches arrive in time and"
            " are used. MoE-Infinity moves {number,link-moe-infinity,systems,moe-infinity,experts} experts per token,"
            " and LRU moves {number,link-moe-infinity,systems,none,experts}.",
        ),
        (
            "Expert use is skewed within a request and uniform over many requests (MoE-Infinity, section 4.2, figure"
            " 2)",
            (("number,reuse,same_size,entropy", "number,reuse,within,entropy"), ("number,reuse,merged,entropy", 0.95)),
            "The evenness of expert use (normalised entropy) is {number,reuse,within,entropy} within a request,"
            " {number,reuse,same_size,entropy} within an equally long sample of tokens from all requests, and"
            " {number,reuse,merged,entropy} over all requests.",
        ),
        (
            "A request repeatedly activates fewer than 5 % of about 100 experts (MoE-Infinity, section 4.1)",
            (("unused,reuse,used_by_request", half(0.95, 0)),),
            "While decoding, a request uses {spread,reuse,used_by_request} of the experts.",
            LOW,
            None,
            "The figures count every expert that a request uses at least once.",
        ),
        (
            "Matched EAMs (expert activation matrices) predict better than counts over all requests (MoE-Infinity,"
            " sections 4.4 and 4.5)",
            (("share,accuracy,eamc,1,accuracy", "share,accuracy,popularity,1,accuracy"),),
            "One layer ahead, the accuracy is {share,accuracy,eamc,1,accuracy} with matched EAMs,"
            " {share,accuracy,popularity,1,accuracy} with counts, {share,accuracy,previous-token,1,accuracy} with the"
            " previous token's experts, and {share,accuracy,skip,1,accuracy} with the predictor `skip`.",
            LOW,
            None,
            "An EAM counts how often a request used each expert.",
        ),
        (
            "A collection of 120 entries is enough for MoE-Infinity (figure 9)",
            (("speed,capacity,120,0", ANY), ("speed,capacity,120,1000", 0.98)),
            "MoE-Infinity with 120 entries decodes {speed,capacity,120,0} times as fast as without entries, and"
            " {speed,capacity,120,1000} times as fast as with 1,000 entries.",
            MEDIUM,
            None,
            "A collection is large enough if it reaches 0.98 times the speed of a collection with 1,000 entries.",
        ),
        (
            "A look-up among 1,000 entries takes 21 µs, less than 1 % of a token's time (MoE-Infinity, section B.1)",
            (("below,look-up,us,1000,0", -half(63, 21)),),
            "On one core, a look-up in MoE-Infinity's collection takes {number,look-up,us,1000,0} µs among 1,000"
            " entries, and {number,look-up,us,120,0} µs among 120 entries.",
            LOW,
        ),
        (
            "MoE-Infinity recovers within 50 requests after the kind of text changes (table 3)",
            (("regained,shift", -50),),
            "MoE-Infinity's recovery from a change in the kind of text takes {recovery,shift}. In the median over the"
            " kinds of text, each token of the first request of a new kind takes {loss,shift} times as long as with a"
            " collection that contains this kind.",
            MEDIUM,
            None,
            "MoE-Infinity has recovered when three successive requests take, on average, at most 2 % more time than"
            " with a collection that contains the new kind. At most 12 requests of each new kind of text are"
            " measured.",
        ),
        (
            "MoE-Infinity's slowest tokens take little more than the average: 169 ms compared with 155 ms (table 1)",
            (("below_tail,link-moe-infinity,moe-infinity", -1.18),),
            "The 99th percentile of the time per token is {tail,link-moe-infinity,moe-infinity} times the mean with"
            " MoE-Infinity, and {tail,link-moe-infinity,none} times the mean with LRU.",
        ),
        (
            "MoE-Infinity supports long contexts, and places experts on several devices",
            UNTESTED,
            "The measurements use short contexts and one device.",
        ),
    ),
    *_claims(
        "promoe",
        (
            "ProMoE processes prompts 2.13 times as fast, and decodes 2.84 times as fast, as existing offloading"
            " solutions (abstract)",
            OPEN,
            "A comparison needs transformers and llama.cpp on a GPU.",
        ),
        (
            "ProMoE decodes 1.33 times as fast as LRU in transformers (figure 11)",
            (("speed,link-promoe,promoe,none", half(1.33)),),
            "ProMoE decodes {speed,link-promoe,promoe,none} times as fast as LRU. With half of the experts in memory,"
            " ProMoE decodes {speed,link-promoe-50,promoe,none} times as fast as LRU.",
        ),
        (
            "ProMoE decodes 1.09 times as fast as LRU in llama.cpp (figure 12)",
            (("speed,link-promoe,promoe,none", half(1.09)),),
            "With the transfer and compute times of ProMoE's measurements in transformers, ProMoE decodes"
            " {speed,link-promoe,promoe,none} times as fast as LRU.",
            LOW,
        ),
        (
            "ProMoE decodes 1.49 to 1.52 times as fast as a static cache (figures 11 and 12)",
            (("speed,link-promoe,promoe,static", half(1.49)),),
            "ProMoE decodes {speed,link-promoe,promoe,static} times as fast as a static cache.",
        ),
        (
            "ProMoE reduces the time of loading experts on the critical path by a factor of 2.6 (introduction)",
            (("stall,link-promoe,promoe,none", half(2.6)),),
            "LRU stalls {stall,link-promoe,promoe,none} times as long as ProMoE. With half of the experts in memory,"
            " LRU stalls {stall,link-promoe-50,promoe,none} times as long as ProMoE.",
        ),
        (
            "In ProMoE, prefetching, chunks and early preemption each raise the speed; together with reordering, they"
            " reach 1.37 times the base speed (figure 13)",
            (
                ("speed,ablation,+ prefetching", ANY),
                ("speed,ablation,+ chunks,+ prefetching", ANY),
                ("speed,ablation,+ early preemption,+ chunks", ANY),
                ("speed,ablation,+ reordering", half(1.37)),
            ),
            "ProMoE's prefetching alone reaches {speed,ablation,+ prefetching} times the speed of LRU. Adding chunked"
            " transfers multiplies ProMoE's speed by {speed,ablation,+ chunks,+ prefetching}, and then adding early"
            " preemption multiplies the speed by {speed,ablation,+ early preemption,+ chunks}. ProMoE's four techniques"
            " together reach {speed,ablation,+ reordering} times the speed of LRU.",
            MEDIUM,
            None,
            "In the simulator, reordering changes only the time of prompts, because a layer of a decoded token is"
            " computed in one step.",
        ),
        (
            "In transformers, ProMoE decodes faster than LRU with every cache size, and 1.34 times as fast on average"
            " (figures 15 and 16)",
            (*((f"speed,shares-promoe:{share},promoe,none", ANY) for share in SHARES),
             ("mean_speed,shares-promoe,promoe,none", half(1.34))),
            "ProMoE decodes {speed,shares-promoe:0.125,promoe,none} times as fast as LRU with 12.5 % of the experts in"
            " memory, {speed,shares-promoe:0.5,promoe,none} times as fast with 50 %, and"
            " {speed,shares-promoe:0.75,promoe,none} times as fast with 75 %. On average over five shares of the"
            " experts in memory, ProMoE decodes {mean_speed,shares-promoe,promoe,none} times as fast as LRU.",
            MEDIUM,
            None,
            "In llama.cpp, ProMoE decodes 1.14 times as fast as LRU on average (figure 17).",
        ),
        (
            "ProMoE's gain over LRU grows with the batch: 1.16 times the speed with one request, 1.34 times with four"
            " (figure 19)",
            (("speed,batches-promoe:1,promoe,none", half(1.16)), ("speed,batches-promoe:4,promoe,none", half(1.34)),
             ("speed,batches-promoe:4,promoe,none", "speed,batches-promoe:1,promoe,none")),
            "ProMoE decodes {speed,batches-promoe:1,promoe,none} times as fast as LRU with one request, and"
            " {speed,batches-promoe:4,promoe,none} times as fast with four requests at once.",
        ),
        (
            "ProMoE's gain remains with fewer bits: 1.21 times the speed of LRU with the same share of the experts"
            " (figure 23)",
            (("speed,precision-promoe:8 bits; 12.5 %,promoe,none", half(1.21)),
             ("speed,precision-promoe:4 bits; 12.5 %,promoe,none", half(1.21))),
            "With 12.5 % of the experts in memory, ProMoE decodes"
            " {speed,precision-promoe:16 bits; 12.5 %,promoe,none} times as fast as LRU in 16 bits,"
            " {speed,precision-promoe:8 bits; 12.5 %,promoe,none} times as fast in 8 bits, and"
            " {speed,precision-promoe:4 bits; 12.5 %,promoe,none} times as fast in 4 bits.",
        ),
        (
            "The accuracy of the predictor `skip` falls from 90.5 % one layer ahead to 54.5 % eight layers ahead"
            " (ProMoE, figure 8)",
            (("less,accuracy,skip,8,accuracy,skip,1,accuracy", half(0.905 - 0.545, 0)),),
            "One layer ahead, the accuracy of the predictor `skip` is {share,accuracy,skip,1,accuracy}. Eight layers"
            " ahead, the accuracy of the predictor `skip` is {share,accuracy,skip,8,accuracy}.",
            LOW,
            None,
            FITTED,
        ),
        (
            "ProMoE's learned predictor keeps its accuracy over distance (figures 8 and 9)",
            (("share,accuracy,mlp,4,accuracy", "share,accuracy,skip,4,accuracy"),),
            "Four layers ahead, the accuracy is {share,accuracy,mlp,4,accuracy} with the learned predictor, and"
            " {share,accuracy,skip,4,accuracy} with the predictor `skip`.",
            LOW,
            None,
            FITTED,
        ),
        (
            "ProMoE's learned predictor has the best GOODPRED, a product of accuracy and timeliness (section 4.1,"
            " figure 8)",
            (("share,accuracy,mlp,4,good", "share,accuracy,skip,1,good"),
             ("share,accuracy,mlp,4,good", "share,accuracy,skip,4,good"),
             ("share,accuracy,mlp,4,good", "share,accuracy,token-id,4,good")),
            "Four layers ahead, the GOODPRED (accuracy multiplied by timeliness) is {share,accuracy,mlp,4,good} for the"
            " learned predictor, {share,accuracy,skip,4,good} for the predictor `skip`, and"
            " {share,accuracy,token-id,4,good} for a table of the experts that each token id used. One layer ahead, the"
            " GOODPRED (accuracy multiplied by timeliness) is {share,accuracy,skip,1,good} for the predictor `skip`.",
        ),
        (
            "A table of the experts that each token id used predicts with an accuracy of about 54 % (ProMoE, figure 8)",
            (("share,accuracy,token-id,1,accuracy", half(0.54, 0.125)),),
            "A table of the experts that each token id used in 180 requests predicts with an accuracy of"
            " {share,accuracy,token-id,1,accuracy}.",
            LOW,
        ),
        (
            "ProMoE processes prompts 2.12 to 2.32 times as fast as LRU (figures 11 and 12)",
            (("first,ablation,+ reordering", half(2.12)),),
            "ProMoE processes prompts {first,ablation,+ reordering} times as fast as an LRU cache that never fetches"
            " ahead. ProMoE processes prompts {first,link-promoe,promoe,none} times as fast as an LRU cache that"
            " fetches the next layer's experts ahead, as ProMoE does.",
        ),
    ),
    *_claims(
        "expertflow",
        (
            "ExpertFlow's hit rate is 15 to 36 percentage points higher than LRU's, and 27.65 points higher on average"
            " (section 5.5)",
            tuple((f"points,batches-expertflow:{n},expertflow,none", half(0.2765, 0)) for n in (8, 16)),
            "ExpertFlow's hit rate minus LRU's hit rate is {points,batches-expertflow:8,expertflow,none} percentage"
            " points with 8 requests at once, and {points,batches-expertflow:16,expertflow,none} points with 16"
            " requests. ExpertFlow's hit rate minus LRU's hit rate is {points,batches-expertflow:2,expertflow,none}"
            " percentage points with 2 requests at once, and {points,batches-expertflow:32,expertflow,none} points with"
            " 32 requests.",
            MEDIUM,
            None,
            "The verdict uses the hit rates with 8 and 16 requests at once. Two requests to the demo choose as many"
            " experts per layer as eight requests to Switch-base. Experts that are still being transferred do not"
            " count as hits.",
        ),
        (
            "ExpertFlow is 1.96 times as fast as an LRU cache with Mixtral (section 5.3)",
            (("speed,batches-expertflow:16,expertflow,none", half(1.96)),),
            "ExpertFlow decodes {speed,link-expertflow,expertflow,none} times as fast as LRU with one request,"
            " {speed,batches-expertflow:8,expertflow,none} times as fast with 8 requests at once, and"
            " {speed,batches-expertflow:16,expertflow,none} times as fast with 16 requests.",
            MEDIUM,
            None,
            "The simulation uses transfer and compute times assumed for Switch-base, not for Mixtral. The verdict"
            " uses the speed with 16 requests at once.",
        ),
        (
            "ExpertFlow is 2 to 10 times as fast as SE-MoE, which fetches the whole next layer (section 5.3)",
            tuple((f"speed,batches-expertflow:{n},expertflow,whole next layer first", half(2)) for n in (8, 16, 32)),
            "ExpertFlow decodes {speed,batches-expertflow:8,expertflow,whole next layer first} times as fast as the"
            " baseline `whole next layer first` with 8 requests at once,"
            " {speed,batches-expertflow:16,expertflow,whole next layer first} times as fast with 16 requests, and"
            " {speed,batches-expertflow:32,expertflow,whole next layer first} times as fast with 32 requests."
            " ExpertFlow decodes {speed,batches-expertflow:8,expertflow,whole next layer} times as fast as the baseline"
            " `whole next layer` with 8 requests at once,"
            " {speed,batches-expertflow:16,expertflow,whole next layer} times as fast with 16 requests, and"
            " {speed,batches-expertflow:32,expertflow,whole next layer} times as fast with 32 requests.",
            MEDIUM,
            None,
            SAME_SLOTS,
        ),
        (
            "ExpertFlow's routing-path network predicts better than the previous token and affinity (table 1)",
            (("less,accuracy,previous-token,1,batch,routing-path,1,batch", half(0.49, 0)),
             ("less,accuracy,affinity,1,batch,routing-path,1,batch", half(0.58, 0))),
            "For 8 requests together, the accuracy is {share,accuracy,routing-path,1,batch} with the routing-path"
            " network, {share,accuracy,previous-token,1,batch} with the previous token's experts, and"
            " {share,accuracy,affinity,1,batch} with affinity. For one request, the accuracy is"
            " {share,accuracy,routing-path,1,accuracy} with the routing-path network,"
            " {share,accuracy,previous-token,1,accuracy} with the previous token's experts, and"
            " {share,accuracy,affinity,1,accuracy} with affinity.",
        ),
        (
            "ExpertFlow moves fewer experts than LRU (section 3.2)",
            tuple((f"moved,batches-expertflow:{n},expertflow,none", ANY) for n in (8, 16, 32)),
            "LRU moves {moved,batches-expertflow:8,expertflow,none} times as many experts as ExpertFlow with 8 requests"
            " at once, {moved,batches-expertflow:16,expertflow,none} times as many with 16 requests, and"
            " {moved,batches-expertflow:32,expertflow,none} times as many with 32 requests. With one request, LRU moves"
            " {moved,link-expertflow,expertflow,none} times as many experts as ExpertFlow.",
        ),
        (
            "When batches grow from 4 to 8 or 16 requests, ExpertFlow's hit rate falls by 3 or 6 percentage points, and"
            " LRU's falls by 11 or 18 (section 5.5)",
            (("steadier,batches-expertflow,expertflow,none,4,8", half(0.1099 - 0.0312, 0)),
             ("steadier,batches-expertflow,expertflow,none,4,16", half(0.1824 - 0.0605, 0))),
            "ExpertFlow's hit rate is {share,batches-expertflow,settings,4,expertflow,ready} with 4 requests at once,"
            " {share,batches-expertflow,settings,8,expertflow,ready} with 8 requests, and"
            " {share,batches-expertflow,settings,16,expertflow,ready} with 16 requests. LRU's hit rate is"
            " {share,batches-expertflow,settings,4,none,ready} with 4 requests at once,"
            " {share,batches-expertflow,settings,8,none,ready} with 8 requests, and"
            " {share,batches-expertflow,settings,16,none,ready} with 16 requests.",
        ),
        (
            "ExpertFlow's token scheduler saves experts and makes decoding 1.15 times as fast (section 3.3, table 3)",
            (("saved,scheduler,16,predicted", half(1.15) - 1),),
            "With [batches](evidence/batches.md) of 16 requests, ExpertFlow's scheduler reduces the distinct experts in"
            " a pass by {saved,scheduler,16,predicted}, compared with batches in the order of arrival. With batches of"
            " 16 requests, an oracle that groups tokens by their recorded routing reduces the distinct experts in a"
            " pass by {saved,scheduler,16,oracle}.",
        ),
        ("ExpertFlow saves 75 % of the GPU's memory, and 93.72 % in the best case (table 2)", OPEN, BUDGET),
        (
            "ExpertFlow's gain grows with the number of experts (section 5.3)",
            UNTESTED,
            "A test needs models that differ only in their number of experts.",
        ),
        (
            "ExpertFlow's dual batches hide the time of the predictor and the scheduler (section 5.5)",
            UNTESTED,
            "moegguf does not compute two batches in parallel.",
        ),
    ),
    *_claims(
        "duoserve",
        (
            "DuoServe-MoE is 1.42 to 7.54 times as fast, from the prompt to the end of the answer, as loading on"
            " demand or by layer (figure 5)",
            (("whole,pool-duoserve,duoserve,on demand", half(1.42)),
             ("whole,link-duoserve,duoserve,whole next layer first", half(1.42))),
            "With slots for a token's experts in two layers, DuoServe-MoE processes prompt and answer"
            " {whole,pool-duoserve,duoserve,on demand} times as fast as the baseline `on demand`. With a quarter of"
            " the experts in memory, DuoServe-MoE processes prompt and answer"
            " {whole,link-duoserve,duoserve,on demand} times as fast as the baseline `on demand`. With a quarter of"
            " the experts in memory, DuoServe-MoE processes prompt and answer"
            " {whole,link-duoserve,duoserve,whole next layer first} times as fast as the baseline `whole next layer"
            " first`, and {whole,link-duoserve,duoserve,whole next layer} times as fast as the baseline `whole next"
            " layer`.",
            MEDIUM,
            None,
            f"{SAME_SLOTS} {POOL}",
        ),
        (
            "DuoServe-MoE has 1.78 to 7.04 times the throughput of loading on demand or by layer (figure 6)",
            (("speed,pool-duoserve,duoserve,on demand", half(1.78)),
             ("speed,link-duoserve,duoserve,whole next layer first", half(1.78))),
            "With slots for a token's experts in two layers, DuoServe-MoE decodes"
            " {speed,pool-duoserve,duoserve,on demand} times as fast as the baseline `on demand`. With a quarter of"
            " the experts in memory, DuoServe-MoE decodes {speed,link-duoserve,duoserve,whole next layer first} times"
            " as fast as the baseline `whole next layer first`. With a quarter of the experts in memory, DuoServe-MoE"
            " decodes {speed,link-duoserve,duoserve,none} times as fast as LRU.",
            MEDIUM,
            None,
            f"{SAME_SLOTS} {POOL} The paper does not compare its strategy with LRU.",
        ),
        (
            "DuoServe-MoE computes the first token 1.78 to 3.8 times as fast as loading on demand or by layer (section"
            " 6.2)",
            (("first,pool-duoserve,duoserve,on demand", half(1.78)),
             ("first,link-duoserve,duoserve,whole next layer first", half(1.78))),
            "With slots for a token's experts in two layers, DuoServe-MoE processes prompts"
            " {first,pool-duoserve,duoserve,on demand} times as fast as the baseline `on demand`. With a quarter of"
            " the experts in memory, DuoServe-MoE processes prompts"
            " {first,link-duoserve,duoserve,whole next layer first} times as fast as the baseline `whole next layer"
            " first`. With a quarter of the experts in memory, DuoServe-MoE processes prompts"
            " {first,link-duoserve,duoserve,none} times as fast as LRU.",
            MEDIUM,
            None,
            f"{SAME_SLOTS} {POOL}",
        ),
        (
            "ExpertMLP predicts all experts of a token in 54 to 67 % of cases, and at least one in over 90 %"
            " (DuoServe-MoE, table 3)",
            (("share,accuracy,expert-mlp,1,all", half(0.54, 1 / 28)),
             ("share,accuracy,expert-mlp,1,any", half(0.9, 13 / 28))),
            "For a token in a layer, ExpertMLP predicts all experts in {share,accuracy,expert-mlp,1,all} of cases, and"
            " at least one expert in {share,accuracy,expert-mlp,1,any}. {share,accuracy,expert-mlp,1,accuracy} of the"
            " experts that ExpertMLP predicts are right.",
            LOW,
            "eight",
            "The claim needs a model whose tokens use 2 of 8 experts. The verdict in the column of the"
            " laboratory model is for a variant of this model with 8 experts per layer, of which a token uses 2. A"
            " random prediction of 2 of 8 experts contains both experts in 3.6 % of cases, and at least one in 46 %.",
        ),
        (
            "DuoServe-MoE's predictor uses 15 % of the memory, and its time of 0.6 ms is hidden (section 6.4, table 2)",
            OPEN,
            UNTIMED,
        ),
    ),
)  # fmt: skip
