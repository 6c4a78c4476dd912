// eamc.cpp: MoE-Infinity's prediction (section 4.5): which experts past requests used that resemble the pass so far.
// The collection is the controller's, which adds requests that end; here it is matched (nearest.cpp).
// Touches its own tables only (predictor.h).
#include "predictors/predictor.h"

namespace moegguf {
namespace {

constexpr float least_norm2 = 1e-30f; // makes 0 / norm a similarity of 0
constexpr int most_matches = 64;

// Matched entries are added up, and each layer's row scaled to the experts that a token uses.
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
          scores_(capacity_),
          matches_(most_matches) {
        if (n_entries_ < 0 || n_entries_ > (int64_t)capacity_ || n_matches_ < 1 || n_matches_ > most_matches) {
            throw Error(MOEGGUF_INVALID,
                        "a collection has at most as many entries as there is space for, and a match "
                        "1 to " +
                            std::to_string(most_matches));
        }
        on_token(-1);
    }

    void on_token(int) override {
        std::fill(dot_.begin(), dot_.end(), 0.0f);
        std::fill(norm2_.begin(), norm2_.end(), least_norm2);
        n_found_ = 0;
        matched_ = true; // before the first layer there is nothing to match
    }

    void on_routing(const Observation & seen) override {
        if (seen.n_tokens != 1) {
            return;
        }
        std::fill(seen_.begin(), seen_.end(), 0.0f);
        for (int i = 0; i < seen.n_expert_used; i++) {
            seen_[seen.expert_ids[i]] += 1.0f;
        }
        moegguf_eamc_add_row(columns_ + layout_.key(seen.il, 0) * capacity_, capacity_, seen_.data(),
                             layout_.n_expert_max, row_norm2_ + seen.il * capacity_, n_entries_, dot_.data(),
                             norm2_.data());
        matched_ = false;
    }

    bool predict(int il, int, float * probabilities) override {
        if (!matched_) {
            moegguf_eamc_match(dot_.data(), norm2_.data(), tokens_, n_entries_, n_matches_, scores_.data(),
                               matches_.data(), &n_found_);
            matched_ = true;
        }
        const Layer & layer = layout_.layers[il];
        std::fill_n(probabilities, layer.n_expert, 0.0f);
        float total = 0.0f;
        for (int i = 0; i < n_found_; i++) {
            const float * row = entries_ + matches_[i] * layout_.n_keys() + layout_.key(il, 0);
            for (int e = 0; e < layer.n_expert; e++) {
                probabilities[e] += row[e];
            }
        }
        for (int e = 0; e < layer.n_expert; e++) {
            total += probabilities[e];
        }
        const float scale = layer.n_expert_used / std::max(total, least_norm2);
        for (int e = 0; e < layer.n_expert; e++) {
            probabilities[e] = std::min(probabilities[e] * scale, 1.0f);
        }
        return total > 0.0f;
    }

  private:
    const Layout & layout_;
    const int n_entries_;
    const int n_matches_;
    const size_t capacity_;
    const float * entries_;   // [capacity][n_layer][n_expert_max], tokens that used an expert
    const float * columns_;   // [n_layer][n_expert_max][capacity], the same
    const float * row_norm2_; // [n_layer][capacity]
    const float * tokens_;    // [capacity]
    std::vector<float> seen_; // [n_expert_max] by this layer
    std::vector<float> dot_;
    std::vector<float> norm2_;
    std::vector<float> scores_;
    std::vector<int64_t> matches_;
    int32_t n_found_ = 0;
    bool matched_ = true;
};

} // namespace

extern const PredictorType eamc_predictor;
const PredictorType eamc_predictor = {"eamc", false, true, make_predictor<Eamc>};

} // namespace moegguf
