// pool.h: fast memory for experts on one ggml device, and the tensors that llama.cpp multiplies with.
#pragma once

#include "numbering.h"

#include "ggml-cpp.h"

namespace moegguf {

// The most that is read and written at once, so that staging stays small beside experts of 50 MB: about 4 MiB in whole
// groups of 64 rows. Interleaved layouts work on groups of up to 16 rows, so every piece is self-contained.
uint64_t piece_bytes(const Matrix & m);

// Whether the CPU's kernels that multiply with these ask for an order of their matrices, as they would lie in a pool.
bool cpu_kernels_ask_for_order(const moegguf_matrix * matrices, int n);

class Pool {
  public:
    // Allocates every arena. Throws Error(MEMORY) when the device refuses, Error(INVALID) for an unknown device.
    Pool(const Layout & layout, const Numbering & numbering, const char * device, bool repack);

    ggml_tensor * tensor(int matrix) const { return tensors_[matrix]; }

    // Rows [row, row + n_rows) of one expert, in the file's layout, into a slot. Called by readers, without the store's
    // lock.
    void write(int matrix, int slot, int64_t row, int64_t n_rows, const void * data) const;
    void read(int matrix, int slot, void * out) const; // plain slots only
    bool repacked(int matrix) const { return repacked_[matrix]; }

    // Whether the kernels that multiply with the tensors ask for an order of their matrices, by op_params.
    bool kernels_ask_for_order() const;
    void set_op_params(int matrix, const void * pointer);

    // Every layer's window becomes all slots: for a pool that leaves the resident numbering.
    void share_all_slots(int n_slots);

    // Gives the memory of slots [first, last) back to the system where it is host memory.
    void release(int first, int last) const;

    uint64_t bytes() const { return bytes_; }
    bool host() const { return host_; }
    int n_repacked() const;

  private:
    struct Arena {
        ggml_backend_buffer_ptr memory; // owns; of the interleaving buffer type where a layer wants that
        ggml_backend_buffer_ptr alias;  // the same memory as a plain buffer
        uint8_t * base = nullptr;
    };

    void allocate(const Layout & layout, int n_slots, ggml_backend_buffer_type_t plain);
    void make_tensor(const Matrix & m, int matrix, Window window);

    ggml_backend_dev_t device_ = nullptr;
    std::vector<ggml_backend_buffer_type_t> interleaved_; // per matrix; nullptr: plain
    std::vector<bool> repacked_;
    Arena arenas_[MOEGGUF_MAX_KINDS];
    const Strides strides_;
    ggml_context_ptr context_;
    std::vector<ggml_tensor *> tensors_; // [n_matrices], what llama.cpp multiplies with
    std::vector<ggml_tensor *> slot_;    // [n_matrices], a template: one expert in slot 0
    std::vector<moegguf_kind> kind_;
    uint64_t bytes_ = 0;
    int n_ids_ = 0; // that kernels may be given, also where there are fewer slots: experts that are streamed
    bool host_ = true;
};

} // namespace moegguf
