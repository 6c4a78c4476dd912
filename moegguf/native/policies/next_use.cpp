// next_use.cpp: Belady's rule with an estimate in place of the future: evicts the expert whose next use is expected
// last.
//
// Of the tokens that pass its layer, a part p = sum(weight * average) uses an expert; that is 1 / p - 1 passes after
// its layer comes next, and distance_weight scales the part of a pass until then. Where a predictor forecasts that the
// layer uses the expert then with probability q, it is (1 - trust * q) / p passes after that. Where several sequences
// decode together, p has the same order. Other passes of more than one token are left to recency and the sweep, but
// count.
//
// In published routing half of a token's experts are used again within eight tokens, in other models far fewer:
// averages over a dozen tokens, some dozens and all of them are good for both.
// Touches its own tables only (policy.h).
#include "policies/averages.h"

namespace moegguf {
namespace {

constexpr size_t max_averages = 4;
constexpr float least_use = 1e-4f; // a token uses no expert less often than this

class NextUse final : public EvictionPolicy {
  public:
    NextUse(const Layout & layout, const Parameters & given);

    bool orders(const LayerStep & now) const override { return now.decodes; }
    bool on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) override;
    bool on_forecast(int il, const float * probabilities) override;

    // -(expected passes until the next use of an expert), counted from when its layer comes next ...
    float score(int il, int expert) const override {
        const int key = layout_.key(il, expert);
        return known_[il] ? -wait_[key] * (1.0f - trust_ * forecast_[key]) : 1.0f - wait_[key];
    }

    // ... which is this far from a routing event of layer now.il.
    float layer_offset(int il, const LayerStep & now) const override {
        return -distance_[layout_.row_of[il] - layout_.row_of[now.il] + layout_.n_moe_layers - 1];
    }

  private:
    void set_weights(const std::vector<float> & half_lives, std::vector<float> weights);
    void set_distances(float distance_weight);

    const Layout & layout_;
    std::vector<FadingAverage> average_;
    std::vector<float> weight_; // [n averages]
    float trust_;
    std::vector<float> wait_;     // [n_layer * n_expert_max], passes between uses
    std::vector<float> forecast_; // [n_layer * n_expert_max], probabilities where known_
    std::vector<uint8_t> known_;  // [n_layer]
    std::vector<float> distance_; // [2 * n_moe_layers - 1], by rows ahead: part of a pass until a layer comes
};

NextUse::NextUse(const Layout & layout, const Parameters & given) : layout_(layout) {
    const std::vector<float> half_lives = given.values("half_lives_tokens", {12.0f, 60.0f, 2000.0f});
    set_weights(half_lives, given.values("weights", {0.5f, 0.35f, 0.15f}));
    for (float half_life_tokens : half_lives) {
        average_.emplace_back(layout, half_life_tokens);
    }
    set_distances(given.value("distance_weight", 4.0f));
    trust_ = given.value("trust", 1.0f);
    if (!(trust_ >= 0.0f && trust_ <= 1.0f)) {
        throw Error(MOEGGUF_INVALID, "trust in a forecast lies from 0 to 1, but is " + std::to_string(trust_));
    }
    wait_.assign(layout.n_keys(), 1.0f / least_use);
    forecast_.assign(layout.n_keys(), 0.0f);
    known_.assign(layout.layers.size(), 0);
}

void NextUse::set_weights(const std::vector<float> & half_lives, std::vector<float> weights) {
    if (half_lives.empty() || half_lives.size() > max_averages || half_lives.size() != weights.size()) {
        throw Error(MOEGGUF_INVALID, "there are 1 to " + std::to_string(max_averages) +
                                         " half-lives with a weight each, not " + std::to_string(half_lives.size()) +
                                         " with " + std::to_string(weights.size()) + " weights");
    }
    float sum = 0.0f;
    for (float weight : weights) {
        if (!at_least_zero(weight)) {
            throw Error(MOEGGUF_INVALID, "an average's weight is 0 or more, not " + std::to_string(weight));
        }
        sum += weight;
    }
    if (sum <= 0.0f || !std::isfinite(sum)) {
        throw Error(MOEGGUF_INVALID, "the weights of the averages add up to " + std::to_string(sum));
    }
    weight_ = std::move(weights);
}

void NextUse::set_distances(float distance_weight) {
    if (!at_least_zero(distance_weight)) {
        throw Error(MOEGGUF_INVALID, "the weight of the distance is 0 or more, not " + std::to_string(distance_weight));
    }
    const int n_row = layout_.n_moe_layers;
    // The layer after this one comes next; this one's own others wait for a whole pass: its chosen ones are pinned.
    distance_.resize(2 * n_row - 1);
    for (int i = 0; i < (int)distance_.size(); i++) {
        const int ahead = i - (n_row - 1);
        distance_[i] = distance_weight * (ahead > 0 ? ahead : ahead + n_row) / n_row;
    }
}

bool NextUse::on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) {
    for (FadingAverage & average : average_) {
        average.count(il, expert_ids, n_expert_used, n_tokens);
    }
    float * wait = &wait_[layout_.key(il, 0)];
    const int n_expert = layout_.layers[il].n_expert;
    std::fill_n(wait, n_expert, 0.0f);
    for (size_t i = 0; i < average_.size(); i++) { // wait: the part of the tokens that use the expert ...
        const float * average = average_[i].row(il);
        for (int expert = 0; expert < n_expert; expert++) {
            wait[expert] += weight_[i] * average[expert];
        }
    }
    for (int expert = 0; expert < n_expert; expert++) { // ... and what follows from it
        wait[expert] = 1.0f / std::max(wait[expert], least_use);
    }
    return true;
}

bool NextUse::on_forecast(int il, const float * probabilities) {
    if (!probabilities && !known_[il]) {
        return false;
    }
    known_[il] = probabilities != nullptr;
    const int first = layout_.key(il, 0);
    for (int expert = 0; probabilities && expert < layout_.layers[il].n_expert; expert++) {
        const float q = probabilities[expert];
        forecast_[first + expert] = q > 0.0f ? std::min(q, 1.0f) : 0.0f; // not a number: 0
    }
    return true;
}

} // namespace

extern const PolicyType next_use_policy;
const PolicyType next_use_policy = {"next-use",
                                    MOEGGUF_POLICY_FORECAST,
                                    {"half_lives_tokens", "weights", "distance_weight", "trust"},
                                    make_policy_of<NextUse>};

} // namespace moegguf
