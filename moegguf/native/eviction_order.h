// eviction_order.h: the experts that may be evicted, in two orders per layer: by recency and by score.
#pragma once

#include "policies/policy.h"

namespace moegguf {

// A slot is in here while its expert may be evicted. Recency is a list, exact at every moment. The order by score is a
// heap that is kept while the policy's scores of the layer hold, and built again when it is asked for after they
// changed: policies that decide nothing cost nothing.
class EvictionOrder {
  public:
    EvictionOrder(const Layout & layout, int n_slots);

    void set_policy(const EvictionPolicy * policy); // scores of all layers changed
    void scores_changed(int il) { layers_[il].sorted = false; }

    void insert(int s, int il, int expert, uint64_t last_use);
    void remove(int s);
    bool contains(int s) const { return nodes_[s].at >= 0; }

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
        int at = -1; // in the layer's heap; -1: not in here
        int older = -1;
        int newer = -1;
        uint64_t last_use = 0;
    };
    struct Entry {
        float score; // holds while the layer is sorted
        int slot;
        uint64_t last_use;
        int expert;

        bool before(const Entry & other) const {
            return score != other.score ? score < other.score : last_use < other.last_use;
        }
    };
    struct LayerOrder {
        std::vector<Entry> heap; // of room for every expert of the layer: never allocates later
        bool sorted = false;
        int oldest = -1;
        int newest = -1;
    };

    void place(LayerOrder & layer, int at, const Entry & entry);
    void sift_up(LayerOrder & layer, int at, Entry entry);
    void sift_down(LayerOrder & layer, int at, Entry entry);
    void sort(int il);

    const EvictionPolicy * policy_ = nullptr;
    std::vector<Node> nodes_;        // [n_slots]
    std::vector<LayerOrder> layers_; // [n_layer]
};

} // namespace moegguf
