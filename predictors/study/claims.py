"""What four papers claim, and what was found here: the first table of docs/evidence.md.

A verdict is one of VERDICTS: a gain holds where at least half of it is there. Its confidence says how far the setting
is the paper's: medium for the simulator at the paper's times on the laboratory model, low for less. Figures in braces
come from the recorded results (`predictors/study/render.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

HOLDS, FAILS, UNTESTED, OPEN = "holds", "fails", "not tested", "cannot be judged"
VERDICTS = (HOLDS, FAILS, UNTESTED, OPEN)


@dataclass(frozen=True)
class Claim:
    """A paper's headline claim, whence, and what was found."""

    paper: str
    text: str
    verdict: str
    confidence: str
    figure: str


CLAIMS = (
    Claim(
        "moe-infinity", "3.1 to 16.7 times less time per token than vLLM, Ollama, DeepSpeed, BrainStorm (table 1)",
        OPEN, "", "needs those programs on a GPU",
    ),
    Claim(
        "moe-infinity", "faster than LRU in the same store (4.2, figures 6, 7)", FAILS, "medium",
        "{speed,link-moe-infinity,moe-infinity,none}; {share,link-moe-infinity,systems,moe-infinity,useful} of what it"
        " fetches ahead is used",
    ),
    Claim(
        "moe-infinity", "faster than counting, as BrainStorm does (4.2, figure 6)", HOLDS, "medium",
        "{speed,link-moe-infinity,moe-infinity,counting}",
    ),
    Claim(
        "moe-infinity", "algorithm 1 evicts better than LRU and counting (4.7)", FAILS, "medium",
        "without prefetching {speed,link-moe-infinity,algorithm 1 alone,none} of LRU,"
        " {speed,link-moe-infinity,algorithm 1 alone,counting} of counting",
    ),
    Claim(
        "moe-infinity", "use is skewed within a request and uniform over many (4.2, figure 2)", HOLDS, "medium",
        "evenness of use {number,reuse,within,entropy} in a request, {number,reuse,same_size,entropy} in as many"
        " tokens of all requests, {number,reuse,merged,entropy} over all",
    ),
    Claim(
        "moe-infinity", "a request activates few experts: under 5 % of about 100 (4.1)", FAILS, "low",
        "{spread,reuse,used_by_request} of them are used by a request of some 80 tokens",
    ),
    Claim(
        "moe-infinity", "matched EAMs predict what comes (4.5)", HOLDS, "low",
        "one layer ahead {share,accuracy,eamc,1,accuracy} right, {share,accuracy,eamc,1,shuffled} with tokens shuffled"
        " (the request as a whole tells it); the previous token {share,accuracy,previous-token,1,accuracy}, skip"
        " {share,accuracy,skip,1,accuracy}",
    ),
    Claim(
        "moe-infinity", "a collection of 120 is enough (figure 9)", UNTESTED, "",
        "the collections here have 120; other sizes: `--only capacity`",
    ),
    Claim("moe-infinity", "recovers within 50 requests of a shift (table 3)", UNTESTED, "", ""),
    Claim(
        "moe-infinity", "its slowest is near its average: 169 of 155 ms (table 1)", UNTESTED, "",
        "of requests, not tokens: the slowest {tail,link-moe-infinity,moe-infinity} of the middle one, LRU"
        " {tail,link-moe-infinity,none}",
    ),
    Claim("moe-infinity", "long contexts; experts placed over several devices", UNTESTED, "",
          "experts are not placed by hash here"),
    Claim(
        "promoe", "2.13 and 2.84 times as fast as offloading in transformers and llama.cpp (abstract)", OPEN, "",
        "needs those programs on a GPU",
    ),
    Claim(
        "promoe",
        "decodes 1.33 times as fast as LRU in transformers, 1.09 in llama.cpp (figures 11, 12)", HOLDS, "medium",
        "{speed,link-promoe,promoe,none}; with half of the experts {speed,link-promoe-50,promoe,none}",
    ),
    Claim(
        "promoe", "1.49 to 1.52 times a static cache (figures 11, 12)", HOLDS, "medium",
        "{speed,link-promoe,promoe,static}",
    ),
    Claim(
        "promoe", "2.6 times less loading on the critical path (abstract)", FAILS, "medium",
        "{stall,link-promoe,promoe,none}; with half of the experts {stall,link-promoe-50,promoe,none}",
    ),
    Claim(
        "promoe", "prefetching, chunks and early preemption each gain, with reordering 1.37 times (figure 13)", FAILS,
        "medium", "each with those before: {speed,ablation,+ prefetching}, {speed,ablation,+ chunks},"
        " {speed,ablation,+ early preemption}; reordering: not seen where a layer is computed at once",
    ),
    Claim(
        "promoe", "skip's accuracy falls with distance, 90.5 to 54.5 % from 1 to 8 (figure 8)", HOLDS, "low",
        "{share,accuracy,skip,1,accuracy} to {share,accuracy,skip,8,accuracy}; the model's routers were fitted to it",
    ),
    Claim(
        "promoe", "the learned predictor keeps its accuracy (figures 8, 9)", FAILS, "low",
        "four layers ahead {share,accuracy,mlp,4,accuracy}, skip {share,accuracy,skip,4,accuracy}; after 3 epochs of"
        " 20,836 tokens",
    ),
    Claim(
        "promoe", "a token's table is right about 54 % (figure 8)", HOLDS, "low",
        "{share,accuracy,token-id,1,accuracy}, after 180 requests",
    ),
    Claim(
        "promoe", "prefill 2.12 to 2.32 times LRU (figures 11, 12)", FAILS, "low",
        "live on the demo model 1.03x: the store sweeps prompts under LRU as well, so LRU does not thrash",
    ),
    Claim("promoe", "GOODPRED by predictor; batch size; precision (figures 18 to 25)", UNTESTED, "", ""),
    Claim(
        "expertflow", "hits 15 to 36 points above LRU's, 27.65 on average (5.5)", HOLDS, "medium",
        "{share,link-expertflow,systems,expertflow,hits} against {share,link-expertflow,systems,none,hits}, what is on"
        " its way included; one request at a time",
    ),
    Claim(
        "expertflow", "2 to 10 times baselines (abstract), 1.96 times an LRU cache on Mixtral (5.3)", FAILS, "medium",
        "{speed,link-expertflow,expertflow,none} of LRU",
    ),
    Claim(
        "expertflow",
        "the routing-path network predicts better than previous token and affinity (table 1)", HOLDS, "medium",
        "{share,accuracy,routing-path,1,accuracy}, {share,accuracy,previous-token,1,accuracy} and"
        " {share,accuracy,affinity,1,accuracy} right one layer ahead",
    ),
    Claim(
        "expertflow", "fewer experts moved (3.2)", FAILS, "medium",
        "{number,link-expertflow,systems,expertflow,experts} a token against"
        " {number,link-expertflow,systems,none,experts}",
    ),
    Claim(
        "expertflow", "the token scheduler saves experts, 1.15 times as fast (3.3, table 3)", FAILS, "medium",
        "fewer experts a pass by 1 to 4 %, an oracle 4.5 to 6.5 %: [batches](evidence/batches.md)",
    ),
    Claim(
        "expertflow",
        "75 % of the memory saved, 93.72 at most (table 2)", OPEN, "", "a store's size is its budget here",
    ),
    Claim(
        "expertflow", "gains grow with experts; hits stable over batch sizes; dual batch (5.3, 5.5)", UNTESTED, "", "",
    ),
    Claim(
        "duoserve", "end to end 1.42 to 7.54 times loading on demand or by layer (figure 5)", UNTESTED, "",
        "nor against these bases; earlier, on the demo model, 0.86x of LRU simulated and 0.63x live",
    ),
    Claim("duoserve", "throughput 1.78 to 7.04 times (figure 6)", UNTESTED, "", "decoding: as above"),
    Claim(
        "duoserve", "first token 1.78 to 3.8 times as soon (6.2)", FAILS, "low",
        "0.95x of LRU live where slots suffice; 5 times where they do not: [DuoServe-MoE](evidence/duoserve.md)",
    ),
    Claim(
        "duoserve", "ExpertMLP: all right in 54 to 67 %, one right in over 90 % (table 3)", FAILS, "low",
        "of the demo model 3.7 % and 79.2 %, for 4 of 32 experts instead of 2 of 8",
    ),
    Claim("duoserve", "the predictor costs 0.6 ms, hidden (6.4); 15 % of the memory (table 2)", OPEN, "",
          "the simulated time has no predictor; a store's size is its budget here"),
)  # fmt: skip
