// memory_parts.h: the parts of a context's memory (KV cache, recurrent state), and saved states of a sequence with only
// some of these parts.
//
// Cells of full attention can be cut after any token. Cells of a sliding window are reused for later tokens. A
// recurrent state cannot be cut. This file is compiled into libllama, and knows its classes. `parts` is a set of the
// bits below; 0 stands for the whole memory.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>

namespace moegguf {

enum memory_part : uint32_t { part_cells = 1, part_window = 2, part_recurrent = 4 };

} // namespace moegguf

extern "C" {

// Returns the parts of a memory; 0: it cannot be divided into parts.
LLAMA_API uint32_t moegguf_memory_parts(llama_memory_t memory);

// The next two functions work like llama_memory_seq_rm and llama_memory_seq_cp, but only on these parts.
LLAMA_API bool moegguf_parts_seq_rm(llama_memory_t memory, uint32_t parts, llama_seq_id seq, llama_pos p0,
                                    llama_pos p1);
LLAMA_API void moegguf_parts_seq_cp(llama_memory_t memory, uint32_t parts, llama_seq_id from, llama_seq_id to,
                                    llama_pos p0, llama_pos p1);

// The next two functions return the first and the last position of a sequence that every one of these parts has; -1:
// none.
LLAMA_API llama_pos moegguf_parts_seq_pos_min(llama_memory_t memory, uint32_t parts, llama_seq_id seq);
LLAMA_API llama_pos moegguf_parts_seq_pos_max(llama_memory_t memory, uint32_t parts, llama_seq_id seq);

// Returns the size in bytes of the state of a sequence; 0: llama.cpp cannot write the state.
LLAMA_API size_t moegguf_parts_state_bytes(struct llama_context * context, uint32_t parts, llama_seq_id seq);

// Writes the state of a sequence to `to`, which has n bytes. Returns false if llama.cpp cannot write the state.
LLAMA_API bool moegguf_parts_state_write(struct llama_context * context, uint32_t parts, llama_seq_id seq, void * to,
                                         size_t n);

// Replaces these parts of a sequence by a saved state of n bytes. `at` is an address in memory, or the address that
// moegguf_kv_blocks_add has written. Returns false if llama.cpp cannot read the state.
LLAMA_API bool moegguf_parts_state_read(struct llama_context * context, uint32_t parts, llama_seq_id seq,
                                        const void * at, size_t n);
}
