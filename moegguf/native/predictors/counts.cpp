// counts.cpp: predictors that look up in a table what was used before: by the last token, by a token id, or after the
// experts of the layer before. Touch their own tables only (predictor.h).
#include "predictors/predictor.h"

namespace moegguf {
namespace {

// The experts that the last token used at a layer: probability 1 for these, 0 for the others. Of a pass of many tokens,
// the last one counts. Needs no training.
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

// ProMoE's token-based prediction (section 4.2): experts that a token id used most often, all layers at once. A
// probability is the share of the token's occurrences that used the expert, with one occurrence of an average token
// added; tokens without an entry get the average.
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
    const int32_t * const entry_of_; // [n_vocab], -1: none
    const float * const average_;    // [n_moe_layers][n_expert_max], how often a token uses an expert
    const size_t n_entries_;
    const uint16_t * const counts_; // [n_entries][n_moe_layers][n_expert_max]
    int token_ = -1;
};

// DuoServe-MoE's affinity between layers (section 4.1): the mean of the chosen experts' rows of the affinity matrix,
// whose rows add up to 1, times the experts that a token uses. One layer ahead, of a sequence that decodes.
class Affinity final : public Predictor {
  public:
    Affinity(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          affinity_(layout.n_moe_layers > 1 ? arrays.floats("affinity", n_pairs(layout)) : nullptr) {}

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
    const float * affinity_; // [n_moe_layers - 1][n_expert_max][n_expert_max]
    Observation seen_;
};

} // namespace

const PredictorType previous_token_predictor = {"previous-token", false, false, make_predictor<PreviousToken>};
const PredictorType token_table_predictor = {"token-id", false, false, make_predictor<TokenTable>};
const PredictorType affinity_predictor = {"affinity", false, false, make_predictor<Affinity>};

} // namespace moegguf
