// eviction_order.h: the experts that may be evicted, by layer, and which of a layer is the first to go: by recency, or
// by the policy's score. It knows neither what is in a slot nor why that may be evicted.
#pragma once

#include "policies/policy.h"

#include <algorithm>

namespace moegguf {

// A slot is in here while its expert may be evicted. The first of a layer in either order is found in one pass over its
// slots when it is asked for, and is known until it is taken or, by score, the policy's scores of the layer change.
class EvictionOrder {
  public:
    struct Entry {
        int slot;
        int expert;
        uint64_t last_use;
        float score; // holds while the layer is scored
    };

    EvictionOrder(const Layout & layout, int n_slots) : at_(n_slots, -1), layers_(layout.layers.size()) {
        for (size_t il = 0; il < layers_.size(); il++) {
            layers_[il].entries.reserve(std::min(n_slots, layout.layers[il].n_expert)); // never allocates later
        }
    }

    void set_policy(const EvictionPolicy * policy) { // scores of all layers changed
        policy_ = policy;
        for (size_t il = 0; il < layers_.size(); il++) { scores_changed((int)il); }
    }
    void scores_changed(int il) {
        layers_[il].is_scored = false;
        layers_[il].first[true] = -1;
    }

    bool contains(int s) const { return at_[s] >= 0; }
    void insert(int s, int il, int expert, uint64_t last_use) {
        LayerOrder & layer = layers_[il];
        const int at = at_[s] = (int)layer.entries.size();
        layer.entries.push_back({s, expert, last_use, layer.is_scored ? policy_->score(il, expert) : 0.0f});
        for (const bool by_score : {false, true}) {
            int & first = layer.first[by_score];
            if (first >= 0 && before(layer.entries[at], layer.entries[first], by_score)) { first = at; }
        }
    }
    void remove(int s, int il) {
        LayerOrder & layer = layers_[il];
        const int at = at_[s], end = (int)layer.entries.size() - 1; // the last entry takes its place
        for (int & first : layer.first) { first = first == at ? -1 : first == end ? at : first; }
        layer.entries[at] = layer.entries[end];
        at_[layer.entries[at].slot] = at;
        layer.entries.pop_back();
        at_[s] = -1;
    }

    // The least recently used, by_score of those with the lowest score; nullptr: the layer has none.
    const Entry * first(int il, bool by_score) {
        LayerOrder & layer = layers_[il];
        if (layer.entries.empty()) { return nullptr; }
        if (by_score && !layer.is_scored) {
            for (Entry & entry : layer.entries) { entry.score = policy_->score(il, entry.expert); }
            layer.is_scored = true;
        }
        int & first = layer.first[by_score];
        if (first < 0) {
            const auto is_before = [by_score](const Entry & a, const Entry & b) { return before(a, b, by_score); };
            first =
                int(std::min_element(layer.entries.begin(), layer.entries.end(), is_before) - layer.entries.begin());
        }
        return &layer.entries[first];
    }

  private:
    struct LayerOrder {
        std::vector<Entry> entries;
        bool is_scored = false;
        int first[2] = {-1, -1}; // the entry that goes first by recency, by score; -1: not known
    };

    static bool before(const Entry & a, const Entry & b, bool by_score) {
        return by_score && a.score != b.score ? a.score < b.score : a.last_use < b.last_use;
    }

    const EvictionPolicy * policy_ = nullptr;
    std::vector<int> at_;            // [n_slots], where in its layer's entries; -1: not in here
    std::vector<LayerOrder> layers_; // [n_layer]
};

} // namespace moegguf
