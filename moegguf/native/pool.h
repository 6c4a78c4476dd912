// pool.h: the memory of expert slots on one ggml device, and the tensors by which llama.cpp multiplies.
//
// A pool allocates, writes and frees arenas, and binds its tensors to them. Usually it has an arena for each matrix
// kind. If slots are packed (Strides in layout.h), one arena holds all kinds. If a device looks up slot ids itself
// (mapped.h), the arenas of its slots lie in memory that the pool of the slots in RAM owns. A pool does not know which
// expert is in a slot. Callers ensure that only one thread at a time writes a matrix of a slot.
#pragma once

#include "layout.h"

#include "ggml-cpp.h"

namespace moegguf {

// Returns the size in bytes of a piece: the rows of a matrix that are read and written at once. A piece is at most
// about 4 MiB, or 64 rows if they are larger. So buffers stay small even for a 50 MB expert. A piece consists of whole
// groups of 64 rows, because interleaved layouts work on groups of up to 16 rows.
uint64_t piece_bytes(const Matrix & m);

// Creates a context for the descriptions of n_tensors tensors, which have no memory yet. Throws Error(MEMORY).
ggml_context_ptr tensor_context(size_t n_tensors);

// Returns true if the CPU kernels can multiply by the experts of these matrices in any order. Assumes that each matrix
// is interleaved if the CPU supports this.
bool cpu_kernels_ask_for_order(const moegguf_matrix * matrices, int n);

class Pool;

// The kind of memory in which a pool is allocated.
struct PoolMemory {
    ggml_backend_dev_t device = nullptr; // device that computes on the memory or copies from it
    ggml_backend_buffer_type_t buft = nullptr;
    bool repack = false; // true: interleaves weights of types that the device's kernels support
    bool pinned = false; // true: pinned host memory, from which the device copies directly
    // The reason why the memory is not pinned for all devices. Empty: it is pinned for all of them, or needs no
    // pinning.
    std::string note;
    // The pool's slots and other slots form one range of addresses for each kind of matrix (mapped.h): first the
    // device's slots, then the slots in RAM. The pool of the slots in RAM is created first, and owns the ranges.
    const Pool * owner = nullptr; // pool of slots of a device: the pool that owns the ranges; nullptr: itself
    int n_others = 0;             // number of the other slots in the range; 0: there is no range
};

// Functions of a backend that offers such ranges (ggml_backend_reg_get_proc_address). "moegguf_alloc_range" returns a
// buffer of a device that begins with device_bytes of the device's own memory, followed by host_bytes of pinned host
// memory; nullptr: refused. Kernels and the host read the host memory at the same addresses. device_bytes is a multiple
// of 64. "moegguf_resize_range" changes the size of the device's own memory at the buffer's beginning, up to the first
// size. Addresses stay the same, those between the two parts then have no memory, and added memory is zero. Returns
// false if the device refuses.
using AllocRange = ggml_backend_buffer_t (*)(ggml_backend_dev_t device, size_t device_bytes, size_t host_bytes);
using ResizeRange = bool (*)(ggml_backend_buffer_t range, size_t device_bytes);
bool maps(const char * name); // true: the device of this name exists, and its backend offers both functions

// Returns the device of this name; NULL: the CPU. Throws Error(INVALID) for an unknown name.
ggml_backend_dev_t find_device(const char * name);
// Creates a ggml backend for a device. n_threads: the number of compute threads, for devices that use threads. Throws
// Error(MEMORY) if the device refuses.
ggml_backend_ptr make_backend(ggml_backend_dev_t device, int n_threads);
// Describes the device's own memory. Throws Error(INVALID) for an unknown device.
PoolMemory device_memory(const char * name, bool repack);
// Describes the host memory from which these devices are filled. The memory is pinned for the first device that can pin
// memory, and pageable if there is none.
PoolMemory host_memory(const std::vector<ggml_backend_dev_t> & devices);

// Raises padding_bytes of each matrix to the number of bytes that the device's kernels read beyond the matrix's end.
// Throws Error(INVALID) for an unknown type or an unsuitable shape.
void pad(ggml_backend_dev_t device, moegguf_matrix * matrices, int n);

// Returns true if slots on the device, and slots in RAM from which they are filled, are packed (Strides).
bool packs_slots(ggml_backend_dev_t device);

// Returns the largest number of slots, packed or not, from 1 to n_slots, that a pool of these matrices can have on a
// device. The limits are the size of one buffer and of one tensor, and the 32-bit offsets in kernels. Matrices that no
// kernel of the device can multiply set no limit.
int most_slots(ggml_backend_dev_t device, const moegguf_matrix * matrices, int n, int n_slots, bool packed);

class Pool {
  public:
    // Allocates all arenas for the matrices of these layers. Throws Error(MEMORY) if the device refuses.
    Pool(const Layout & layout, const LayerSet & layers, const Numbering & numbering, const PoolMemory & memory);

    // Returns nullptr if the matrix's layer is in another tier.
    ggml_tensor * tensor(int matrix) const { return tensors_[matrix]; }

    // Writes rows [row, row + n_rows) of one expert's matrix into a slot. `data` has the file's layout. After the last
    // row of the matrix, zeros are written as padding. Reader threads call this without the store's lock.
    void write(int matrix, int slot, int64_t row, int64_t n_rows, const void * data) const;
    uint8_t * data(int matrix, int slot) const; // address of a matrix in a slot
    uint8_t * end(int matrix, int slot) const;  // address of the first byte after this matrix and its padding
    // Returns the distance in bytes between neighbouring slots in the arena of a matrix.
    uint64_t stride(int matrix) const { return strides_.of_arena[arena_[matrix]]; }
    bool packed() const { return strides_.packed; } // true: the matrices of an expert lie one after another
    // Writes n bytes, beginning with the first byte of a matrix in a slot. The bytes must be whole matrices with their
    // padding, and `data` must have the layout of this pool. The function may return before the copy has ended:
    // synchronize the backend before `data` changes.
    void write_bytes(ggml_backend_t backend, int matrix, int slot, uint64_t n, const void * data) const;
    // Copies n bytes from another pool on the same device, beginning with the first byte of a matrix in both slots. The
    // bytes must be whole matrices with their padding. The function may return before the copy has ended.
    void copy_bytes(ggml_backend_t backend, int matrix, int slot, uint64_t n, const Pool & from, int from_slot) const;
    bool repacked(int matrix) const { return interleaved_[matrix]; }

    // Returns true if the kernels that multiply by this pool's tensors can call a function that chooses the next
    // expert. They find the function's address in the op_params of the pool tensor (set_op_params).
    bool kernels_ask_for_order() const;
    void set_op_params(int matrix, const void * pointer);
    // Returns a dummy weight in CPU memory, or nullptr if kernels cannot choose the order of experts. ggml computes a
    // node on the device that holds the node's weights. The node that holds the ids has this dummy weight as a source,
    // so ggml computes it on the CPU. Kernels then read the ids from the memory into which the hook has written them.
    ggml_tensor * cpu_anchor() const { return cpu_anchor_; }

    // Makes every layer's tensor cover all slots, for a pool without a slot for every expert.
    void share_all_slots(int n_slots);

    // Returns the whole pages of slots [first, last) to the system, if they are pageable host memory.
    void release(int first, int last) const;

    // Allocates new arenas for n_slots slots, in memory of the same kind, and frees the old ones. Returns false if the
    // device refuses. `keep`: copies the contents of slots, so the old and the new memory of one arena exist at the
    // same time. After a refusal, all slots that exist in both sizes keep their contents. Without `keep`, the slots
    // must be empty, and after a refusal the pool may have no memory at all.
    bool reallocate(int n_slots, bool keep);
    bool gives_pages_back() const { return host_ && !memory_.pinned; } // true: release() alone can shrink the pool

    uint64_t bytes() const;
    bool host() const { return host_; }
    const PoolMemory & memory() const { return memory_; }

  private:
    struct Arena {
        ggml_backend_buffer_ptr memory; // owns the memory; its type interleaves if any layer is interleaved
        // Plain buffer over the same memory, for layers that are not interleaved; nullptr: no layer is interleaved.
        ggml_backend_buffer_ptr alias;
        uint8_t * base = nullptr; // address; nullptr: the pool has no such arena
    };

    void allocate(const Layout & layout, const LayerSet & layers, int n_slots);
    void allocate_range(int a, uint64_t n_bytes);
    bool resize_ranges(int n_slots);
    void copy_slots(int arena, ggml_backend_buffer_t from, ggml_backend_buffer_t to) const;
    void rebind(int arena, int n_slots);
    void show(ggml_tensor * pool, int n_slots) const;
    ggml_tensor view(int matrix, int slot, uint64_t n) const;
    void make_tensor(const Matrix & m, int matrix, Window window);

    PoolMemory memory_;
    std::vector<ggml_backend_buffer_type_t> interleaved_; // [n_matrices] buffer type that interleaves; nullptr: plain
    Arena arenas_[MOEGGUF_MAX_KINDS];
    const Strides strides_;
    ggml_context_ptr context_;
    // [n_matrices] tensors by which llama.cpp multiplies; nullptr: the matrix's layer is in another tier.
    std::vector<ggml_tensor *> tensors_;
    // [n_matrices] tensor of one expert in slot 0, which is the template for a tensor of any slot; nullptr: the
    // matrix's layer is in another tier.
    std::vector<ggml_tensor *> slot_;
    std::vector<int> arena_;        // [n_matrices] arena of the matrix
    std::vector<uint64_t> place_;   // [n_matrices] offset of the matrix in a slot of its arena, in bytes
    std::vector<uint64_t> padding_; // [n_matrices] number of padding bytes, all zero, after an expert in a slot
    ggml_backend_buffer_ptr anchor_memory_;
    ggml_tensor * cpu_anchor_ = nullptr;
    // Minimum size of a pool tensor's third dimension, if kernels may get expert ids, which can exceed n_slots;
    // otherwise 0.
    int n_ids_ = 0;
    int n_in_range_ = 0; // number of slots of a device that have memory in the owner's range
    bool host_;
};

} // namespace moegguf
