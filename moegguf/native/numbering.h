// numbering.h: which slot ids the multiplications of a layer use. Knows numbers only: no memory, no file, no experts
// held.
#pragma once

#include "layout.h"

#include <atomic>

namespace moegguf {

// The slots that a layer's pool tensor shows: slot ids count from `first_slot`.
struct Window {
    int first_slot;
    int n_slots;
};

// When every expert of the tier's layers has a slot ("resident"), layer il owns the window of its n_expert slots and
// slot ids equal expert ids. Otherwise its layers share one window of all slots. Layers of other tiers have none.
class Numbering {
  public:
    Numbering(const Layout & layout, const LayerSet & layers, int n_slots)
        : n_slots_(std::min(n_slots, layers.n_experts)),
          resident_(n_slots >= layers.n_experts),
          windows_(layout.layers.size(), {0, 0}) {
        int first = 0;
        for (int il : layers.moe_layers) {
            windows_[il] = resident_ ? Window{first, layout.layers[il].n_expert} : Window{0, n_slots_};
            first += layout.layers[il].n_expert;
        }
    }

    // Slots for experts that are staged (staged_supply.h): layers take n_tensors windows in turn, each with a slot for
    // every expert of a layer, so that slot ids equal expert ids.
    struct InTurn {
        int n_tensors;
    };
    Numbering(const Layout & layout, const LayerSet & layers, InTurn tensors)
        : n_slots_(tensors.n_tensors * layout.n_expert_max),
          resident_(true),
          windows_(layout.layers.size(), {0, 0}) {
        int n = 0;
        for (int il : layers.moe_layers) {
            windows_[il] = {n % tensors.n_tensors * layout.n_expert_max, layout.layers[il].n_expert};
            n += 1;
        }
    }

    Numbering(const Numbering & other)
        : n_slots_(other.n_slots_),
          resident_(other.resident()),
          windows_(other.windows_) {}

    int n_slots() const { return n_slots_; }
    bool resident() const { return resident_; } // any thread
    Window window(int il) const { return windows_[il]; }
    int own_slot(int il, int expert) const { return windows_[il].first_slot + expert; } // while resident

    // For a pool that shrinks below one slot per expert; it never becomes resident again.
    void share_all_slots() {
        resident_ = false;
        for (Window & window : windows_) {
            window = {0, window.n_slots > 0 ? n_slots_ : 0};
        }
    }

  private:
    const int n_slots_;
    std::atomic<bool> resident_;
    std::vector<Window> windows_; // [n_layer]
};

} // namespace moegguf
