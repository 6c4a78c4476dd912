// memory_parts.h: parts of what a context remembers, so that a state of a sequence can have some of them alone.
//
// Cells of full attention can be cut after any token. Cells of a sliding window are given to later tokens. A recurrent
// state cannot be cut. This file is compiled into libllama, whose classes it knows.
#pragma once

#include "llama-memory.h"

namespace moegguf {

// The bits of parts, which a set has. The empty set stands for the whole memory, which cannot be cut then.
enum memory_part : uint32_t { part_cells = 1, part_window = 2, part_recurrent = 4 };

constexpr uint32_t part_shift = 8; // the flags of llama_state_seq_get_data_ext have a set of parts from this bit on

// Writes those parts of a sequence's state that the flags name.
void write_parts(llama_memory_i & memory, llama_io_write_i & io, llama_seq_id seq, llama_state_seq_flags flags);

// Reads what write_parts has written with the same flags, in place of what the sequence has of these parts. Throws
// where that cannot be.
void read_parts(llama_memory_i & memory, llama_io_read_i & io, llama_seq_id seq, llama_state_seq_flags flags);

} // namespace moegguf

extern "C" {

// Returns the parts that a memory has; 0: it cannot be cut.
LLAMA_API uint32_t moegguf_memory_parts(llama_memory_t memory);

// Does to some parts what the functions llama_memory_seq_* do to all.
LLAMA_API bool moegguf_parts_seq_rm(llama_memory_t memory, uint32_t parts, llama_seq_id seq, llama_pos p0,
                                    llama_pos p1);
LLAMA_API void moegguf_parts_seq_cp(llama_memory_t memory, uint32_t parts, llama_seq_id from, llama_seq_id to,
                                    llama_pos p0, llama_pos p1);

// Returns the first or the last position that a sequence has in each of some parts; -1: there is none.
LLAMA_API llama_pos moegguf_parts_seq_pos_min(llama_memory_t memory, uint32_t parts, llama_seq_id seq);
LLAMA_API llama_pos moegguf_parts_seq_pos_max(llama_memory_t memory, uint32_t parts, llama_seq_id seq);
}
