// drafts.h: guesses the next tokens of sequences with llama.cpp's own speculative decoding (in its `common` library).
// Such a guess is called a draft.
//
// This is a separate library, because it needs libllama, and libllama needs libmoegguf. A draft repeats earlier tokens
// of the sequence (n-grams), or comes from a draft context. A draft context evaluates a smaller model, or the target
// model's own heads for further tokens (MTP). The caller must verify every token. All calls must come from one thread.
// No call throws. moegguf/engine/drafts.py declares these functions for Python.
#pragma once

#include "llama.h"

#include <stdint.h>

#define DRAFTS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct drafts drafts;

// Sources of drafts, in the order in which they are tried: the long n-gram, the short n-gram, the draft context. An
// n-gram draft consists of the tokens after an earlier occurrence of the last `key` tokens. DRAFTS_SOURCES is the
// number of sources, and also means "no source".
enum drafts_source { DRAFTS_LONG_NGRAM, DRAFTS_SHORT_NGRAM, DRAFTS_MODEL, DRAFTS_SOURCES };

struct drafts_config {
    int32_t key[2]; // lengths of the long and the short n-gram, in tokens; 0: not used
    int32_t n_seq;  // number of sequences in the target context
    int32_t n_max;  // largest number of tokens in a draft
    struct llama_context * target;
    struct llama_context * draft; // draft context or NULL; has as many sequences as the target; must outlive the drafts
    int32_t heads;                // 1: the draft context evaluates the target model's own heads (MTP)
};

// A request for a draft of one sequence. n_max is the largest number of tokens from each source; 0: the source is not
// tried. The answer is `n` tokens in `tokens`, and the `source` that produced them. Without a draft, `n` is 0 and
// `source` is DRAFTS_SOURCES. `tokens` must have room for the config's n_max.
struct drafts_request {
    int32_t sequence;
    int32_t n_max[DRAFTS_SOURCES];
    int32_t source;
    int32_t n;
    int32_t * tokens;
};

// Functions that return a string return NULL on success, and otherwise the reason for the failure. This string is valid
// until the thread's next call.
DRAFTS_API const char * drafts_open(const struct drafts_config * config, drafts ** opened);
DRAFTS_API void drafts_close(drafts * drafts);

// Keeps the first `n_kept` tokens of a sequence, and replaces the tokens after them with these n tokens.
DRAFTS_API const char * drafts_set_tokens(drafts * drafts, int32_t sequence, int32_t n_kept, const int32_t * tokens,
                                          int32_t n);
DRAFTS_API const char * drafts_draft(drafts * drafts, struct drafts_request * requests, int32_t n);

// Must be called right after the target context has evaluated this batch. If the target's heads make drafts, they also
// evaluate the batch. The tokens of each sequence must be consecutive in the batch.
DRAFTS_API const char * drafts_evaluated(drafts * drafts, const struct llama_batch * batch);
// Must be called after the first n tokens of the sequence's last draft have been accepted.
DRAFTS_API const char * drafts_accept(drafts * drafts, int32_t sequence, int32_t n);

#ifdef __cplusplus
}
#endif
