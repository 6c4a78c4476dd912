// layout.h: the layout says where each expert lies in the file and what a slot has to hold; the numbering says which
// slot ids the multiplications of a layer use. Plain data, without I/O, and immutable but for the numbering. Knows no
// memory, no device and no experts held.
#pragma once

#include "moegguf.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace moegguf {

// A typed failure inside the library; the C ABI turns it into its status.
struct Error : std::runtime_error {
    Error(moegguf_status status, const std::string & what) : std::runtime_error(what), status(status) {}
    moegguf_status status;
};

// Bits of matrix kinds.
constexpr uint8_t all_kinds = (1 << MOEGGUF_MAX_KINDS) - 1;
constexpr uint8_t down_kind = 1 << MOEGGUF_DOWN;

// llama.cpp multiplies with up (or with gate and up as one), then gate, then down: with one matrix of all experts of a
// layer before the next.
constexpr uint8_t order_of_use[] = {1 << MOEGGUF_UP | 1 << MOEGGUF_GATE_UP, 1 << MOEGGUF_GATE, down_kind};

struct Matrix {
    std::string name;
    int il = 0;
    moegguf_kind kind = MOEGGUF_GATE;
    ggml_type type = GGML_TYPE_F32;
    int64_t ne0 = 0;
    int64_t ne1 = 0;
    int shard = 0;
    uint64_t offset = 0;
    uint64_t expert_bytes = 0;
    uint64_t padding_bytes = 0; // zero bytes after an expert in a slot
};

struct Layer {
    int n_expert = 0; // 0: no experts here
    int n_expert_used = 0;
    int matrix[MOEGGUF_MAX_KINDS] = {-1, -1, -1, -1}; // index into matrices
    uint8_t chunks = 0;                               // bit per kind present
};

bool is_matrix(const moegguf_matrix & m); // true for a known type with rows of whole blocks

// The distance of slots in the arena of each kind: the largest expert of that kind with its padding, rounded up to a
// multiple of every block size used there.
struct Strides {
    static constexpr uint64_t guard_bytes = 4096; // bytes after the last slot, because kernels may read beyond it

    uint64_t of_kind[MOEGGUF_MAX_KINDS] = {}; // 0: no such matrices

    Strides(const moegguf_matrix * matrices, int n); // Throws Error(INVALID) for a kind or type that does not exist.

    uint64_t slot_bytes() const;
    uint64_t arena_bytes(int kind, int n_slots) const { return of_kind[kind] * n_slots + guard_bytes; }
    uint64_t pool_bytes(int n_slots) const; // all arenas, guards included
};

struct Layout {
    std::vector<Matrix> matrices;
    std::vector<Layer> layers;
    std::vector<std::string> shards;
    std::vector<std::vector<std::string>> mirrors; // paths of the same shards on other drives
    Strides strides;
    int n_expert_max = 0;
    int n_experts = 0; // over all layers
    int n_moe_layers = 0;
    std::vector<int> moe_layers; // il of the layers with experts, in order
    std::vector<int> row_of;     // [n_layer] index in moe_layers; -1: a layer without experts

    // Throws Error(INVALID) on any inconsistency.
    explicit Layout(const moegguf_config & config);

    bool has_experts(int il) const { return il >= 0 && il < (int)layers.size() && layers[il].n_expert > 0; }
    bool has_expert(int il, int expert) const { return has_experts(il) && expert >= 0 && expert < layers[il].n_expert; }
    int key(int il, int expert) const { return il * n_expert_max + expert; }
    size_t n_keys() const { return layers.size() * n_expert_max; }
    uint64_t bytes(int il, uint8_t kinds) const { // bytes of an expert's matrices of these kinds
        uint64_t n = 0;
        for (kinds &= layers[il].chunks; kinds; kinds &= kinds - 1) {
            n += matrices[layers[il].matrix[__builtin_ctz(kinds)]].expert_bytes;
        }
        return n;
    }

  private:
    void add(const moegguf_matrix & m);
};

// The layers with experts that one tier is for.
struct LayerSet {
    std::vector<int> moe_layers; // il of the layers, in order
    std::vector<uint8_t> has;    // [n_layer]
    int n_experts = 0;           // experts of these layers
    int n_chunks = 0;            // matrices of all experts
    int token_cycle = 0;         // slots one token touches
    int n_used_max = 0;          // the most experts that a token uses in a layer

    // The layers with experts for which holds(il) is true.
    template <typename Holds>
    LayerSet(const Layout & layout, Holds holds) : has(layout.layers.size(), 0) {
        for (int il : layout.moe_layers) {
            if (holds(il)) { add(il, layout.layers[il]); }
        }
    }

  private:
    void add(int il, const Layer & layer);
};

// The slots that a layer's pool tensor shows: slot ids count from `first_slot`.
struct Window {
    int first_slot;
    int n_slots;
};

// When every expert of the tier's layers has a slot ("resident"), layer il owns the window of its n_expert slots and
// slot ids equal expert ids. Otherwise its layers share one window of all slots. Layers of other tiers have none.
class Numbering {
  public:
    // n_tensors, not 0: the slots are for staged experts (staged_supply.cpp). Layers take this number of windows in
    // turn. Each window has a slot for every expert of a layer, so that slot ids equal expert ids.
    Numbering(const Layout & layout, const LayerSet & layers, int n_slots, int n_tensors = 0)
        : n_slots_(n_tensors ? n_tensors * layout.n_expert_max : std::min(n_slots, layers.n_experts)),
          resident_(n_tensors || n_slots >= layers.n_experts),
          windows_(layout.layers.size(), {0, 0}) {
        int first = 0, n = 0;
        for (int il : layers.moe_layers) {
            const int n_expert = layout.layers[il].n_expert;
            if (n_tensors) { first = n++ % n_tensors * layout.n_expert_max; }
            windows_[il] = resident_ ? Window{first, n_expert} : Window{0, n_slots_};
            first += n_expert;
        }
    }

    int n_slots() const { return n_slots_; }
    bool resident() const { return resident_; } // any thread
    Window window(int il) const { return windows_[il]; }
    int own_slot(int il, int expert) const { return windows_[il].first_slot + expert; } // while resident

    // Lets all layers share all slots, for a pool that shrinks below one slot per expert. It never gets resident again.
    void share_all_slots() {
        resident_ = false;
        for (Window & window : windows_) { window = {0, window.n_slots > 0 ? n_slots_ : 0}; }
    }

  private:
    const int n_slots_;
    std::atomic<bool> resident_;
    std::vector<Window> windows_; // [n_layer]
};

} // namespace moegguf
