// drafts.h: tokens that may come next, guessed by llama.cpp's own speculative code (its `common` library).
//
// This is a library of its own, over libllama, which itself needs libmoegguf. A draft comes from the sequence's own
// tokens (n-grams), or from a draft context. A draft context computes a smaller model, or the target's heads for more
// tokens than the next one (MTP). The caller verifies every token. All calls come from one thread, and no call throws.
// engine/drafts.py declares these functions for Python.
#pragma once

#include "llama.h"

#include <stdint.h>

#define DRAFTS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct drafts drafts;

// Sources of drafts, in the order in which they are tried: repetitions of the last `key` tokens, the longest key first,
// then the draft context.
enum drafts_source { DRAFTS_LONG_NGRAM, DRAFTS_SHORT_NGRAM, DRAFTS_MODEL, DRAFTS_SOURCES };

struct drafts_config {
    int32_t key[2]; // tokens of the long and the short n-gram; 0: none
    int32_t n_seq;  // sequences of the target context
    int32_t n_max;  // tokens of a draft at most
    struct llama_context * target;
    struct llama_context * draft; // or null; has as many sequences as the target; must outlive the drafts
    int32_t heads;                // 1: the draft context computes the target's own heads
};

// A request for a draft of one sequence, with at most `n_max` tokens of each source (0: the source is not tried). The
// reply is `n` tokens from `source` in `tokens`, which has room for the config's n_max.
struct drafts_request {
    int32_t sequence;
    int32_t n_max[DRAFTS_SOURCES];
    int32_t source;
    int32_t n;
    int32_t * tokens;
};

// Functions return null after success. Otherwise they return the reason, which is valid until the thread's next call.
DRAFTS_API const char * drafts_open(const struct drafts_config * config, drafts ** opened);
DRAFTS_API void drafts_close(drafts * drafts);

// Replaces the tokens of a sequence after its first `n_kept` by these.
DRAFTS_API const char * drafts_set_tokens(drafts * drafts, int32_t sequence, int32_t n_kept, const int32_t * tokens,
                                          int32_t n);
DRAFTS_API const char * drafts_draft(drafts * drafts, struct drafts_request * requests, int32_t n);

// Notes that the target context has just evaluated this batch. The target's heads evaluate it, too, if they draft. The
// tokens of a sequence follow each other in the batch.
DRAFTS_API const char * drafts_evaluated(drafts * drafts, const struct llama_batch * batch);
// Notes that n tokens of the sequence's last draft were accepted.
DRAFTS_API const char * drafts_accept(drafts * drafts, int32_t sequence, int32_t n);

#ifdef __cplusplus
}
#endif
