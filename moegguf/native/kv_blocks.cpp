// kv_blocks.cpp: states of sequences, read from files into a KV cache by two threads, each checked by its digest.
//
// It may write the tensors that llama.cpp names for these states. Does not know a state's format.
#include "api.h"
#include "files.h"

#include "ggml-backend.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <memory>

using namespace moegguf;

namespace {

constexpr size_t chunk_bytes = 256u << 10; // still in a core's cache when they are digested and copied

struct Part { // of a state, for a tensor; it begins at `at` in the file
    ggml_tensor * tensor;
    size_t offset, n;
    uint64_t at;
};

struct Block {
    explicit Block(const moegguf_kv_block & b)
        : file(new Descriptor(open(b.path, O_RDONLY | O_CLOEXEC))),
          prefix((const uint8_t *)b.prefix, (const uint8_t *)b.prefix + b.n_prefix),
          begin(b.begin),
          end(b.begin + b.n_bytes) {
        memcpy(digest, b.digest, sizeof(digest));
#ifdef POSIX_FADV_WILLNEED
        posix_fadvise(file->fd, 0, 0, POSIX_FADV_WILLNEED); // llama.cpp looks at some bytes here and there first
#endif
    }

    std::unique_ptr<Descriptor> file;
    std::vector<uint8_t> prefix;
    uint64_t begin, end; // of the state in the file
    uint8_t digest[16];
    std::vector<Part> parts;
    bool is_right = false; // the file is what its digest says
};

// Its bytes go to their tensors.
void fill(Block & block) {
    std::vector<uint8_t> chunk(chunk_bytes);
    XXH3_state_t digest;
    XXH3_128bits_reset(&digest);
    XXH3_128bits_update(&digest, block.prefix.data(), block.prefix.size());
    auto part = block.parts.begin();
    for (uint64_t at = block.begin; at < block.end;) {
        const ssize_t n =
            pread(block.file->fd, chunk.data(), std::min(chunk_bytes, (size_t)(block.end - at)), (off_t)at);
        if (n <= 0) { return; }
        XXH3_128bits_update(&digest, chunk.data(), (size_t)n);
        const uint64_t next = at + (uint64_t)n;
        for (; part != block.parts.end() && part->at < next; ++part) {
            const uint64_t from = std::max(part->at, at), to = std::min(part->at + part->n, next);
            ggml_backend_tensor_set(part->tensor, &chunk[from - at], part->offset + (from - part->at), to - from);
            if (part->at + part->n > next) { // it goes on in the next chunk
                break;
            }
        }
        at = next;
    }
    XXH128_canonical_t found;
    XXH128_canonicalFromHash(&found, XXH3_128bits_digest(&digest));
    block.is_right = memcmp(found.digest, block.digest, sizeof(found.digest)) == 0;
}

} // namespace

struct moegguf_kv_blocks {
    std::vector<Block> blocks;
    std::unique_ptr<uint8_t[]> addresses; // of the last state, and never touched, so that they take no memory

    // Where n bytes at this address are in the last block's file; 0: it is no address of its state.
    uint64_t position(const void * address, size_t n) const {
        const Block & block = blocks.back();
        const uintptr_t first = (uintptr_t)addresses.get(), here = (uintptr_t)address;
        return first <= here && here + n <= first + (block.end - block.begin) ? block.begin + (here - first) : 0;
    }
};

namespace {

thread_local moegguf_kv_blocks * current = nullptr; // llama.cpp takes a state of its last block

} // namespace

extern "C" {

moegguf_kv_blocks * moegguf_kv_blocks_open() { return new (std::nothrow) moegguf_kv_blocks; }

void moegguf_kv_blocks_close(moegguf_kv_blocks * blocks) {
    current = nullptr;
    delete blocks;
}

int moegguf_kv_blocks_add(moegguf_kv_blocks * blocks, const moegguf_kv_block * block, const void ** state) {
    return guarded([&] {
        given(blocks).blocks.emplace_back(given(block));
        blocks->addresses.reset(new uint8_t[block->n_bytes]);
        given(state) = blocks->addresses.get();
        current = blocks;
    });
}

int moegguf_kv_blocks_fill(moegguf_kv_blocks * given_blocks, int32_t * n_right) {
    return guarded([&] {
        current = nullptr;
        std::vector<Block> & blocks = given(given_blocks).blocks;
        const auto fill_some = [&](size_t begin, size_t end) {
            std::for_each(blocks.begin() + begin, blocks.begin() + end, fill);
        };
        // Halves, as neighbours lie in the same huge pages, which only one thread should touch first.
        const size_t middle = blocks.size() / 2;
        auto first = std::async(std::launch::async | std::launch::deferred, fill_some, 0, middle);
        fill_some(middle, blocks.size());
        first.get();
        for (const Block & block : blocks) {
            for (const Part & part : block.parts) {
                if (!block.is_right) { // a NaN in a cell that is not used makes others of it
                    ggml_backend_tensor_memset(part.tensor, 0, part.offset, part.n);
                }
            }
        }
        const auto wrong = [](const Block & block) { return !block.is_right; };
        given(n_right) = (int32_t)(std::find_if(blocks.begin(), blocks.end(), wrong) - blocks.begin());
    });
}

bool moegguf_state_read(void * to, const void * at, size_t n) {
    const uint64_t position = current ? current->position(at, n) : 0;
    if (position && pread(current->blocks.back().file->fd, to, n, (off_t)position) != (ssize_t)n) {
        memset(to, 0, n); // the digest will not be right
    }
    return position != 0;
}

bool moegguf_state_put(ggml_tensor * tensor, size_t offset, const void * at, size_t n) {
    const uint64_t position = current ? current->position(at, n) : 0;
    if (position) { current->blocks.back().parts.push_back({tensor, offset, n, position}); }
    return position != 0;
}

} // extern "C"
