// eviction_order.h: the experts that may be evicted, in two orders per layer: by recency and by score.
// It may ask the policy for scores. It knows neither what is in a slot nor why that may be evicted.
#pragma once

#include "policies/policy.h"

namespace moegguf {

// A slot is in here while its expert may be evicted. Recency is a list, exact at every moment. The lowest score of a
// layer is found in one pass over its slots when it is asked for, and is known until it is taken or the policy's scores
// of the layer change. Policies that decide nothing cost nothing.
class EvictionOrder {
  public:
    EvictionOrder(const Layout & layout, int n_slots);

    void set_policy(const EvictionPolicy * policy); // scores of all layers changed
    void scores_changed(int il) { layers_[il].scored = false; }

    void insert(int s, int il, int expert, uint64_t last_use);
    void remove(int s);
    bool contains(int s) const { return at_[s] >= 0; }

    int least_recent(int il) const { return layers_[il].oldest; } // -1: the layer has none
    uint64_t last_use(int s) const { return nodes_[s].last_use; }

    struct Lowest {
        int slot; // -1: the layer has none
        float score;
        uint64_t last_use;
    };
    Lowest lowest(int il); // the lowest score, the least recently used among equals

  private:
    struct Node {
        int il = -1;
        int older = -1;
        int newer = -1;
        uint64_t last_use = 0;
    };
    struct Entry {
        float score; // holds while the layer is scored
        int slot;
        uint64_t last_use;
        int expert;

        bool before(const Entry & other) const {
            return score != other.score ? score < other.score : last_use < other.last_use;
        }
    };
    struct LayerOrder {
        std::vector<Entry> entries; // with space for every expert of the layer: never allocates later
        bool scored = false;
        int first = -1; // the lowest entry of a scored layer; -1: it was taken
        int oldest = -1;
        int newest = -1;
    };

    const EvictionPolicy * policy_ = nullptr;
    std::vector<int> at_;            // [n_slots], where in its layer's entries; -1: not in here
    std::vector<Node> nodes_;        // [n_slots]
    std::vector<LayerOrder> layers_; // [n_layer]
};

} // namespace moegguf
