// lru.cpp: evicts the least recently used expert. The simplest policy: it leaves everything to recency.
// Touches its own tables only (policy.h).
#include "policies/policy.h"

namespace moegguf {
namespace {

class Lru final : public EvictionPolicy {
  public:
    Lru(const Layout &, const Values &) {}

    bool orders(const LayerStep &) const override { return false; }
    float score(int, int) const override { return 0.0f; }
};

} // namespace

extern const PolicyType lru_policy;
const PolicyType lru_policy = {"lru", false, 0, make_policy_of<Lru>};

} // namespace moegguf
