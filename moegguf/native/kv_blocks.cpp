// kv_blocks.cpp: reads sequence states from files into a KV cache, and checks their digests. A thread starts when the
// first block is added, if the system allows it. The thread fills blocks (writes their bytes into tensors) while
// llama.cpp lists the parts of later blocks. moegguf_kv_blocks_fill fills the remaining blocks together with this
// thread, and waits for it to end.
//
// This file writes only the tensors into which llama.cpp reads these states. It does not know the format of a state.
#include "api.h"
#include "files.h"

#include "ggml-backend.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>

using namespace moegguf;

namespace {

constexpr size_t chunk_bytes = 256u << 10; // a chunk stays in a core's cache until it is digested and copied
// Number of successive blocks that a thread takes at a time. Successive blocks may share a huge page of the KV cache,
// which only one thread should touch first.
constexpr size_t n_together = 8;

struct Part { // the part of a state that belongs to one tensor
    ggml_tensor * tensor;
    size_t offset, n; // offset in the tensor, and size, in bytes
    uint64_t at;      // offset in the file in bytes
};

struct Block {
    explicit Block(const moegguf_kv_block & b)
        : path(b.path),
          prefix((const uint8_t *)b.prefix, (const uint8_t *)b.prefix + b.n_prefix),
          begin(b.begin),
          end(b.begin + b.n_bytes) {
        memcpy(digest, b.digest, sizeof(digest));
    }

    std::string path;
    std::vector<uint8_t> prefix;
    uint64_t begin, end; // offsets in the file at which the state begins and ends, in bytes
    uint8_t digest[16];
    std::vector<Part> parts;
    bool is_right = false; // true: the file was read, and its bytes have the expected digest
};

// Opens a block's file and returns its descriptor; -1: it cannot be opened, or is not a regular file that this user
// owns. Symbolic links are refused. So are pipes, because opening or reading one could wait forever.
int open_own(const char * path) {
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat status;
    if (fd < 0 || (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid())) { return fd; }
    close(fd);
    return -1;
}

// Reads a block's state from its file, writes the parts into their tensors, and sets is_right. Stops if a read fails.
void fill(Block & block) {
    std::vector<uint8_t> chunk(chunk_bytes);
    const Descriptor file(open_own(block.path.c_str()));
    XXH3_state_t digest;
    XXH3_128bits_reset(&digest);
    XXH3_128bits_update(&digest, block.prefix.data(), block.prefix.size());
    auto part = block.parts.begin();
    for (uint64_t at = block.begin; at < block.end;) {
        const ssize_t n = pread(file.fd, chunk.data(), std::min(chunk_bytes, (size_t)(block.end - at)), (off_t)at);
        if (n <= 0) { return; }
        XXH3_128bits_update(&digest, chunk.data(), (size_t)n);
        const uint64_t next = at + (uint64_t)n;
        for (; part != block.parts.end() && part->at < next; ++part) {
            const uint64_t from = std::max(part->at, at), to = std::min(part->at + part->n, next);
            ggml_backend_tensor_set(part->tensor, &chunk[from - at], part->offset + (from - part->at), to - from);
            if (part->at + part->n > next) { // the part continues in the next chunk
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
    ~moegguf_kv_blocks() {
        end([&] { return n_begun; });
        if (filling.valid()) { filling.wait(); }
    }

    void add(const moegguf_kv_block & block) {
        auto opened = std::make_unique<Descriptor>(open_own(block.path));
#ifdef POSIX_FADV_WILLNEED
        posix_fadvise(opened->fd, 0, 0, POSIX_FADV_WILLNEED); // reads ahead: llama.cpp first reads scattered bytes
#endif
        if (block.n_bytes > n_addresses) { addresses.reset(new uint8_t[n_addresses = block.n_bytes]); }
        file = std::move(opened);
        const std::lock_guard<std::mutex> lock(mutex);
        n_known = blocks.size();
        blocks.emplace_back(block);
        if (!filling.valid()) {
            filling = std::async(std::launch::async | std::launch::deferred, [this] { fill_some(); });
        } else if (n_known >= n_begun + n_together) {
            changed.notify_one();
        }
    }

    // Fills the remaining blocks together with the other thread, and waits until that thread has ended.
    void fill_all() {
        end([&] { return blocks.size(); });
        fill_some();
        if (filling.valid()) { filling.get(); }
    }

    // Returns the offset, in the last block's file, of the n bytes that this address represents; 0: the bytes are not
    // in the block's state.
    uint64_t position(const void * address, size_t n) const {
        const Block & block = blocks.back();
        const uintptr_t first = (uintptr_t)addresses.get(), here = (uintptr_t)address;
        return first <= here && here + n <= first + (block.end - block.begin) ? block.begin + (here - first) : 0;
    }

    std::deque<Block> blocks;         // a deque, because it never moves its elements
    std::unique_ptr<Descriptor> file; // open file of the last block
    // Addresses for the last block's state; never touched, so they occupy no memory.
    std::unique_ptr<uint8_t[]> addresses;
    size_t n_addresses = 0;

  private:
    // Ends the list: only the first n_blocks() blocks are filled, and no blocks are added afterwards.
    template <typename F>
    void end(F n_blocks) {
        const std::lock_guard<std::mutex> lock(mutex);
        n_known = n_blocks();
        is_complete = true;
        changed.notify_one();
    }

    // Takes groups of blocks and fills them, until no blocks are left and no more will be added. Two threads call this.
    void fill_some() {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [&] { return is_complete || n_known >= n_begun + n_together; });
            const size_t begin = n_begun, end = std::min(n_known, begin + n_together);
            if (begin == end) { return; }
            n_begun = end;
            std::vector<Block *> some;
            for (size_t i = begin; i < end; ++i) { some.push_back(&blocks[i]); }
            lock.unlock();
            for (Block * block : some) { fill(*block); }
            lock.lock();
        }
    }

    std::mutex mutex; // guards the following fields and the number of blocks
    std::condition_variable changed;
    size_t n_known = 0; // number of blocks whose list of parts is complete
    size_t n_begun = 0; // number of blocks that a thread has begun to fill
    bool is_complete = false;
    std::future<void> filling; // ready when the other thread has ended
};

namespace {

thread_local moegguf_kv_blocks * current = nullptr; // the list whose last block llama.cpp reads; nullptr: none

} // namespace

extern "C" {

moegguf_kv_blocks * moegguf_kv_blocks_open() { return new (std::nothrow) moegguf_kv_blocks; }

void moegguf_kv_blocks_close(moegguf_kv_blocks * blocks) {
    current = nullptr;
    delete blocks;
}

int moegguf_kv_blocks_add(moegguf_kv_blocks * blocks, const moegguf_kv_block * block, const void ** state) {
    return guarded([&] {
        given(blocks).add(given(block));
        given(state) = blocks->addresses.get();
        current = blocks;
    });
}

int moegguf_kv_blocks_fill(moegguf_kv_blocks * given_blocks, int32_t * n_right) {
    return guarded([&] {
        current = nullptr;
        moegguf_kv_blocks & all = given(given_blocks);
        all.fill_all();
        for (const Block & block : all.blocks) {
            for (const Part & part : block.parts) {
                if (!block.is_right) { // set to zero, because a NaN would spread even from an unused cell
                    ggml_backend_tensor_memset(part.tensor, 0, part.offset, part.n);
                }
            }
        }
        const auto wrong = [](const Block & block) { return !block.is_right; };
        const auto & blocks = all.blocks;
        given(n_right) = (int32_t)(std::find_if(blocks.begin(), blocks.end(), wrong) - blocks.begin());
    });
}

bool moegguf_state_read(void * to, const void * at, size_t n) {
    const uint64_t position = current ? current->position(at, n) : 0;
    if (position && pread(current->file->fd, to, n, (off_t)position) != (ssize_t)n) {
        memset(to, 0, n); // the read failed; if fill() cannot read these bytes either, the block is treated as wrong
    }
    return position != 0;
}

bool moegguf_state_put(ggml_tensor * tensor, size_t offset, const void * at, size_t n) {
    const uint64_t position = current ? current->position(at, n) : 0;
    if (position) { current->blocks.back().parts.push_back({tensor, offset, n, position}); }
    return position != 0;
}

} // extern "C"
