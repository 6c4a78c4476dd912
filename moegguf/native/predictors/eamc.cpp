// eamc.cpp: MoE-Infinity's prediction (section 4.5): which experts past requests used that resemble the pass so far.
// The collection is the controller's, which adds requests that end; here it is matched. Touches its own tables only
// (predictor.h).
#include "predictors/predictor.h"

#include <numeric>

namespace moegguf {
namespace {

constexpr float nearly = 1.0f - 2e-6f; // squared cosines closer than this are the same in float32
constexpr float least_norm2 = 1e-30f;  // makes 0 / norm a similarity of 0; the least similarity, too
constexpr int most_matches = 64;

struct Found {
    float score;
    float tokens;
    int32_t index;
};

// The nearest first; of equals the one with more tokens, then the later one.
bool before(const Found & a, const Found & b) {
    if (a.score != b.score) { return a.score > b.score; }
    return a.tokens != b.tokens ? a.tokens > b.tokens : a.index > b.index;
}

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
          scores_(capacity_) {
        if (n_entries_ < 0 || n_entries_ > (int64_t)capacity_ || n_matches_ < 1 || n_matches_ > most_matches) {
            throw Error(MOEGGUF_INVALID,
                        "a collection has at most as many entries as there is space for, and a match 1 to " +
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
    // The entries with the largest cosine; of equals those with more tokens.
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
            // As near as the last one that can be among them: tokens decide.
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
    const float * entries_;   // [capacity][n_layer][n_expert_max], tokens that used an expert
    const float * columns_;   // [n_layer][n_expert_max][capacity], the same
    const float * row_norm2_; // [n_layer][capacity]
    const float * tokens_;    // [capacity]
    std::vector<float> seen_; // [n_expert_max] by this layer
    std::vector<float> dot_, norm2_, scores_;
    Found best_[most_matches];
    int n_found_ = 0;
    bool matched_ = true;
};

} // namespace

const PredictorType eamc_predictor = {"eamc", false, true, make_predictor<Eamc>};

} // namespace moegguf
