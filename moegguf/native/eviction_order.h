// eviction_order.h: the order in which the experts of each layer are evicted from their slots. This file knows slots
// only by their numbers.
#pragma once

#include "policies/policy.h"

#include <algorithm>
#include <vector>

namespace moegguf {

// Holds the slots whose experts may be evicted, by layer. In each layer, the slot with the lowest score is evicted
// first. Among equal scores, the least recently used slot is evicted first. first() finds this slot in one scan of the
// layer's slots. The result is cached until the slot is removed, scores of the layer change, or another policy is set.
class EvictionOrder {
  public:
    struct Entry {
        float score; // valid only if LayerOrder::is_scored
        uint64_t last_use;
        int slot;
        int expert;

        bool before(const Entry & other) const { // branch-free, because first() compares all slots of a layer
            return (score < other.score) | ((score == other.score) & (last_use < other.last_use));
        }
    };

    EvictionOrder(const Layout & layout, int n_slots) : at_(n_slots, -1), layers_(layout.layers.size()) {
        for (size_t il = 0; il < layers_.size(); il++) {
            layers_[il].entries.reserve(std::min(n_slots, layout.layers[il].n_expert)); // insert() then never allocates
        }
    }

    void follow(const EvictionPolicy * policy) { // uses this policy's scores from now on; nullptr: only recency decides
        if (policy == policy_) { return; }
        policy_ = policy;
        for (LayerOrder & layer : layers_) { layer.is_scored = false; }
    }
    void scores_changed(int il) { layers_[il].is_scored = false; }

    bool contains(int s) const { return at_[s] >= 0; }
    void insert(int s, int il, int expert, uint64_t last_use) {
        LayerOrder & layer = layers_[il];
        at_[s] = (int)layer.entries.size();
        layer.entries.push_back({layer.is_scored ? score(il, expert) : 0.0f, last_use, s, expert});
        if (layer.first >= 0 && layer.entries.back().before(layer.entries[layer.first])) { layer.first = at_[s]; }
    }
    void remove(int s, int il) {
        LayerOrder & layer = layers_[il];
        const int at = at_[s], end = (int)layer.entries.size() - 1; // the last entry moves into the gap
        layer.first = layer.first == at ? -1 : layer.first == end ? at : layer.first;
        layer.entries[at] = layer.entries[end];
        at_[layer.entries[at].slot] = at;
        layer.entries.pop_back();
        at_[s] = -1;
    }

    const Entry * first(int il) { // returns the next entry to evict in this layer; nullptr: none
        LayerOrder & layer = layers_[il];
        std::vector<Entry> & entries = layer.entries;
        if (entries.empty()) { return nullptr; }
        if (!layer.is_scored) {
            for (Entry & entry : entries) { entry.score = score(il, entry.expert); }
            layer.is_scored = true;
            layer.first = -1;
        }
        if (layer.first < 0) {
            const auto before = [](const Entry & a, const Entry & b) { return a.before(b); };
            layer.first = int(std::min_element(entries.begin(), entries.end(), before) - entries.begin());
        }
        return &entries[layer.first];
    }

  private:
    struct LayerOrder {
        std::vector<Entry> entries;
        bool is_scored = false;
        int first = -1; // index of the next entry to evict; -1: not known
    };

    float score(int il, int expert) const { return policy_ ? policy_->score(il, expert) : 0.0f; }

    const EvictionPolicy * policy_ = nullptr;
    std::vector<int> at_; // [n_slots] index of the slot in its layer's entries; -1: the slot may not be evicted
    std::vector<LayerOrder> layers_; // [n_layer] order of each layer
};

} // namespace moegguf
