// memory_parts.h: the parts of a context's memory (KV cache, recurrent state), and saved states of a sequence with only
// some of these parts.
//
// Cells of full attention can be cut after any token. Cells of a sliding window are reused for later tokens. A
// recurrent state cannot be cut. memory_parts.cpp is compiled into libllama, because it uses libllama's internal
// classes. The argument `parts` is a set of memory_part bits; 0: the whole memory.
#pragma once

#include "llama.h"

#include <cstddef>
#include <cstdint>

namespace moegguf {

enum memory_part : uint32_t { part_cells = 1, part_window = 2, part_recurrent = 4 };

} // namespace moegguf

extern "C" {

// Returns the parts that a memory has, as bits of memory_part; 0: the memory cannot be divided.
LLAMA_API uint32_t moegguf_memory_parts(llama_memory_t memory);

// The following two functions work like llama_memory_seq_rm and llama_memory_seq_cp, but only on the parts in `parts`.
// moegguf_parts_seq_cp also copies the cells' data at once. If the sequences use different streams (sets of cells), it
// can copy only all cells, and removes the other cells of `to`.
LLAMA_API bool moegguf_parts_seq_rm(llama_memory_t memory, uint32_t parts, llama_seq_id seq, llama_pos p0,
                                    llama_pos p1);
LLAMA_API void moegguf_parts_seq_cp(struct llama_context * context, uint32_t parts, llama_seq_id from, llama_seq_id to,
                                    llama_pos p0, llama_pos p1);

// Makes `seq`, which must have no cells, use the stream of the sequence `with`. `seq` must not be a sequence that
// llama.cpp evaluates.
LLAMA_API void moegguf_parts_share_stream(llama_memory_t memory, llama_seq_id seq, llama_seq_id with);

// moegguf_parts_seq_pos_min returns the largest of a sequence's first positions in these parts.
// moegguf_parts_seq_pos_max returns the smallest of its last positions. A part without cells of the sequence has the
// position -1.
LLAMA_API llama_pos moegguf_parts_seq_pos_min(llama_memory_t memory, uint32_t parts, llama_seq_id seq);
LLAMA_API llama_pos moegguf_parts_seq_pos_max(llama_memory_t memory, uint32_t parts, llama_seq_id seq);

// Returns the size in bytes of these parts of a sequence's state; 0: llama.cpp cannot write the state.
LLAMA_API size_t moegguf_parts_state_bytes(struct llama_context * context, uint32_t parts, llama_seq_id seq);

// Writes these parts of a sequence's state to `to`. Returns false if llama.cpp cannot write the state, or if the state
// does not have exactly n bytes.
LLAMA_API bool moegguf_parts_state_write(struct llama_context * context, uint32_t parts, llama_seq_id seq, void * to,
                                         size_t n);

// Replaces these parts of a sequence with a saved state of n bytes. `at`: the state's address in memory, or the address
// that moegguf_kv_blocks_add has written. In the second case, moegguf_kv_blocks_fill writes the tensors later. Returns
// false if llama.cpp cannot read the state.
LLAMA_API bool moegguf_parts_state_read(struct llama_context * context, uint32_t parts, llama_seq_id seq,
                                        const void * at, size_t n);
}
