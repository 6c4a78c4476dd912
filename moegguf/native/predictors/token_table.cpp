// token_table.cpp: ProMoE's token-based prediction (section 4.2): experts that a token id used most often, all layers
// at once.
// Touches its own tables only (predictor.h).
#include "predictors/predictor.h"

namespace moegguf {
namespace {

// A probability is the share of the token's occurrences that used the expert, with one occurrence of an average token
// added; tokens without an entry get the average.
class TokenTable final : public Predictor {
  public:
    TokenTable(const Layout & layout, const Arrays & arrays)
        : layout_(layout),
          n_vocab_(arrays.size("entry_of")),
          entry_of_(arrays.integers("entry_of", 0)),
          average_(arrays.floats("average", row_size() * layout.n_moe_layers)) {
        const size_t entry_size = row_size() * layout.n_moe_layers;
        n_entries_ = arrays.size("counts") / entry_size;
        counts_ = arrays.size("counts") ? arrays.counts("counts", n_entries_ * entry_size) : nullptr;
        for (size_t token = 0; token < n_vocab_; token++) {
            if (entry_of_[token] >= (int64_t)n_entries_) {
                throw Error(MOEGGUF_INVALID, "token " + std::to_string(token) + " has an entry that does not exist");
            }
        }
    }

    void on_token(int token) override { token_ = token; }

    bool predict(int il, int, float * probabilities) override {
        if (token_ < 0 || token_ >= (int64_t)n_vocab_) {
            return false;
        }
        const int n_expert = layout_.layers[il].n_expert;
        const size_t row = layout_.row_of[il];
        const float * average = average_ + row * row_size();
        const int entry = entry_of_[token_];
        if (entry < 0) {
            std::transform(average, average + n_expert, probabilities,
                           [](float share) { return std::min(share, 1.0f); });
            return true;
        }
        const uint16_t * counts = counts_ + (entry * (size_t)layout_.n_moe_layers + row) * row_size();
        uint32_t uses = 0;
        for (int e = 0; e < n_expert; e++) {
            uses += counts[e];
        }
        const float occurrences = (float)uses / layout_.layers[il].n_expert_used + 1.0f;
        for (int e = 0; e < n_expert; e++) {
            probabilities[e] = std::min((counts[e] + average[e]) / occurrences, 1.0f);
        }
        return true;
    }

  private:
    size_t row_size() const { return layout_.n_expert_max; }

    const Layout & layout_;
    size_t n_vocab_;
    const int32_t * entry_of_; // [n_vocab], -1: none
    const float * average_;    // [n_moe_layers][n_expert_max], how often a token uses an expert
    size_t n_entries_ = 0;
    const uint16_t * counts_ = nullptr; // [n_entries][n_moe_layers][n_expert_max]
    int token_ = -1;
};

} // namespace

extern const PredictorType token_table_predictor;
const PredictorType token_table_predictor = {"token-id", false, false, make_predictor<TokenTable>};

} // namespace moegguf
