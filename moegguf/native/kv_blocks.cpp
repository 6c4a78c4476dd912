#include "kv_blocks.h"

#include "api.h"
#include "files.h"

#include "ggml-backend.h"

#define XXH_INLINE_ALL
#include "xxhash.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace {

using namespace moegguf;

constexpr size_t chunk_bytes = 256u << 10; // read by one call, and still in a core's cache when it is digested
constexpr size_t most_pieces = 1024;       // of a call; what Linux and macOS take
constexpr size_t window_bytes = 4096;

// Bytes of a file in their order, as they are read, and the digest of all of them.
class DigestedFile {
  public:
    DigestedFile(const std::string & path, uint64_t at, uint64_t seed)
        : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)),
          at_(at),
          failed_(file_.fd < 0),
          other_(chunk_bytes) {
        XXH3_128bits_reset_withSeed(&digest_, seed);
    }

    void digest(const std::vector<uint8_t> & bytes) { XXH3_128bits_update(&digest_, bytes.data(), bytes.size()); }

    // The next n bytes go to `to`, at the latest when it is flushed.
    void read(uint8_t * to, size_t n) {
        while (n > 0) {
            const size_t now = std::min(n, chunk_bytes - n_waiting_);
            pieces_.push_back({to, now});
            n_waiting_ += now, to += now, n -= now;
            if (n_waiting_ == chunk_bytes || pieces_.size() == most_pieces) {
                flush();
            }
        }
    }

    // The next n bytes go to `take(data, n)`, in as many calls as it takes.
    template <typename Take>
    void read_apart(size_t n, const Take & take) {
        for (size_t now = 0; n > 0; n -= now) {
            flush();
            now = std::min(n, other_.size());
            read(other_.data(), now);
            flush();
            if (!failed_) {
                take(other_.data(), now);
            }
        }
    }

    // False where the file was shorter or could not be read, or its digest is another one.
    bool is(const uint8_t * expected) {
        flush();
        XXH128_canonical_t found;
        XXH128_canonicalFromHash(&found, XXH3_128bits_digest(&digest_));
        return !failed_ && memcmp(found.digest, expected, sizeof(found.digest)) == 0;
    }

  private:
    void flush() {
        for (size_t first = 0; first < pieces_.size() && !failed_;) {
            const ssize_t n = preadv(file_.fd, &pieces_[first], (int)(pieces_.size() - first), (off_t)at_);
            failed_ = n == 0 || (n < 0 && errno != EINTR);
            for (size_t left = (size_t)std::max<ssize_t>(n, 0); left > 0;) {
                iovec & piece = pieces_[first];
                const size_t done = std::min(left, piece.iov_len);
                XXH3_128bits_update(&digest_, piece.iov_base, done);
                piece = {(uint8_t *)piece.iov_base + done, piece.iov_len - done};
                left -= done, at_ += done;
                first += piece.iov_len == 0;
            }
        }
        pieces_.clear();
        n_waiting_ = 0;
    }

    const Descriptor file_;
    uint64_t at_;
    bool failed_;
    std::vector<uint8_t> other_;
    std::vector<iovec> pieces_;
    size_t n_waiting_ = 0;
    XXH3_state_t digest_;
};

} // namespace

thread_local moegguf_kv_blocks * moegguf_kv_blocks::current = nullptr;

moegguf_kv_blocks::~moegguf_kv_blocks() {
    current = nullptr;
    end();
}

void moegguf_kv_blocks::end() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        n_ready_ = blocks_.size();
        is_complete_ = true;
    }
    more_.notify_all();
    for (std::thread & thread : threads_) {
        if (thread.joinable()) {
            thread.join();
        }
    }
}

void moegguf_kv_blocks::fill_every_other_run(size_t which) {
    for (size_t i = which * run_blocks;; i += (i + 1) % run_blocks ? 1 : 1 + run_blocks) {
        Block * block = nullptr;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            more_.wait(lock, [&] { return i < n_ready_ || is_complete_; });
            if (i >= n_ready_) {
                return;
            }
            block = &blocks_[i];
        }
        try {
            block->is_right = fill(*block);
        } catch (const std::exception &) { // no memory: it is computed
        }
    }
}

const void * moegguf_kv_blocks::add(const moegguf_kv_block & block) {
    const uint8_t * prefix = (const uint8_t *)block.prefix;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        n_ready_ = blocks_.size();
        blocks_.push_back(
            {block.path, {prefix, prefix + block.n_prefix}, {}, block.begin, block.begin + block.n_bytes});
        memcpy(blocks_.back().digest, block.digest, sizeof(block.digest));
    }
    more_.notify_all();
    for (size_t i = 0; i < 2 && !threads_[i].joinable(); i++) {
        threads_[i] = std::thread([this, i] { fill_every_other_run(i); });
    }
    if (n_addresses_ < block.n_bytes) {
        addresses_.reset(new uint8_t[block.n_bytes]);
        n_addresses_ = block.n_bytes;
    }
    window_.clear();
    current = this;
    return addresses_.get();
}

bool moegguf_kv_blocks::is_of_last(const void * at, size_t n) const {
    const uint8_t *begin = addresses_.get(), *end = begin + (blocks_.back().end - blocks_.back().begin);
    return begin <= at && (const uint8_t *)at + n <= end;
}

bool moegguf_kv_blocks::read(void * to, const void * at, size_t n) {
    if (!is_of_last(at, n)) {
        return false;
    }
    const Block & block = blocks_.back();
    const uint64_t begin = block.begin + ((const uint8_t *)at - addresses_.get());
    if (begin < window_at_ || begin + n > window_at_ + window_.size()) {
        const Descriptor file(open(block.path.c_str(), O_RDONLY | O_CLOEXEC));
#ifdef POSIX_FADV_WILLNEED
        if (window_.empty()) { // else the disk is asked for a page at a time
            posix_fadvise(file.fd, 0, 0, POSIX_FADV_WILLNEED);
        }
#endif
        window_.assign(std::max(n, window_bytes), 0);
        window_at_ = begin;
        const ssize_t n_read = pread(file.fd, window_.data(), window_.size(), (off_t)begin);
        window_.resize(std::max(n, (size_t)std::max<ssize_t>(n_read, 0))); // zeros where the file ends: no digest fits
    }
    memcpy(to, window_.data() + (begin - window_at_), n);
    return true;
}

bool moegguf_kv_blocks::put(ggml_tensor * tensor, size_t offset, const void * at, size_t n) {
    if (!is_of_last(at, n)) {
        return false;
    }
    Block & block = blocks_.back();
    block.parts.push_back({tensor, offset, n, block.begin + ((const uint8_t *)at - addresses_.get())});
    return true;
}

bool moegguf_kv_blocks::fill(const Block & block) const {
    DigestedFile file(block.path, block.begin, seed_);
    file.digest(block.prefix);
    uint64_t at = block.begin;
    const auto pass_to = [&](uint64_t next) {
        file.read_apart(next - at, [](const uint8_t *, size_t) {});
        at = next;
    };
    for (const Part & part : block.parts) {
        pass_to(part.at);
        if (ggml_backend_buffer_is_host(part.tensor->buffer)) {
            file.read((uint8_t *)part.tensor->data + part.offset, part.n);
        } else {
            size_t offset = part.offset;
            file.read_apart(part.n, [&](const uint8_t * data, size_t n) {
                ggml_backend_tensor_set(part.tensor, data, offset, n);
                offset += n;
            });
        }
        at += part.n;
    }
    pass_to(block.end);
    return file.is(block.digest);
}

int32_t moegguf_kv_blocks::fill() {
    current = nullptr;
    end();
    for (const Block & block : blocks_) {
        for (const Part & part : block.parts) {
            if (!block.is_right) { // a NaN in a cell that is not used makes others of it
                ggml_backend_tensor_memset(part.tensor, 0, part.offset, part.n);
            }
        }
    }
    const auto first_wrong = [](const Block & block) { return !block.is_right; };
    return (int32_t)(std::find_if(blocks_.begin(), blocks_.end(), first_wrong) - blocks_.begin());
}

extern "C" {

moegguf_kv_blocks * moegguf_kv_blocks_open(uint64_t seed) {
    return new (std::nothrow) moegguf_kv_blocks(seed);
}

void moegguf_kv_blocks_close(moegguf_kv_blocks * blocks) {
    delete blocks;
}

int moegguf_kv_blocks_add(moegguf_kv_blocks * blocks, const moegguf_kv_block * block, const void ** state) {
    return guarded([&] { given(state) = given(blocks).add(given(block)); });
}

int moegguf_kv_blocks_fill(moegguf_kv_blocks * blocks, int32_t * n_right) {
    return guarded([&] { given(n_right) = given(blocks).fill(); });
}

bool moegguf_state_read(void * to, const void * at, size_t n) {
    return moegguf_kv_blocks::current && moegguf_kv_blocks::current->read(to, at, n);
}

bool moegguf_state_put(ggml_tensor * tensor, size_t offset, const void * at, size_t n) {
    return moegguf_kv_blocks::current && moegguf_kv_blocks::current->put(tensor, offset, at, n);
}

} // extern "C"
