#include "eviction_order.h"

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
    for (LayerOrder & layer : layers_) {
        layer.order = Order::none;
    }
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
    const Entry entry = {layer.order == Order::none ? 0.0f : policy_->score(il, expert), s, last_use, expert};
    layer.entries.push_back(entry);
    at_[s] = at;
    if (layer.order == Order::heap) {
        sift_up(layer, at, entry);
    } else if (layer.order == Order::first && layer.first >= 0 && entry.before(layer.entries[layer.first])) {
        layer.first = at;
    }
}

void EvictionOrder::remove(int s) {
    const Node & node = nodes_[s];
    LayerOrder & layer = layers_[node.il];
    (node.older >= 0 ? nodes_[node.older].newer : layer.oldest) = node.newer;
    (node.newer >= 0 ? nodes_[node.newer].older : layer.newest) = node.older;
    take_out(layer, at_[s]);
    at_[s] = -1;
}

// The last entry takes the place of the one at `at`.
void EvictionOrder::take_out(LayerOrder & layer, int at) {
    const Entry last = layer.entries.back();
    const int end = (int)layer.entries.size() - 1;
    layer.entries.pop_back();
    if (layer.order == Order::first) {
        layer.first = layer.first == at ? -1 : layer.first == end ? at : layer.first;
    }
    if (at == end) {
        return;
    }
    if (layer.order != Order::heap) {
        place(layer, at, last);
    } else if (at > 0 && last.before(layer.entries[(at - 1) / 2])) {
        sift_up(layer, at, last);
    } else {
        sift_down(layer, at, last);
    }
}

EvictionOrder::Lowest EvictionOrder::lowest(int il) {
    LayerOrder & layer = layers_[il];
    if (layer.entries.empty()) {
        return {-1, 0.0f, 0};
    }
    if (layer.order == Order::none) {
        find_first(il);
    } else if (layer.order == Order::first && layer.first < 0) {
        make_heap(layer);
    }
    const Entry & lowest = layer.entries[layer.order == Order::heap ? 0 : layer.first];
    return {lowest.slot, lowest.score, lowest.last_use};
}

void EvictionOrder::find_first(int il) {
    LayerOrder & layer = layers_[il];
    int first = 0;
    for (int at = 0; at < (int)layer.entries.size(); at++) {
        Entry & entry = layer.entries[at];
        entry.score = policy_->score(il, entry.expert);
        first = entry.before(layer.entries[first]) ? at : first;
    }
    layer.first = first;
    layer.order = Order::first;
}

void EvictionOrder::make_heap(LayerOrder & layer) {
    for (int at = (int)layer.entries.size() / 2 - 1; at >= 0; at--) {
        sift_down(layer, at, layer.entries[at]);
    }
    layer.order = Order::heap;
}

void EvictionOrder::place(LayerOrder & layer, int at, const Entry & entry) {
    layer.entries[at] = entry;
    at_[entry.slot] = at;
}

void EvictionOrder::sift_up(LayerOrder & layer, int at, Entry entry) {
    while (at > 0 && entry.before(layer.entries[(at - 1) / 2])) {
        place(layer, at, layer.entries[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    place(layer, at, entry);
}

void EvictionOrder::sift_down(LayerOrder & layer, int at, Entry entry) {
    const int n = (int)layer.entries.size();
    for (int child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && layer.entries[child + 1].before(layer.entries[child])) {
            child += 1;
        }
        if (!layer.entries[child].before(entry)) {
            break;
        }
        place(layer, at, layer.entries[child]);
        at = child;
    }
    place(layer, at, entry);
}

} // namespace moegguf
