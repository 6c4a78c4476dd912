// drafts.cpp: implements drafts.h with llama.cpp's common_speculative.
#include "drafts.h"

#include "log.h"
#include "speculative.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

// The following functions replace common/log.cpp, which would start a thread and need a JSON library. Messages from
// llama.cpp's `common` library are dropped. Messages from libllama still go to its own log.
int common_log_get_verbosity_thold() { return -1; }
common_log * common_log_main() { return nullptr; }
void common_log_add(common_log *, ggml_log_level, const char *, ...) {}

namespace {

// Minimum probability of a token from the draft context. A less probable token ends the draft, and is left out.
constexpr float least_probability = 0.5f;
// Largest number of tokens in a draft by MTP heads; each guess depends on the previous one.
constexpr int32_t most_by_heads = 4;

// The drafting state of one sequence. Each sequence has its own n-gram objects, because upstream's objects never forget
// tokens. When no token of a sequence is kept, its n-gram objects are replaced.
struct Sequence {
    common_speculative_ptr ngrams[2];
    llama_tokens tokens;
    llama_tokens draft;
    size_t n_followed = 0;           // number of leading tokens that the draft context has evaluated
    int32_t source = DRAFTS_SOURCES; // source of the draft that is being verified; DRAFTS_SOURCES: no draft
    bool by_model = false;           // true: the draft context's last draft was not empty
};

thread_local std::string last_error;

template <typename F>
const char * guarded(F && body) {
    try {
        body();
        return nullptr;
    } catch (const std::exception & error) {
        last_error = error.what();
        return last_error.c_str();
    }
}

} // namespace

struct drafts {
    explicit drafts(const drafts_config & config) : config(config), sequences(config.n_seq) {
        if (config.n_seq < 1 || config.n_max < 1) {
            throw std::invalid_argument("drafts need at least one sequence and a length of at least one token");
        }
        if (config.draft) {
            common_params_speculative params;
            params.types = {config.heads ? COMMON_SPECULATIVE_TYPE_DRAFT_MTP : COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE};
            params.draft.ctx_tgt = config.target;
            params.draft.ctx_dft = config.draft;
            params.draft.n_max = config.heads ? std::min(config.n_max, most_by_heads) : config.n_max;
            params.draft.p_min = least_probability;
            model.reset(common_speculative_init(params, config.n_seq));
        }
    }

    Sequence & sequence(int32_t number) { return sequences.at(number); }

    // Creates an object that drafts from repetitions of a sequence's last `key` tokens. A draft has up to n_max tokens
    // that followed the most recent earlier occurrence of these tokens, if at least `key` tokens followed it.
    // Otherwise, for example if a few tokens repeat over and over, the draft comes from an older occurrence that is
    // followed by more tokens, if there is one. A sequence of no more than key + n_max tokens gets no draft.
    common_speculative_ptr ngrams(int32_t key) const {
        common_params_speculative params;
        params.types = {COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE, COMMON_SPECULATIVE_TYPE_NGRAM_MAP_K};
        params.ngram_simple.size_n = params.ngram_map_k.size_n = key;
        params.ngram_simple.size_m = params.ngram_map_k.size_m = config.n_max;
        return common_speculative_ptr(common_speculative_init(params, 1));
    }

    void forget(Sequence & sequence) {
        for (int i = 0; i < 2; i++) { sequence.ngrams[i] = config.key[i] ? ngrams(config.key[i]) : nullptr; }
    }

    void set_tokens(int32_t number, int32_t n_kept, const int32_t * tokens, int32_t n) {
        Sequence & sequence = this->sequence(number);
        if (n_kept < 0 || n < 0 || (size_t)n_kept > sequence.tokens.size()) {
            throw std::out_of_range("a sequence can keep only tokens that it has");
        }
        if (n_kept == 0) { forget(sequence); }
        sequence.tokens.resize(n_kept);
        sequence.n_followed = std::min(sequence.n_followed, sequence.tokens.size());
        sequence.tokens.insert(sequence.tokens.end(), tokens, tokens + n);
    }

    // Drafts tokens for these requests with `source`, and writes the drafts into the requests. `number`: the source's
    // value in enum drafts_source.
    void ask(common_speculative * source, int32_t number, std::vector<drafts_request *> requests) {
        for (drafts_request * request : requests) {
            Sequence & sequence = this->sequence(request->sequence);
            sequence.draft.clear();
            auto & params = common_speculative_get_draft_params(source, number == DRAFTS_MODEL ? request->sequence : 0);
            params.drafting = true;
            params.n_max = request->n_max[number];
            params.pos0 = sequence.tokens.size() - 1;
            params.id_last = sequence.tokens.back();
            sequence.tokens.pop_back(); // `prompt` has all tokens but the last one
            params.prompt = &sequence.tokens;
            params.result = &sequence.draft;
        }
        common_speculative_draft(source);
        for (drafts_request * request : requests) {
            Sequence & sequence = this->sequence(request->sequence);
            sequence.tokens.push_back(
                common_speculative_get_draft_params(source, number == DRAFTS_MODEL ? request->sequence : 0).id_last);
            request->n = std::min((int32_t)sequence.draft.size(), request->n_max[number]);
            std::copy_n(sequence.draft.begin(), request->n, request->tokens);
            sequence.source = request->source = request->n ? number : DRAFTS_SOURCES;
            sequence.by_model = number == DRAFTS_MODEL ? request->n > 0 : sequence.by_model;
        }
    }

    void draft(drafts_request * requests, int32_t n) {
        std::vector<drafts_request *> left;
        for (drafts_request * request = requests; request < requests + n; request++) {
            Sequence & sequence = this->sequence(request->sequence);
            request->n = 0;
            request->source = DRAFTS_SOURCES;
            if (sequence.tokens.empty()) { continue; }
            for (int i = 0; i < 2 && request->n == 0; i++) {
                if (sequence.ngrams[i] && request->n_max[i] > 0) { ask(sequence.ngrams[i].get(), i, {request}); }
            }
            if (model && request->n == 0 && request->n_max[DRAFTS_MODEL] > 0 && follow(request->sequence)) {
                left.push_back(request);
            }
        }
        if (!left.empty()) { ask(model.get(), DRAFTS_MODEL, left); }
        for (drafts_request * request : left) {
            Sequence & sequence = this->sequence(request->sequence);
            sequence.n_followed = sequence.tokens.size() - (request->n == 0);
        }
    }

    // Evaluates all tokens of the sequence except the last with the draft model. If this fails, for example because the
    // draft context has no room, clears the sequence in the draft context and returns false. MTP heads evaluate nothing
    // here, because they evaluate each pass of the target. For heads, returns true if they have evaluated exactly all
    // tokens except the last.
    bool follow(int32_t number) {
        Sequence & sequence = this->sequence(number);
        llama_memory_t memory = llama_get_memory(config.draft);
        const size_t n = sequence.tokens.size() - 1,
                     n_batch = llama_n_batch(config.draft); // n excludes the last token, from which the draft starts
        if (config.heads) { return llama_memory_seq_pos_max(memory, number) + 1 == (llama_pos)n; }
        sequence.n_followed = std::min(sequence.n_followed, n);
        bool fits = llama_memory_seq_rm(memory, number, sequence.n_followed, -1);
        while (fits && sequence.n_followed < n) {
            common_batch batch;
            for (; batch.tokens.size() < n_batch && sequence.n_followed < n; sequence.n_followed++) {
                common_batch::token token = {};
                token.id = sequence.tokens[sequence.n_followed];
                token.pos[0] = sequence.n_followed;
                token.seq_id = number;
                batch.tokens.push_back(token);
            }
            fits = common_speculative_process(model.get(), batch);
        }
        if (!fits) {
            llama_memory_seq_rm(memory, number, -1, -1);
            sequence.n_followed = 0;
        }
        return fits;
    }

    // Evaluates the target's pass with the heads. Does nothing if there are no heads. First removes, from each sequence
    // of the pass, the positions at and after its first token in the pass. They are left over from drafts, or from
    // tokens that the target has removed. If positions before the pass are missing, as in a restored or copied context,
    // removes the whole sequence, and the heads start over at this pass. If the heads cannot evaluate the pass, removes
    // all sequences.
    void evaluated(const llama_batch & pass) {
        if (!model || !config.heads) { return; }
        llama_memory_t memory = llama_get_memory(config.draft);
        common_batch batch;
        for (int32_t i = 0; i < pass.n_tokens; i++) {
            const llama_seq_id number = pass.seq_id[i][0];
            if (i == 0 || number != pass.seq_id[i - 1][0]) {
                llama_memory_seq_rm(memory, number, pass.pos[i], -1);
                if (llama_memory_seq_pos_max(memory, number) + 1 != pass.pos[i]) {
                    llama_memory_seq_rm(memory, number, -1, -1);
                }
            }
            common_batch::token token = {};
            token.id = pass.token[i];
            token.pos[0] = pass.pos[i];
            token.seq_id = number;
            batch.tokens.push_back(token);
        }
        if (!common_speculative_process(model.get(), batch)) { llama_memory_clear(memory, false); }
    }

    // Notes that the first n tokens of the sequence's last draft were accepted. Does nothing if there was no draft.
    // Heads that have drafted before are also notified about an n-gram draft, and continue from the last accepted
    // token.
    void accept(int32_t number, int32_t n) {
        Sequence & sequence = this->sequence(number);
        const int32_t source = std::exchange(sequence.source, DRAFTS_SOURCES);
        if (source == DRAFTS_MODEL || (source < DRAFTS_MODEL && config.heads && sequence.by_model)) {
            common_speculative_accept(model.get(), number, n);
        }
        if (source < DRAFTS_MODEL) { common_speculative_accept(sequence.ngrams[source].get(), 0, n); }
    }

    const drafts_config config;
    common_speculative_ptr model;
    std::vector<Sequence> sequences;
};

extern "C" {

const char * drafts_open(const drafts_config * config, drafts ** opened) {
    return guarded([&] { *opened = new drafts(*config); });
}

void drafts_close(drafts * drafts) { delete drafts; }

const char * drafts_set_tokens(drafts * drafts, int32_t sequence, int32_t n_kept, const int32_t * tokens, int32_t n) {
    return guarded([&] { drafts->set_tokens(sequence, n_kept, tokens, n); });
}

const char * drafts_draft(drafts * drafts, drafts_request * requests, int32_t n) {
    return guarded([&] { drafts->draft(requests, n); });
}

const char * drafts_evaluated(drafts * drafts, const llama_batch * batch) {
    return guarded([&] { drafts->evaluated(*batch); });
}

const char * drafts_accept(drafts * drafts, int32_t sequence, int32_t n) {
    return guarded([&] { drafts->accept(sequence, n); });
}
}
