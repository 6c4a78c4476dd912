#include "eviction_order.h"

#include <algorithm>

namespace moegguf {

EvictionOrder::EvictionOrder(const Layout & layout, int n_slots)
    : at_(n_slots, -1),
      nodes_(n_slots),
      layers_(layout.layers.size()) {
    for (size_t il = 0; il < layers_.size(); il++) {
        layers_[il].entries.reserve(std::min(n_slots, layout.layers[il].n_expert));
    }
}

void EvictionOrder::set_policy(const EvictionPolicy * policy) {
    policy_ = policy;
    for (LayerOrder & layer : layers_) { layer.scored = false; }
}

// Slots come back in the order of their last use, nearly: the walk from the newest is short.
void EvictionOrder::insert(int s, int il, int expert, uint64_t last_use) {
    LayerOrder & layer = layers_[il];
    int older = layer.newest, newer = -1;
    while (older >= 0 && nodes_[older].last_use > last_use) {
        newer = older;
        older = nodes_[older].older;
    }
    nodes_[s] = {il, older, newer, last_use};
    (older >= 0 ? nodes_[older].newer : layer.oldest) = s;
    (newer >= 0 ? nodes_[newer].older : layer.newest) = s;

    const int at = (int)layer.entries.size();
    const Entry entry = {layer.scored ? policy_->score(il, expert) : 0.0f, s, last_use, expert};
    layer.entries.push_back(entry);
    at_[s] = at;
    if (layer.scored && layer.first >= 0 && entry.before(layer.entries[layer.first])) { layer.first = at; }
}

void EvictionOrder::remove(int s) {
    const Node & node = nodes_[s];
    LayerOrder & layer = layers_[node.il];
    (node.older >= 0 ? nodes_[node.older].newer : layer.oldest) = node.newer;
    (node.newer >= 0 ? nodes_[node.newer].older : layer.newest) = node.older;
    const int at = at_[s], end = (int)layer.entries.size() - 1; // the last entry takes its place
    layer.first = layer.first == at ? -1 : layer.first == end ? at : layer.first;
    layer.entries[at] = layer.entries[end];
    at_[layer.entries[at].slot] = at;
    layer.entries.pop_back();
    at_[s] = -1;
}

EvictionOrder::Lowest EvictionOrder::lowest(int il) {
    LayerOrder & layer = layers_[il];
    if (layer.entries.empty()) { return {-1, 0.0f, 0}; }
    if (!layer.scored) {
        for (Entry & entry : layer.entries) { entry.score = policy_->score(il, entry.expert); }
        layer.scored = true;
        layer.first = -1;
    }
    if (layer.first < 0) {
        const auto before = [](const Entry & a, const Entry & b) { return a.before(b); };
        layer.first = int(std::min_element(layer.entries.begin(), layer.entries.end(), before) - layer.entries.begin());
    }
    const Entry & lowest = layer.entries[layer.first];
    return {lowest.slot, lowest.score, lowest.last_use};
}

} // namespace moegguf
