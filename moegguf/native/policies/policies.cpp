// policies.cpp: the table of policies that can be chosen by name, and the policies that do not estimate the next use.
// expected_use.cpp contains the policies that do. All policies touch only their own tables (policy.h).
#include "policies/policy.h"

namespace moegguf {
namespace {

// A policy that evicts the least recently used expert. It has no scores, so recency decides; in a sweep, experts of the
// layer that is needed last are evicted first.
class Lru final : public EvictionPolicy {
  public:
    explicit Lru(const Layout &) {}

    bool orders(const LayerStep &) const override { return false; }
    float score(int, int) const override { return 0.0f; }
};

// A policy that evicts the expert with the lowest decayed number of uses. A use counts half as much after each
// half-life of 64 tokens (LRFU, Lee et al. 2001). Uses in passes of more than one token are also counted, but in such
// passes recency decides, as in Lru.
class DecayedFrequency final : public EvictionPolicy {
  public:
    explicit DecayedFrequency(const Layout & layout) : average_(layout, 64.0f) {}

    bool orders(const LayerStep & now) const override { return now.token; }
    bool on_routing(int il, const int32_t * expert_ids, int n_expert_used, int n_tokens) override {
        average_.count(il, expert_ids, n_expert_used, n_tokens);
        return true;
    }
    float score(int il, int expert) const override { return average_.row(il)[expert]; }

  private:
    FadingAverage average_;
};

// Segmented LRU (Karedla, Love and Wherry 1994), with two segments for each layer. Experts that have been used at least
// twice since they were loaded are protected. All other experts are on probation, and are evicted first. The protected
// segment holds at most protected_share of the layer's resident experts. At the layer's next routing event, the least
// recently used experts above this share go back on probation.
class Slru final : public EvictionPolicy {
  public:
    explicit Slru(const Layout & layout)
        : layout_(layout),
          fresh_(layout.n_keys(), 0),
          used_(layout.n_keys(), 0),
          n_resident_(layout.layers.size(), 0),
          n_protected_(layout.layers.size(), 0) {}

    bool orders(const LayerStep & now) const override { return !now.sweep; }
    float score(int il, int expert) const override { return used_[layout_.key(il, expert)] > 0 ? 1.0f : 0.0f; }

    void on_load(int il, int expert) override {
        n_resident_[il] += 1;
        fresh_[layout_.key(il, expert)] = true;
    }
    void on_use(int il, int expert) override {
        const int key = layout_.key(il, expert);
        if (fresh_[key]) {
            fresh_[key] = false;
            return;
        }
        n_protected_[il] += used_[key] == 0;
        used_[key] = ++clock_;
    }
    void on_evict(int il, int expert) override {
        n_resident_[il] -= 1;
        demote(il, expert);
    }

    bool on_routing(int il, const int32_t *, int, int) override {
        const int most = (int)std::ceil(protected_share * n_resident_[il]);
        const bool full = n_protected_[il] > most;
        while (n_protected_[il] > most) {
            const uint64_t * used = &used_[layout_.key(il, 0)];
            int oldest = -1;
            for (int expert = 0; expert < layout_.layers[il].n_expert; expert++) {
                if (used[expert] > 0 && (oldest < 0 || used[expert] < used[oldest])) { oldest = expert; }
            }
            demote(il, oldest);
        }
        return full;
    }

  private:
    void demote(int il, int expert) {
        uint64_t & used = used_[layout_.key(il, expert)];
        n_protected_[il] -= used > 0;
        used = 0;
    }

    static constexpr float protected_share = 0.8f;

    const Layout & layout_;
    std::vector<uint8_t> fresh_;   // [n_layer * n_expert_max] 1: the expert has been loaded but not used yet
    std::vector<uint64_t> used_;   // [n_layer * n_expert_max] clock_ at a protected expert's last use; 0: on probation
    std::vector<int> n_resident_;  // [n_layer] number of experts with a slot
    std::vector<int> n_protected_; // [n_layer] number of protected experts
    uint64_t clock_ = 0;
};

// MoE-Infinity's sparsity-aware expert cache (algorithm 1): an expert's score is (its share of the layer's predicted
// activation + epsilon) * (1 - layer / n_layers). Early layers are favoured, because little can be prefetched for them
// (section 4.6). A share stays valid until the layer is predicted again. Before the first prediction, and in passes
// that do not decode, recency decides.

// A value that the paper does not give. It is small, so that any expert that was used in a matched request outranks an
// unused one, unless the used expert's share is tiny.
constexpr float epsilon = 1e-6f;

class Sparsity final : public EvictionPolicy {
  public:
    explicit Sparsity(const Layout & layout) : layout_(layout), scores_(layout.n_keys(), 0.0f) {
        for (int il : layout.moe_layers) { set_row(il, nullptr); }
    }

    bool orders(const LayerStep & now) const override { return now.decodes && predicted_; }
    bool takes_as_predicted() const override { return true; }

    bool on_forecast(int il, const float * probabilities) override {
        if (probabilities) {
            set_row(il, probabilities);
            predicted_ = true;
        }
        return probabilities;
    }

    float score(int il, int expert) const override { return scores_[layout_.key(il, expert)]; }

  private:
    void set_row(int il, const float * probabilities) {
        const Layer & layer = layout_.layers[il];
        const float decay = 1.0f - (float)layout_.row_of[il] / layout_.n_moe_layers;
        for (int e = 0; e < layer.n_expert; e++) {
            const float p = probabilities ? probability(probabilities[e]) : 0.0f;
            scores_[layout_.key(il, e)] = (p / layer.n_expert_used + epsilon) * decay;
        }
    }

    const Layout & layout_;
    std::vector<float> scores_; // [n_layer * n_expert_max]
    bool predicted_ = false;
};

const PolicyType lru_policy = {"lru", false, make_policy_of<Lru>};
const PolicyType decayed_frequency_policy = {"lfu-decay", false, make_policy_of<DecayedFrequency>};
const PolicyType slru_policy = {"slru", false, make_policy_of<Slru>};
const PolicyType sparsity_policy = {"sparsity", true, make_policy_of<Sparsity>};

const PolicyType * const policies[] = {
    &lru_policy, &decayed_frequency_policy, &next_use_policy, &slru_policy, &locality_policy, &sparsity_policy,
};

} // namespace

std::unique_ptr<EvictionPolicy> make_policy(const Layout & layout, const std::string & name) {
    std::string known;
    for (const PolicyType * type : policies) {
        if (name == type->name) { return type->make(layout); }
        known += (known.empty() ? "" : ", ") + std::string(type->name);
    }
    throw Error(MOEGGUF_INVALID, "there is no eviction policy '" + name + "'; the known policies are " + known);
}

const PolicyType * policy_at(int index) {
    return index >= 0 && index < (int)std::size(policies) ? policies[index] : nullptr;
}

} // namespace moegguf
