// memory_parts.h: parts of what a context remembers, and states of a sequence that have some parts alone.
//
// Cells of full attention can be cut after any token. Cells of a sliding window are given to later
// tokens. A recurrent state cannot be cut. This file is compiled into libllama, whose classes it knows.
// `parts` is a set of the bits below; the empty set stands for the whole memory.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>

namespace moegguf {

enum memory_part : uint32_t { part_cells = 1, part_window = 2, part_recurrent = 4 };

} // namespace moegguf

extern "C" {

// Returns the parts that a memory has; 0: it cannot be cut.
LLAMA_API uint32_t moegguf_memory_parts(llama_memory_t memory);

// Do to some parts what the functions llama_memory_seq_* do to all.
LLAMA_API bool moegguf_parts_seq_rm(llama_memory_t memory, uint32_t parts, llama_seq_id seq, llama_pos p0,
                                    llama_pos p1);
LLAMA_API void moegguf_parts_seq_cp(llama_memory_t memory, uint32_t parts, llama_seq_id from, llama_seq_id to,
                                    llama_pos p0, llama_pos p1);

// Return the first or the last position that a sequence has in each of some parts; -1: there is none.
LLAMA_API llama_pos moegguf_parts_seq_pos_min(llama_memory_t memory, uint32_t parts, llama_seq_id seq);
LLAMA_API llama_pos moegguf_parts_seq_pos_max(llama_memory_t memory, uint32_t parts, llama_seq_id seq);

// Returns the bytes of a sequence's state; 0: llama.cpp cannot write it.
LLAMA_API size_t moegguf_parts_state_bytes(struct llama_context * context, uint32_t parts, llama_seq_id seq);

// Writes the state of a sequence, which has n bytes. Returns false where llama.cpp cannot write it.
LLAMA_API bool moegguf_parts_state_write(struct llama_context * context, uint32_t parts, llama_seq_id seq, void * to,
                                         size_t n);

// Replaces these parts of a sequence by a state of n bytes, which lies at an address of memory or of
// moegguf_kv_blocks_add. Returns false where llama.cpp cannot read the state.
LLAMA_API bool moegguf_parts_state_read(struct llama_context * context, uint32_t parts, llama_seq_id seq,
                                        const void * at, size_t n);
}
