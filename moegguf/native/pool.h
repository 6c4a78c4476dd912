// pool.h: fast memory for experts on one ggml device, and the tensors that llama.cpp multiplies with.
//
// A pool allocates, writes and frees its own arenas, and binds its tensors to them. It does not know which expert is in
// a slot. Its callers make sure that only one thread writes into a slot.
#pragma once

#include "layout.h"

#include "ggml-cpp.h"

namespace moegguf {

// Returns the size of a piece: the rows that are read and written at once. A piece is about 4 MiB, so that buffers stay
// small beside experts of 50 MB. It has whole groups of 64 rows: interleaved layouts work on groups of up to 16 rows.
uint64_t piece_bytes(const Matrix & m);

// Returns whether the CPU's kernels choose the order in which they compute these matrices, as laid out in a pool.
bool cpu_kernels_ask_for_order(const moegguf_matrix * matrices, int n);

// The kind of memory that a pool is allocated in.
struct PoolMemory {
    ggml_backend_dev_t device = nullptr; // the device that computes with the memory, or copies from it
    ggml_backend_buffer_type_t buft = nullptr;
    bool repack = false; // interleaves the types that the device's kernels support
    bool pinned = false; // pinned host memory: the device copies from it by itself
    std::string note;    // the reason why the memory is not pinned; empty: it is pinned, or need not be
};

ggml_backend_dev_t find_device(const char * name); // NULL: the CPU. Throws Error(INVALID).
// Makes a backend that computes with n_threads threads, if the device has threads. Throws Error(MEMORY).
ggml_backend_ptr make_backend(ggml_backend_dev_t device, int n_threads);
PoolMemory device_memory(const char * name, bool repack); // memory of the device itself. Throws Error(INVALID)
// Returns host memory to copy to these devices from. It is pinned by the first device that can pin memory.
PoolMemory host_memory(const std::vector<ggml_backend_dev_t> & devices);

// Raises the padding of matrices to the bytes that the device's memory has after each, because kernels read them.
void pad(ggml_backend_dev_t device, moegguf_matrix * matrices, int n);

// Returns the number of slots, up to n_slots, that a pool of these matrices can have on a device. Kernels read a pool
// as one tensor in one buffer, and find its slots by 32-bit offsets. Returns n_slots if no kernel can take even one
// slot.
int most_slots(ggml_backend_dev_t device, const moegguf_matrix * matrices, int n, int n_slots);

// Alignment of rows that are written past the cache, in the layout that the CPU's kernels multiply with
// (interleave.cpp).
constexpr uintptr_t uncached_alignment = 16;

// Interleaves n_rows rows of n_cols values from `rows` (the file's layout) into `out`, aligned.
using Interleave = void (*)(uint8_t * out, const uint8_t * rows, int64_t n_rows, int64_t n_cols);

// Returns a function that lays out a tensor's rows exactly as its buffer type does, in less time; nullptr: there is
// none. It is called once per matrix. Upstream chooses a layout by type, shape and processor, so both functions lay out
// a few random rows, and the results are compared. `slot` describes one expert [ne0, ne1], allocated in that buffer
// type. It is not written.
Interleave find_interleave(const ggml_tensor & slot);

class Pool {
  public:
    // Allocates every arena for matrices of these layers. Throws Error(MEMORY) when the device refuses.
    Pool(const Layout & layout, const LayerSet & layers, const Numbering & numbering, const PoolMemory & memory);

    ggml_tensor * tensor(int matrix) const { return tensors_[matrix]; } // nullptr: another tier has the layer

    // Writes rows [row, row + n_rows) of one expert, in the file's layout, into a slot, and the padding after the last
    // row. Readers call this without the store's lock.
    void write(int matrix, int slot, int64_t row, int64_t n_rows, const void * data) const;
    uint8_t * data(int matrix, int slot) const; // address of a matrix in a slot
    // Writes whole matrices of n neighbouring slots with their padding. `data` has the layout of this pool. May return
    // before the copy is done: synchronize the backend before `data` changes.
    void write_slots(ggml_backend_t backend, int matrix, int slot, int n, const void * data) const;
    // Copies whole matrices of n neighbouring slots from slots of another pool on the same device.
    void copy_slots(ggml_backend_t backend, int matrix, int slot, int n, const Pool & from, int from_slot) const;
    bool repacked(int matrix) const { return interleaved_[matrix]; }

    // Returns whether the kernels that multiply with the tensors choose the order of their matrices, by op_params.
    bool kernels_ask_for_order() const;
    void set_op_params(int matrix, const void * pointer);
    // Returns a weight that nothing is computed with, or nullptr if kernels choose no order. ggml computes a node on
    // the device of the weights among its sources. This weight keeps a node of ids on the CPU, so that these kernels
    // read the very ids that the hook has written.
    ggml_tensor * cpu_anchor() const { return cpu_anchor_; }

    // Makes all slots the window of every layer, for a pool that leaves the resident numbering.
    void share_all_slots(int n_slots);

    // Gives the memory of slots [first, last) back to the system, if it is host memory.
    void release(int first, int last) const;

    // Allocates the arenas anew for n_slots slots, in memory of the same kind, and frees the earlier ones. With `keep`
    // it copies the slots' contents, so that the old and the new memory of one arena exist for a moment. Without `keep`
    // the slots must be empty. Returns false when the device refused. With `keep` every slot that both sizes have then
    // stays as it was. Without `keep` there may be no slots then.
    bool reallocate(int n_slots, bool keep);
    bool gives_pages_back() const { return host_ && !memory_.pinned; } // release() is enough to shrink the pool

    uint64_t bytes() const;
    bool host() const { return host_; }
    const PoolMemory & memory() const { return memory_; }
    int n_repacked() const;
    int n_uncached() const;

  private:
    struct Arena {
        ggml_backend_buffer_ptr memory; // owns the memory; its buffer type interleaves if a layer is interleaved
        ggml_backend_buffer_ptr alias;  // a plain buffer over this memory
        uint8_t * base = nullptr;       // nullptr: no matrices of this kind here
    };

    void allocate(const Layout & layout, const LayerSet & layers, int n_slots);
    void copy_slots(int kind, ggml_backend_buffer_t from, ggml_backend_buffer_t to) const;
    void rebind(int kind, int n_slots);
    void show(ggml_tensor * pool, int n_slots) const;
    ggml_tensor slots_view(int matrix, int slot, int n) const;
    void make_tensor(const Matrix & m, int matrix, Window window);

    PoolMemory memory_;
    std::vector<ggml_backend_buffer_type_t> interleaved_; // [n_matrices]; nullptr: plain
    std::vector<Interleave> interleave_;                  // [n_matrices]; nullptr: the buffer type's own function
    Arena arenas_[MOEGGUF_MAX_KINDS];
    const Strides strides_;
    ggml_context_ptr context_;
    std::vector<ggml_tensor *> tensors_; // [n_matrices] tensors that llama.cpp multiplies with; nullptr: not here
    std::vector<ggml_tensor *> slot_;    // [n_matrices] templates: one expert in slot 0
    std::vector<moegguf_kind> kind_;
    std::vector<uint64_t> padding_; // [n_matrices] bytes after an expert; 0 where slots are interleaved
    ggml_backend_buffer_ptr anchor_memory_;
    ggml_tensor * cpu_anchor_ = nullptr;
    int n_ids_ = 0; // ids that kernels may get; more than there are slots while experts are streamed
    bool host_;
};

} // namespace moegguf
