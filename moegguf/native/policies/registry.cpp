// registry.cpp: the policies that can be chosen by name, and those of them that are a few lines. Makes policies,
// changes none.
#include "policies/policy.h"

namespace moegguf {
namespace {

// Evicts the least recently used expert: leaves everything to recency.
class Lru final : public EvictionPolicy {
  public:
    Lru(const Layout &, const Values &) {}

    bool orders(const LayerStep &) const override { return false; }
    float score(int, int) const override { return 0.0f; }
};

// Evicts the expert with the fewest uses, each counted half as much after every half_life_tokens (LRFU, Lee et al.
// 2001), its one value. Passes of more than one token are left to recency, but count.
class DecayedFrequency final : public EvictionPolicy {
  public:
    DecayedFrequency(const Layout & layout, const Values & values) : average_(layout, value_or(values, 0, 64.0f)) {}

    bool orders(const LayerStep & now) const override { return now.token; }
    bool on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) override {
        average_.count(il, expert_ids, n_expert_used, n_tokens);
        return true;
    }
    float score(int il, int expert) const override { return average_.row(il)[expert]; }

  private:
    FadingAverage average_;
};

const PolicyType lru_policy = {"lru", false, 0, make_policy_of<Lru>};
const PolicyType decayed_frequency_policy = {"lfu-decay", false, 1, make_policy_of<DecayedFrequency>};

const PolicyType * const types[] = {
    &lru_policy, &decayed_frequency_policy, &next_use_policy, &slru_policy, &locality_policy, &sparsity_policy,
};

} // namespace

std::unique_ptr<EvictionPolicy> make_policy(const Layout & layout, const std::string & name, const Values & values) {
    std::string known;
    for (const PolicyType * type : types) {
        if (name != type->name) {
            known += (known.empty() ? "" : ", ") + std::string(type->name);
        } else if (values.size() <= type->most_values) {
            return type->make(layout, values);
        } else {
            throw Error(MOEGGUF_INVALID, "the policy '" + name + "' has at most " + std::to_string(type->most_values) +
                                             " values, not " + std::to_string(values.size()));
        }
    }
    throw Error(MOEGGUF_INVALID, "there is no eviction policy '" + name + "'; known are " + known);
}

const PolicyType * policy_at(int index) { return index >= 0 && index < (int)std::size(types) ? types[index] : nullptr; }

} // namespace moegguf
