// counts.cpp: predictors that look up earlier uses in a table. The key is the layer, a token id, the experts of the
// previous layer, or a similar request. The predictors touch only their own tables (predictor.h).
#include "predictors/predictor.h"

#include <numeric>

namespace moegguf {
namespace {

// Predicts for each layer the experts that the last observed token used there, even if this token belonged to an
// earlier sequence. These experts get probability 1, and all others 0. After a pass of many tokens, only the last token
// matters. Needs no training.
class PreviousToken final : public Predictor {
  public:
    PreviousToken(const Layout & layout, const Arrays &)
        : layout_(layout),
          used_(layout.n_keys(), 0.0f),
          seen_(layout.layers.size(), 0) {}

    void on_routing(const Observation & seen) override {
        float * used = &used_[layout_.key(seen.il, 0)];
        std::fill_n(used, layout_.layers[seen.il].n_expert, 0.0f);
        for (int i = 0; i < seen.n_expert_used; i++) { used[seen.expert_ids[i]] = 1.0f; }
        seen_[seen.il] = 1;
    }

    bool predict(int il, int, float * probabilities) override {
        std::copy_n(&used_[layout_.key(il, 0)], layout_.layers[il].n_expert, probabilities);
        return seen_[il];
    }

  private:
    const Layout & layout_;
    std::vector<float> used_;   // [n_layer * n_expert_max]
    std::vector<uint8_t> seen_; // [n_layer]
};

// ProMoE's token-based prediction (section 4.2): predicts the experts that tokens with this id used most often, for all
// layers at once. A probability is the share of the id's occurrences that used the expert. Each count includes one
// occurrence of an average token, so an id without an entry gets the average.
class TokenTable final : public Predictor {
  public:
    TokenTable(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          n_vocab_(arrays.size("entry_of")),
          entry_of_(arrays.integers("entry_of", 0)),
          average_(arrays.floats("average", entry_size())),
          n_entries_(arrays.size("counts") / entry_size()),
          counts_(arrays.size("counts") ? arrays.counts("counts", n_entries_ * entry_size()) : nullptr) {
        for (size_t token = 0; token < n_vocab_; token++) {
            if (entry_of_[token] >= (int64_t)n_entries_) {
                throw Error(MOEGGUF_INVALID, "token " + std::to_string(token) + " has an entry that does not exist");
            }
        }
    }

    void on_token(int token) override { token_ = token; }

    bool predict(int il, int, float * probabilities) override {
        if (token_ < 0 || token_ >= (int64_t)n_vocab_) { return false; }
        const int n_expert = layout_.layers[il].n_expert, entry = entry_of_[token_];
        const size_t row = layout_.row_of[il] * layout_.n_expert_max;
        std::copy_n(average_ + row, n_expert, probabilities);
        uint32_t uses = 0;
        if (entry >= 0) {
            const uint16_t * counts = counts_ + entry * entry_size() + row;
            for (int e = 0; e < n_expert; e++) {
                uses += counts[e];
                probabilities[e] += counts[e];
            }
        }
        const float occurrences = (float)uses / layout_.layers[il].n_expert_used + 1.0f;
        std::transform(probabilities, probabilities + n_expert, probabilities,
                       [=](float n) { return std::min(n / occurrences, 1.0f); });
        return true;
    }

  private:
    size_t entry_size() const { return (size_t)layout_.n_moe_layers * layout_.n_expert_max; }

    const Layout & layout_;
    const size_t n_vocab_;
    const int32_t * const entry_of_; // [n_vocab] index of the id's entry in counts_; -1: none
    const float * const average_;    // [n_moe_layers][n_expert_max] share of all tokens that use the expert
    const size_t n_entries_;
    // [n_entries][n_moe_layers][n_expert_max] number of times that a token with the entry's id used the expert.
    const uint16_t * const counts_;
    int token_ = -1;
};

// DuoServe-MoE's affinity between layers (section 4.1). The probabilities are the mean of the chosen experts' rows in
// the affinity matrix, times the number of experts that a token uses, capped at 1. Predicts one layer ahead, and only
// if the sequence has one token in this pass.
class Affinity final : public Predictor {
  public:
    Affinity(const Layout & layout, const Arrays & arrays) : layout_(layout), affinity_(affinity_of(layout, arrays)) {}

    void on_token(int) override { seen_ = {}; }
    void on_routing(const Observation & seen) override { seen_ = seen; }

    bool predict(int il, int distance, float * probabilities) override {
        if (distance != 1 || seen_.n_tokens != 1 || layout_.row_of[seen_.il] + 1 != layout_.row_of[il]) {
            return false;
        }
        const Layer & layer = layout_.layers[il];
        const size_t width = layout_.n_expert_max, first = layout_.row_of[seen_.il] * width;
        std::fill_n(probabilities, layer.n_expert, 0.0f);
        for (int i = 0; i < seen_.n_expert_used; i++) {
            add(probabilities, affinity_ + (first + seen_.expert_ids[i]) * width, layer.n_expert);
        }
        scale_probabilities(probabilities, layer.n_expert, (float)layer.n_expert_used / seen_.n_expert_used);
        return true;
    }

  private:
    const Layout & layout_;
    const float * affinity_;
    Observation seen_;
};

// Two squared cosines are treated as equal if the smaller one is more than this share of the larger one. Rounding alone
// can cause such a difference.
constexpr float nearly = 1.0f - 2e-6f;
// The initial value of a squared norm, which avoids 0 / 0. Also the smallest score with which an entry matches.
constexpr float least_norm2 = 1e-30f;
constexpr int most_matches = 64;

struct Found {
    float score;
    float tokens;
    int32_t index;
};

// Returns true if entry a is a better match than b. The higher score decides, then the larger number of tokens, then
// the higher index.
bool before(const Found & a, const Found & b) {
    if (a.score != b.score) { return a.score > b.score; }
    return a.tokens != b.tokens ? a.tokens > b.tokens : a.index > b.index;
}

// MoE-Infinity's prediction (section 4.5): predicts the experts that similar past requests used. The routing of the
// pass so far is compared with a collection of past requests, which the controller fills. The counts of the best
// matches are added up. Each layer's counts are scaled so that their sum is the number of experts that a token uses. No
// probability exceeds 1.
class Eamc final : public Predictor {
  public:
    Eamc(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          n_entries_(arrays.integer("n_entries")),
          n_matches_(arrays.integer("n_matches")),
          capacity_(arrays.size("tokens")),
          entries_(arrays.floats("entries", capacity_ * layout.n_keys())),
          columns_(arrays.floats("columns", capacity_ * layout.n_keys())),
          row_norm2_(arrays.floats("row_norm2", capacity_ * layout.layers.size())),
          tokens_(arrays.floats("tokens", capacity_)),
          seen_(layout.n_expert_max),
          dot_(capacity_),
          norm2_(capacity_),
          scores_(capacity_) {
        if (n_entries_ < 0 || n_entries_ > (int64_t)capacity_ || n_matches_ < 1 || n_matches_ > most_matches) {
            throw Error(MOEGGUF_INVALID,
                        "a collection must have at most as many entries as there is space for, and its number of "
                        "matches must be 1 to " +
                            std::to_string(most_matches));
        }
        on_token(-1);
    }

    void on_token(int) override {
        std::fill(dot_.begin(), dot_.end(), 0.0f);
        std::fill(norm2_.begin(), norm2_.end(), least_norm2);
        n_found_ = 0;
        matched_ = true; // match() need not run, because no layer of the pass has been observed yet
    }

    void on_routing(const Observation & seen) override {
        if (seen.n_tokens != 1) { return; }
        std::fill(seen_.begin(), seen_.end(), 0.0f);
        for (int i = 0; i < seen.n_expert_used; i++) { seen_[seen.expert_ids[i]] += 1.0f; }
        const float * column = columns_ + layout_.key(seen.il, 0) * capacity_;
        for (int e = 0; e < layout_.n_expert_max; e++, column += capacity_) {
            const float count = seen_[e];
            for (int i = 0; count != 0.0f && i < n_entries_; i++) { dot_[i] += count * column[i]; }
        }
        add(norm2_.data(), row_norm2_ + seen.il * capacity_, n_entries_);
        matched_ = false;
    }

    bool predict(int il, int, float * probabilities) override {
        if (!matched_) { match(); }
        const Layer & layer = layout_.layers[il];
        std::fill_n(probabilities, layer.n_expert, 0.0f);
        for (int i = 0; i < n_found_; i++) {
            add(probabilities, entries_ + best_[i].index * layout_.n_keys() + layout_.key(il, 0), layer.n_expert);
        }
        const float total = std::accumulate(probabilities, probabilities + layer.n_expert, 0.0f);
        scale_probabilities(probabilities, layer.n_expert, layer.n_expert_used / std::max(total, least_norm2));
        return total > 0.0f;
    }

  private:
    // Finds the entries that are most similar to the pass so far, by the cosine between their use counts. Among equally
    // similar entries, it prefers entries with more tokens.
    void match() {
        const int n = n_matches_;
        float top[most_matches] = {};
        for (int i = 0; i < n_entries_; i++) {
            scores_[i] = dot_[i] * dot_[i] / norm2_[i];
            for (int at = n - 1; at >= 0 && scores_[i] > top[at]; at--) {
                if (at < n - 1) { top[at + 1] = top[at]; }
                top[at] = scores_[i];
            }
        }
        const float bar = std::max(least_norm2, top[n - 1] * nearly);
        n_found_ = 0;
        for (int i = 0; i < n_entries_; i++) {
            if (!(scores_[i] >= bar)) { continue; }
            // Entries that are about as similar as the worst match all get the score 0. So their numbers of tokens
            // decide which of them match.
            const Found found{scores_[i] * nearly <= bar ? 0.0f : scores_[i], tokens_[i], i};
            int at = std::min(n_found_, n - 1);
            if (n_found_ == n && !before(found, best_[at])) { continue; }
            for (; at > 0 && before(found, best_[at - 1]); at--) { best_[at] = best_[at - 1]; }
            best_[at] = found;
            n_found_ = std::min(n_found_ + 1, n);
        }
        matched_ = true;
    }

    const Layout & layout_;
    const int n_entries_, n_matches_;
    const size_t capacity_;
    const float * entries_;   // [capacity][n_layer][n_expert_max] number of an entry's tokens that used the expert
    const float * columns_;   // [n_layer][n_expert_max][capacity] the numbers of entries_ in a different order
    const float * row_norm2_; // [n_layer][capacity] squared norm of an entry's row
    const float * tokens_;    // [capacity] number of an entry's tokens
    std::vector<float> seen_; // [n_expert_max] uses of each expert in the observed layer
    std::vector<float> dot_, norm2_, scores_;
    Found best_[most_matches];
    int n_found_ = 0;
    bool matched_ = true;
};

} // namespace

const PredictorType previous_token_predictor = {"previous-token", false, false, make_predictor<PreviousToken>};
const PredictorType token_table_predictor = {"token-id", false, false, make_predictor<TokenTable>};
const PredictorType affinity_predictor = {"affinity", false, false, make_predictor<Affinity>};
const PredictorType eamc_predictor = {"eamc", false, true, make_predictor<Eamc>};

} // namespace moegguf
