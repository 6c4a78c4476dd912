// slru.cpp: segmented LRU (Karedla, Love and Wherry 1994), with two segments for each layer: experts that were used
// again since they were loaded are protected, the others are on probation and are evicted first. The protected segment
// holds up to protected_share, its one value, of the layer's experts; beyond that its least recently used expert goes
// back on probation. Touches its own tables only (policy.h).
#include "policies/policy.h"

#include <cmath>

namespace moegguf {
namespace {

class Slru final : public EvictionPolicy {
  public:
    Slru(const Layout & layout, const Values & values)
        : layout_(layout),
          share_(value_or(values, 0, 0.8f)),
          fresh_(layout.n_keys(), 0),
          used_(layout.n_keys(), 0),
          n_resident_(layout.layers.size(), 0),
          n_protected_(layout.layers.size(), 0) {
        if (!(share_ >= 0.0f && share_ <= 1.0f)) {
            throw Error(MOEGGUF_INVALID, "the protected share lies from 0 to 1, but is " + std::to_string(share_));
        }
    }

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
        const int most = (int)std::ceil(share_ * n_resident_[il]);
        const bool full = n_protected_[il] > most;
        while (n_protected_[il] > most) { demote(il, least_recent(il)); }
        return full;
    }

  private:
    void demote(int il, int expert) {
        uint64_t & used = used_[layout_.key(il, expert)];
        n_protected_[il] -= used > 0;
        used = 0;
    }

    int least_recent(int il) const {
        const uint64_t * used = &used_[layout_.key(il, 0)];
        int found = -1;
        for (int expert = 0; expert < layout_.layers[il].n_expert; expert++) {
            if (used[expert] > 0 && (found < 0 || used[expert] < used[found])) { found = expert; }
        }
        return found;
    }

    const Layout & layout_;
    const float share_;
    std::vector<uint8_t> fresh_;   // [n_layer * n_expert_max], loaded and not used yet
    std::vector<uint64_t> used_;   // [n_layer * n_expert_max], when it was used again; 0: on probation
    std::vector<int> n_resident_;  // [n_layer]
    std::vector<int> n_protected_; // [n_layer]
    uint64_t clock_ = 0;
};

} // namespace

const PolicyType slru_policy = {"slru", false, 1, make_policy_of<Slru>};

} // namespace moegguf
