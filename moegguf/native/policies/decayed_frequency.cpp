// decayed_frequency.cpp: evicts the expert with the fewest uses, each counted half as much after every
// half_life_tokens (LRFU, Lee et al. 2001), its one value. Passes of more than one token are left to recency, but
// count. Touches its own tables only (policy.h).
#include "policies/averages.h"

namespace moegguf {
namespace {

constexpr float default_half_life_tokens = 64.0f;

class DecayedFrequency final : public EvictionPolicy {
  public:
    DecayedFrequency(const Layout & layout, const Values & values)
        : average_(layout, value_or(values, 0, default_half_life_tokens)) {}

    bool orders(const LayerStep & now) const override { return now.token; }
    bool on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) override {
        average_.count(il, expert_ids, n_expert_used, n_tokens);
        return true;
    }
    float score(int il, int expert) const override { return average_.row(il)[expert]; }

  private:
    FadingAverage average_;
};

} // namespace

extern const PolicyType decayed_frequency_policy;
const PolicyType decayed_frequency_policy = {"lfu-decay", false, 1, make_policy_of<DecayedFrequency>};

} // namespace moegguf
