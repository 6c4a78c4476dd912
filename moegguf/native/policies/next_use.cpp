// next_use.cpp: Belady's rule with an estimate in place of the future: evicts the expert whose next use is expected
// last.
//
// Of the tokens that pass its layer, a part p (use_rates.h) uses an expert; that is 1 / p - 1 passes after its layer
// comes next, and distance_weight scales the part of a pass until then. Where a predictor forecasts that the layer uses
// the expert then with probability q, it is (1 - q) / p passes after that. Where several sequences decode together, p
// has the same order. Other passes of more than one token are left to recency and the sweep, but count.
//
// Its values: distance_weight, then half-lives of averages, each with its weight (use_rates.h).
// Touches its own tables only (policy.h).
#include "policies/use_rates.h"

namespace moegguf {
namespace {

class NextUse final : public EvictionPolicy {
  public:
    NextUse(const Layout & layout, const Values & values);

    bool orders(const LayerStep & now) const override { return now.decodes; }
    bool on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) override;
    bool on_forecast(int il, const float * probabilities) override;

    // -(expected passes until the next use of an expert), counted from when its layer comes next ...
    float score(int il, int expert) const override {
        const int key = layout_.key(il, expert);
        return known_[il] ? -wait_[key] * (1.0f - forecast_[key]) : 1.0f - wait_[key];
    }

    // ... which is this far from a routing event of layer now.il.
    float layer_offset(int il, const LayerStep & now) const override {
        return -distance_[layout_.row_of[il] - layout_.row_of[now.il] + layout_.n_moe_layers - 1];
    }

  private:
    void set_distances(float distance_weight);

    const Layout & layout_;
    UseRates rates_;
    std::vector<float> wait_;     // [n_layer * n_expert_max], passes between uses
    std::vector<float> forecast_; // [n_layer * n_expert_max], probabilities where known_
    std::vector<uint8_t> known_;  // [n_layer]
    std::vector<float> distance_; // [2 * n_moe_layers - 1], by rows ahead: part of a pass until a layer comes
};

UseRates rates_of(const Layout & layout, const Values & values) {
    if (values.size() <= 1) { return UseRates(layout, {1.0f, 4.0f, 16.0f, 64.0f, 256.0f, 4000.0f}, {}); }
    Values half_lives_tokens, weights;
    for (size_t i = 1; i < values.size(); i++) { (i % 2 ? half_lives_tokens : weights).push_back(values[i]); }
    return UseRates(layout, half_lives_tokens, weights);
}

NextUse::NextUse(const Layout & layout, const Values & values) : layout_(layout), rates_(rates_of(layout, values)) {
    set_distances(value_or(values, 0, 4.0f));
    wait_.assign(layout.n_keys(), 1.0f / *rates_.row(0));
    forecast_.assign(layout.n_keys(), 0.0f);
    known_.assign(layout.layers.size(), 0);
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
    rates_.count(il, expert_ids, n_expert_used, n_tokens);
    const float * rates = rates_.row(il);
    std::transform(rates, rates + layout_.layers[il].n_expert, &wait_[layout_.key(il, 0)],
                   [](float p) { return 1.0f / p; });
    return true;
}

bool NextUse::on_forecast(int il, const float * probabilities) {
    if (!probabilities && !known_[il]) { return false; }
    known_[il] = probabilities != nullptr;
    const int first = layout_.key(il, 0);
    for (int expert = 0; probabilities && expert < layout_.layers[il].n_expert; expert++) {
        const float q = probabilities[expert];
        forecast_[first + expert] = q > 0.0f ? std::min(q, 1.0f) : 0.0f; // not a number: 0
    }
    return true;
}

} // namespace

const PolicyType next_use_policy = {"next-use", true, 1 + 2 * UseRates::most_averages, make_policy_of<NextUse>};

} // namespace moegguf
