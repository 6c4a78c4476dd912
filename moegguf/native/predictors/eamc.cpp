// eamc.cpp: MoE-Infinity's prediction (section 4.5): which experts past requests used that resemble the pass so far.
// The collection is the controller's, which adds requests that end; here, and for the controller (nearest.py), it is
// matched: in numpy that is a dozen steps of a microsecond or two each, at every layer.
// Touches its own tables only (predictor.h), and what it is given.
#include "predictors/predictor.h"

#include <numeric>

namespace moegguf {
namespace {

constexpr float nearly = 1.0f - 2e-6f; // squared cosines closer than this are the same in float32
constexpr float least_norm2 = 1e-30f;  // makes 0 / norm a similarity of 0; the least similarity, too
constexpr int32_t most_matches = 64;

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
          scores_(capacity_),
          matches_(most_matches) {
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
        for (int i = 0; i < n_found_; i++) {
            add(probabilities, entries_ + matches_[i] * layout_.n_keys() + layout_.key(il, 0), layer.n_expert);
        }
        const float total = std::accumulate(probabilities, probabilities + layer.n_expert, 0.0f);
        scale_probabilities(probabilities, layer.n_expert, layer.n_expert_used / std::max(total, least_norm2));
        return total > 0.0f;
    }

  private:
    const Layout & layout_;
    const int n_entries_, n_matches_;
    const size_t capacity_;
    const float * entries_;   // [capacity][n_layer][n_expert_max], tokens that used an expert
    const float * columns_;   // [n_layer][n_expert_max][capacity], the same
    const float * row_norm2_; // [n_layer][capacity]
    const float * tokens_;    // [capacity]
    std::vector<float> seen_; // [n_expert_max] by this layer
    std::vector<float> dot_, norm2_, scores_;
    std::vector<int64_t> matches_;
    int32_t n_found_ = 0;
    bool matched_ = true;
};

} // namespace

const PredictorType eamc_predictor = {"eamc", false, true, make_predictor<Eamc>};

} // namespace moegguf

using namespace moegguf;

int moegguf_eamc_add_row(const float * columns, size_t stride, const float * row, int32_t n_expert,
                         const float * row_norm2, int32_t n_entries, float * dot, float * norm2) {
    if (!columns || !row || !row_norm2 || !dot || !norm2 || n_expert < 0 || n_entries < 0) { return MOEGGUF_INVALID; }
    for (int32_t e = 0; e < n_expert; e++) {
        const float count = row[e];
        if (count == 0.0f) { continue; }
        const float * column = columns + e * stride;
        for (int32_t i = 0; i < n_entries; i++) { dot[i] += count * column[i]; }
    }
    for (int32_t i = 0; i < n_entries; i++) { norm2[i] += row_norm2[i]; }
    return MOEGGUF_OK;
}

int moegguf_eamc_match(const float * dot, const float * norm2, const float * tokens, int32_t n_entries, int32_t n,
                       float * scores, int64_t * indices, int32_t * n_found) {
    if (!dot || !norm2 || !tokens || !scores || !indices || !n_found || n < 0 || n > most_matches || n_entries < 0) {
        return MOEGGUF_INVALID;
    }
    if (n == 0) {
        *n_found = 0;
        return MOEGGUF_OK;
    }
    float top[most_matches] = {};
    for (int32_t i = 0; i < n_entries; i++) {
        scores[i] = dot[i] * dot[i] / norm2[i];
        for (int32_t at = n - 1; at >= 0 && scores[i] > top[at]; at--) {
            if (at < n - 1) { top[at + 1] = top[at]; }
            top[at] = scores[i];
        }
    }
    const float bar = std::max(least_norm2, top[n - 1] * nearly);
    Found best[most_matches];
    int32_t size = 0;
    for (int32_t i = 0; i < n_entries; i++) {
        if (!(scores[i] >= bar)) { continue; }
        // As near as the last one that can be among them: tokens decide.
        const Found found{scores[i] * nearly <= bar ? 0.0f : scores[i], tokens[i], i};
        int32_t at = std::min(size, n - 1);
        if (size == n && !before(found, best[at])) { continue; }
        for (; at > 0 && before(found, best[at - 1]); at--) { best[at] = best[at - 1]; }
        best[at] = found;
        size = std::min(size + 1, n);
    }
    for (int32_t i = 0; i < size; i++) { indices[i] = best[i].index; }
    *n_found = size;
    return MOEGGUF_OK;
}
