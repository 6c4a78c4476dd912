#include "eviction_order.h"

namespace moegguf {

EvictionOrder::EvictionOrder(const Layout & layout, int n_slots) : nodes_(n_slots), layers_(layout.layers.size()) {
    for (size_t il = 0; il < layers_.size(); il++) {
        layers_[il].heap.reserve(std::min(n_slots, layout.layers[il].n_expert));
    }
}

void EvictionOrder::set_policy(const EvictionPolicy * policy) {
    policy_ = policy;
    for (LayerOrder & layer : layers_) {
        layer.sorted = false;
    }
}

// Slots come back in the order of their last use, nearly: the walk from the newest is short.
void EvictionOrder::insert(int s, int il, int expert, uint64_t last_use) {
    LayerOrder & layer = layers_[il];
    Node & node = nodes_[s];
    int older = layer.newest, newer = -1;
    while (older >= 0 && nodes_[older].last_use > last_use) {
        newer = older;
        older = nodes_[older].older;
    }
    node = {il, (int)layer.heap.size(), older, newer, last_use};
    (older >= 0 ? nodes_[older].newer : layer.oldest) = s;
    (newer >= 0 ? nodes_[newer].older : layer.newest) = s;
    const Entry entry = {layer.sorted ? policy_->score(il, expert) : 0.0f, s, last_use, expert};
    layer.heap.push_back(entry);
    if (layer.sorted) {
        sift_up(layer, node.at, entry);
    }
}

void EvictionOrder::remove(int s) {
    Node & node = nodes_[s];
    LayerOrder & layer = layers_[node.il];
    (node.older >= 0 ? nodes_[node.older].newer : layer.oldest) = node.newer;
    (node.newer >= 0 ? nodes_[node.newer].older : layer.newest) = node.older;
    const Entry last = layer.heap.back();
    layer.heap.pop_back();
    if (last.slot != s) {
        const int at = node.at;
        if (!layer.sorted) {
            place(layer, at, last);
        } else if (at > 0 && last.before(layer.heap[(at - 1) / 2])) {
            sift_up(layer, at, last);
        } else {
            sift_down(layer, at, last);
        }
    }
    node.at = -1;
}

EvictionOrder::Lowest EvictionOrder::lowest(int il) {
    LayerOrder & layer = layers_[il];
    if (layer.heap.empty()) {
        return {-1, 0.0f, 0};
    }
    if (!layer.sorted) {
        sort(il);
    }
    const Entry & first = layer.heap.front();
    return {first.slot, first.score, first.last_use};
}

void EvictionOrder::place(LayerOrder & layer, int at, const Entry & entry) {
    layer.heap[at] = entry;
    nodes_[entry.slot].at = at;
}

void EvictionOrder::sift_up(LayerOrder & layer, int at, Entry entry) {
    while (at > 0 && entry.before(layer.heap[(at - 1) / 2])) {
        place(layer, at, layer.heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    place(layer, at, entry);
}

void EvictionOrder::sift_down(LayerOrder & layer, int at, Entry entry) {
    const int n = (int)layer.heap.size();
    for (int child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && layer.heap[child + 1].before(layer.heap[child])) {
            child += 1;
        }
        if (!layer.heap[child].before(entry)) {
            break;
        }
        place(layer, at, layer.heap[child]);
        at = child;
    }
    place(layer, at, entry);
}

void EvictionOrder::sort(int il) {
    LayerOrder & layer = layers_[il];
    for (Entry & entry : layer.heap) {
        entry.score = policy_->score(il, entry.expert);
    }
    for (int at = (int)layer.heap.size() / 2 - 1; at >= 0; at--) {
        sift_down(layer, at, layer.heap[at]);
    }
    layer.sorted = true;
}

} // namespace moegguf
