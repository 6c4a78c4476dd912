// layout.h: the layout holds the place of each expert in the model's files. A layer set holds the layers of a tier and
// the sizes of its slots. The numbering holds the range of slots to which each layer's slot ids refer. All three are
// plain data, without I/O, and only the numbering ever changes. They do not know about memory, devices, or which
// experts are loaded.
#pragma once

#include "moegguf.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

namespace moegguf {

// An error inside the library, with the status that the C ABI returns for it.
struct Error : std::runtime_error {
    Error(moegguf_status status, const std::string & what) : std::runtime_error(what), status(status) {}
    moegguf_status status;
};

// Sets of matrix kinds. The bit 1 << kind represents a kind.
constexpr uint8_t all_kinds = (1 << MOEGGUF_MAX_KINDS) - 1;
constexpr uint8_t down_kind = 1 << MOEGGUF_DOWN;

// Sets of matrix kinds in the order in which llama.cpp multiplies: up (or gate and up as one matrix), then gate, then
// down. Each multiplication uses the matrices of one kind, of all chosen experts of a layer.
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
    uint64_t padding_bytes = 0; // number of zero bytes after the matrix in a slot
    uint64_t place = 0;         // offset of the matrix in a packed slot in bytes (Strides)
};

struct Layer {
    int n_expert = 0; // number of experts; 0: a layer without experts
    int n_expert_used = 0;
    int matrix[MOEGGUF_MAX_KINDS] = {-1, -1, -1, -1}; // index into Layout::matrices, by kind; -1: no such matrix
    uint8_t chunks = 0;                               // bits of the matrix kinds that the layer has
};

// Returns true if the type is known, the shape is in range, and each row consists of whole blocks.
bool is_matrix(const moegguf_matrix & m);

// The distance between neighbouring slots in each arena of a pool. Usually each matrix kind has an arena of its own. If
// the slots are packed, arena 0 holds all kinds, and the matrices of an expert lie one after another. A slot in an
// arena has the size of the largest matrix, or of the largest packed expert. Sizes include padding, and are rounded up
// to a multiple of 64 bytes and of every block size used there.
struct Strides {
    static constexpr uint64_t guard_bytes = 4096; // bytes after the last slot, because kernels may read beyond it

    bool packed = false;
    uint64_t of_arena[MOEGGUF_MAX_KINDS] = {}; // distance in bytes, by arena; 0: there is no such arena

    int arena(moegguf_kind kind) const { return packed ? 0 : kind; }
    // Makes room for a matrix of `bytes` bytes, including its padding, after the first `place` bytes of a packed slot.
    // Returns the place of the expert's next matrix.
    uint64_t add(moegguf_kind kind, ggml_type type, uint64_t bytes, uint64_t place);
    uint64_t slot_bytes() const;
    uint64_t arena_bytes(int arena, int n_slots) const { return of_arena[arena] * n_slots + guard_bytes; }
    uint64_t pool_bytes(int n_slots) const; // size of all arenas in bytes, including guard bytes

  private:
    uint64_t unit_[MOEGGUF_MAX_KINDS] = {64, 64, 64, 64}; // every distance is a multiple of this number of bytes
};

// Returns the strides of a pool for these matrices. Throws Error(INVALID) for a layer, kind or type that does not
// exist.
Strides strides_for(const moegguf_matrix * matrices, int n, bool packed);

struct Layout {
    std::vector<Matrix> matrices;
    std::vector<Layer> layers;
    std::vector<std::string> shards;
    std::vector<std::vector<std::string>> mirrors; // paths of the same shards on other drives
    int n_expert_max = 0;
    int n_experts = 0; // number of experts in all layers
    int n_moe_layers = 0;
    std::vector<int> moe_layers; // il of the layers with experts, in order
    std::vector<int> row_of;     // [n_layer] index of the layer in moe_layers; -1: a layer without experts

    // Throws Error(INVALID) if the config is inconsistent.
    explicit Layout(const moegguf_config & config);

    bool has_experts(int il) const { return il >= 0 && il < (int)layers.size() && layers[il].n_expert > 0; }
    bool has_expert(int il, int expert) const { return has_experts(il) && expert >= 0 && expert < layers[il].n_expert; }
    int key(int il, int expert) const { return il * n_expert_max + expert; }
    size_t n_keys() const { return layers.size() * n_expert_max; }
    uint64_t bytes(int il, uint8_t kinds) const { // size of an expert's matrices of these kinds, without padding
        uint64_t n = 0;
        for (kinds &= layers[il].chunks; kinds; kinds &= kinds - 1) {
            n += matrices[layers[il].matrix[__builtin_ctz(kinds)]].expert_bytes;
        }
        return n;
    }

  private:
    void add(const moegguf_matrix & m);
};

// The layers whose experts one tier may hold.
struct LayerSet {
    std::vector<int> moe_layers; // il of the layers, in order
    std::vector<uint8_t> has;    // [n_layer] 1: the set includes the layer
    int n_experts = 0;           // number of experts in these layers
    int n_chunks = 0;            // number of matrices of all these experts
    int token_cycle = 0;         // total number of experts that one token uses in these layers
    int n_used_max = 0;          // largest number of experts that a token uses in one layer
    Strides strides;             // strides of a pool whose slots can hold an expert of any of these layers

    // Selects the MoE layers for which holds(il) is true. packed: the slots are packed (Strides).
    template <typename Holds>
    LayerSet(const Layout & layout, Holds holds, bool packed = false) : has(layout.layers.size(), 0) {
        strides.packed = packed;
        for (int il : layout.moe_layers) {
            if (holds(il)) { add(il, layout); }
        }
    }

  private:
    void add(int il, const Layout & layout);
};

// The range of slots that a layer's pool tensor covers. Slot id 0 is slot `first_slot`.
struct Window {
    int first_slot;
    int n_slots;
};

// The window of each layer of a tier. If there is a slot for every expert ("resident"), each layer has its own window
// of n_expert slots, and slot ids are equal to expert ids. Otherwise all layers of the tier share one window of all
// slots. Layers of other tiers have no window.
class Numbering {
  public:
    // n_tensors > 0: the slots are places in staging tensors (staged_supply.cpp), one window for each tensor. The
    // layers use these windows in turn. Each window has a slot for every expert of a layer, so slot ids are equal to
    // expert ids.
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
    bool resident() const { return resident_; } // any thread may call this
    Window window(int il) const { return windows_[il]; }
    // Returns the slot that is reserved for this expert. Valid only while resident.
    int own_slot(int il, int expert) const { return windows_[il].first_slot + expert; }

    // Makes all layers share all slots, for a pool that shrinks below one slot per expert. This is permanent, even if
    // the pool grows again.
    void share_all_slots() {
        resident_ = false;
        for (Window & window : windows_) { window = {0, window.n_slots > 0 ? n_slots_ : 0}; }
    }

  private:
    const int n_slots_;
    std::atomic<bool> resident_;
    std::vector<Window> windows_; // [n_layer] n_slots is 0 for layers of other tiers
};

} // namespace moegguf
