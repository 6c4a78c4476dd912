// locality.cpp: ExpertFlow's predictive locality-aware expert caching with real-time correction (sections 3.2.1 and
// 3.2.2): keeps what is predicted for this pass, nearest layers first.
//
// Victims are, from first to last: experts that were prefetched in vain, as their layer's router has shown; those that
// this pass no longer needs, of layers computed already or not predicted; predicted ones, the farthest first. The paper
// has this order, but neither one among equals nor what is "locality" beyond its example (a cache of 8 takes the two
// nearest of four layers whole, and the third as the first is done). Here predicted ones are ordered by their distance,
// the others by how many passes ago, on average, they are used again. Without predictions it is decayed frequency.
// Touches its own tables only (policy.h).
#include "policies/policy.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace moegguf {
namespace {

constexpr float half_life_tokens = 14.0f;
constexpr float least_rate = 1e-4f;
constexpr float in_vain = -1e6f; // below the score of any other
constexpr float likely = 0.5f;   // of several sequences more than one's choices are active

class Locality final : public EvictionPolicy {
  public:
    Locality(const Layout & layout, const Values &)
        : layout_(layout),
          average_(layout, half_life_tokens),
          active_(layout.n_keys(), 0),
          known_(layout.layers.size(), 0),
          prefetched_(layout.n_keys(), Early::no) {}

    bool orders(const LayerStep & now) const override { return now.decodes; }
    bool takes_as_predicted() const override { return true; }

    bool on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) override {
        average_.count(il, expert_ids, n_expert_used, n_tokens);
        return true;
    }

    // What the layer uses is no victim, and is told as used.
    bool on_routed(int il) override {
        Early * prefetched = &prefetched_[layout_.key(il, 0)];
        std::replace(prefetched, prefetched + layout_.layers[il].n_expert, Early::yes, Early::in_vain);
        return true;
    }

    // Each expert is predicted active or idle (3.1): the likeliest are active, as many as a token uses.
    bool on_forecast(int il, const float * probabilities) override {
        const bool was_known = std::exchange(known_[il], probabilities != nullptr);
        if (probabilities) {
            const Layer & layer = layout_.layers[il];
            sorted_.resize(layer.n_expert);
            std::transform(probabilities, probabilities + layer.n_expert, sorted_.begin(),
                           [](float p) { return p > 0.0f ? p : 0.0f; }); // not a number: 0
            const auto last = sorted_.begin() + std::min(layer.n_expert_used, layer.n_expert) - 1;
            std::nth_element(sorted_.begin(), last, sorted_.end(), std::greater<float>());
            const float least = std::min(*last, likely);
            std::transform(probabilities, probabilities + layer.n_expert, &active_[layout_.key(il, 0)],
                           [least](float p) { return p > 0.0f && p >= least; });
        }
        return was_known || probabilities;
    }

    void on_prefetch(int il, int expert) override { prefetched_[layout_.key(il, expert)] = Early::yes; }
    void on_use(int il, int expert) override { prefetched_[layout_.key(il, expert)] = Early::no; }
    void on_evict(int il, int expert) override { prefetched_[layout_.key(il, expert)] = Early::no; }

    // -(expected passes until the next use), counted from when the layer comes next ...
    float score(int il, int expert) const override {
        const int key = layout_.key(il, expert);
        if (prefetched_[key] == Early::in_vain) { return in_vain; }
        const float wait = 1.0f / std::max(average_.row(il)[expert], least_rate);
        return !known_[il] ? 1.0f - wait : active_[key] ? 0.0f : -wait;
    }

    // ... which is this part of a pass away.
    float layer_offset(int il, const LayerStep & now) const override {
        const int n = layout_.n_moe_layers, ahead = layout_.row_of[il] - layout_.row_of[now.il];
        return -float(ahead > 0 ? ahead : ahead + n) / n;
    }

  private:
    enum class Early : uint8_t { no, yes, in_vain };

    const Layout & layout_;
    FadingAverage average_;
    std::vector<uint8_t> active_;   // [n_layer * n_expert_max], where known_
    std::vector<uint8_t> known_;    // [n_layer]
    std::vector<Early> prefetched_; // [n_layer * n_expert_max] and not used since
    std::vector<float> sorted_;     // scratch
};

} // namespace

const PolicyType locality_policy = {"locality", true, 0, make_policy_of<Locality>};

} // namespace moegguf
