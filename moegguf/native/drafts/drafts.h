// drafts.h: tokens that may come next, guessed by llama.cpp's own speculative code (its `common` library).
//
// A library of its own, over libllama, which itself needs libmoegguf. A draft comes from the sequence's own tokens
// (n-grams), or from a draft context: of a smaller model, or of the target's heads for more tokens than the next one
// (MTP). Who asks verifies every token. Calls are of one thread; none may throw. engine/drafts.py has them again.
#pragma once

#include "llama.h"

#include <stdint.h>

#define DRAFTS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct drafts drafts;

// Sources of drafts, in the order in which they are asked: repetitions of the last `key` tokens, longest key first,
// then the draft context.
enum drafts_source { DRAFTS_LONG_NGRAM, DRAFTS_SHORT_NGRAM, DRAFTS_MODEL, DRAFTS_SOURCES };

struct drafts_config {
    int32_t key[2]; // tokens of the long and the short n-gram; 0: none
    int32_t n_seq;  // sequences of the target context
    int32_t n_max;  // tokens of a draft at most
    struct llama_context * target;
    struct llama_context * draft; // or null; with as many sequences as the target; must outlive the drafts
    int32_t heads;                // the draft context is of the target's own heads
};

// A sequence that wants a draft: at most `n_max` tokens of each source (0: do not ask it) go to `tokens`, which has
// room for the config's n_max; `n` of them, from `source`, are the answer.
struct drafts_request {
    int32_t sequence;
    int32_t n_max[DRAFTS_SOURCES];
    int32_t source;
    int32_t n;
    int32_t * tokens;
};

// Null after success, else the reason: valid until the thread's next call.
DRAFTS_API const char * drafts_open(const struct drafts_config * config, drafts ** opened);
DRAFTS_API void drafts_close(drafts * drafts);

// The tokens of a sequence are these from now on, after its first `n_kept`.
DRAFTS_API const char * drafts_set_tokens(drafts * drafts, int32_t sequence, int32_t n_kept, const int32_t * tokens,
                                          int32_t n);
DRAFTS_API const char * drafts_draft(drafts * drafts, struct drafts_request * requests, int32_t n);

// The target context has just evaluated this batch, in which the tokens of a sequence follow each other: its heads, if
// these draft, evaluate it, too.
DRAFTS_API const char * drafts_evaluated(drafts * drafts, const struct llama_batch * batch);
// So many tokens of the sequence's last draft were taken.
DRAFTS_API const char * drafts_accept(drafts * drafts, int32_t sequence, int32_t n);

#ifdef __cplusplus
}
#endif
