// pool.h: fast memory for experts on one ggml device, and the tensors that llama.cpp multiplies with.
//
// It may allocate, write and free its own arenas, and bind its tensors to them. It does not know which expert is in a
// slot, nor who may write there: its callers see to that.
#pragma once

#include "layout.h"

#include "ggml-cpp.h"

namespace moegguf {

// The most that is read and written at once, so that staging stays small beside experts of 50 MB: about 4 MiB in whole
// groups of 64 rows. Interleaved layouts work on groups of up to 16 rows, so every piece is self-contained.
uint64_t piece_bytes(const Matrix & m);

// Whether the CPU's kernels that multiply with these ask for an order of their matrices, as they would lie in a pool.
bool cpu_kernels_ask_for_order(const moegguf_matrix * matrices, int n);

// Where the memory of a pool comes from.
struct PoolMemory {
    ggml_backend_dev_t device = nullptr; // computes with it, or copies from it
    ggml_backend_buffer_type_t buft = nullptr;
    bool repack = false; // where the device's kernels support it
    bool pinned = false; // host memory that the device copies from by itself
    std::string note;    // why it is not what it should be; empty: it is
};

ggml_backend_dev_t find_device(const char * name); // NULL: the CPU. Throws Error(INVALID).
// That computes with so many threads, where the device has any. Throws Error(MEMORY).
ggml_backend_ptr make_backend(ggml_backend_dev_t device, int n_threads);
PoolMemory device_memory(const char * name, bool repack); // of the device itself; likewise
// To copy to these devices from: pinned where the first that pins memory does so.
PoolMemory host_memory(const std::vector<ggml_backend_dev_t> & devices);

// Raises the padding of matrices to what the device's memory has behind each: kernels read on there.
void pad(ggml_backend_dev_t device, moegguf_matrix * matrices, int n);

// Returns how many of n_slots slots a pool of these matrices can have on a device: kernels take a pool as one tensor,
// whose slots they find by 32-bit offsets, and it lies in one buffer. n_slots where no kernel takes a single slot.
int most_slots(ggml_backend_dev_t device, const moegguf_matrix * matrices, int n, int n_slots);

// Rows from the file's layout into the one that the CPU's kernels multiply with, past the cache (interleave.cpp).
constexpr uintptr_t uncached_alignment = 16; // of what is written past the cache

// Interleaves n_rows rows of n_cols values from `rows` (the file's layout) into `out`, aligned.
using Interleave = void (*)(uint8_t * out, const uint8_t * rows, int64_t n_rows, int64_t n_cols);

// The function that lays out a tensor's rows just as its buffer type does, in less time; nullptr: there is none. Asked
// once per matrix: upstream's chooses by type, shape and processor, so both do a few random rows, which are compared.
// `slot` describes one expert [ne0, ne1], allocated in that buffer type; it is not written.
Interleave find_interleave(const ggml_tensor & slot);

class Pool {
  public:
    // Allocates every arena, for matrices of these layers. Throws Error(MEMORY) when the device refuses.
    Pool(const Layout & layout, const LayerSet & layers, const Numbering & numbering, const PoolMemory & memory);

    ggml_tensor * tensor(int matrix) const { return tensors_[matrix]; } // nullptr: of another tier's layer

    // Rows [row, row + n_rows) of one expert, in the file's layout, into a slot; behind the last one its padding.
    // Called by readers, without the store's lock.
    void write(int matrix, int slot, int64_t row, int64_t n_rows, const void * data) const;
    uint8_t * data(int matrix, int slot) const; // where it lies
    // Whole matrices of n neighbouring slots with their padding, laid out in `data` as they are here. Returns before it
    // is done where the backend can: synchronize it before `data` changes.
    void write_slots(ggml_backend_t backend, int matrix, int slot, int n, const void * data) const;
    // The same from slots of another pool on the same device.
    void copy_slots(ggml_backend_t backend, int matrix, int slot, int n, const Pool & from, int from_slot) const;
    bool repacked(int matrix) const { return interleaved_[matrix]; }

    // Whether the kernels that multiply with the tensors ask for an order of their matrices, by op_params.
    bool kernels_ask_for_order() const;
    void set_op_params(int matrix, const void * pointer);
    // Where they do, a weight that nothing is computed with: ggml puts a node on the device that the weights among its
    // sources are on, and these kernels are to read the very ids that the hook has written.
    ggml_tensor * cpu_anchor() const { return cpu_anchor_; }

    // Every layer's window becomes all slots: for a pool that leaves the resident numbering.
    void share_all_slots(int n_slots);

    // Gives the memory of slots [first, last) back to the system where it is host memory.
    void release(int first, int last) const;

    // Allocates the arenas anew, of the same memory, for n_slots slots, and frees those before. keep: with what the
    // slots hold, so that both are there for a moment, an arena at a time; else the slots before must be empty. false:
    // the device refused; with `keep` every slot that both sizes have is as before, without there may be none.
    bool reallocate(int n_slots, bool keep);
    bool gives_pages_back() const { return host_ && !memory_.pinned; } // by release(): it need not be allocated anew

    uint64_t bytes() const;
    bool host() const { return host_; }
    const PoolMemory & memory() const { return memory_; }
    int n_repacked() const;
    int n_uncached() const;

  private:
    struct Arena {
        ggml_backend_buffer_ptr memory; // owns; of the interleaving buffer type where a layer wants that
        ggml_backend_buffer_ptr alias;  // the same memory as a plain buffer
        uint8_t * base = nullptr;       // nullptr: no matrices of this kind here
    };

    void allocate(const Layout & layout, const LayerSet & layers, int n_slots);
    void copy_slots(int kind, ggml_backend_buffer_t from, ggml_backend_buffer_t to) const;
    void rebind(int kind, int n_slots);
    void show(ggml_tensor * pool, int n_slots) const;
    ggml_tensor slots_view(int matrix, int slot, int n) const;
    void make_tensor(const Matrix & m, int matrix, Window window);

    PoolMemory memory_;
    std::vector<ggml_backend_buffer_type_t> interleaved_; // per matrix; nullptr: plain
    std::vector<Interleave> interleave_;                  // per matrix; nullptr: the buffer type's own
    Arena arenas_[MOEGGUF_MAX_KINDS];
    const Strides strides_;
    ggml_context_ptr context_;
    std::vector<ggml_tensor *> tensors_; // [n_matrices], what llama.cpp multiplies with; nullptr: not here
    std::vector<ggml_tensor *> slot_;    // [n_matrices], a template: one expert in slot 0
    std::vector<moegguf_kind> kind_;
    std::vector<uint64_t> padding_; // [n_matrices] behind an expert; 0 where slots are interleaved
    ggml_backend_buffer_ptr anchor_memory_;
    ggml_tensor * cpu_anchor_ = nullptr;
    int n_ids_ = 0; // that kernels may be given, also where there are fewer slots: experts that are streamed
    bool host_;
};

} // namespace moegguf
