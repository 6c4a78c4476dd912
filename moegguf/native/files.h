// files.h: reads bytes of the GGUF's shards. Reads bypass the page cache (O_DIRECT) if the caller requests this and a
// test read with O_DIRECT returned the right bytes.
//
// This file only reads, at offsets from the layout. It does not know about slots or experts.
#pragma once

#include "layout.h"

#include <sys/stat.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace moegguf {

// Aligned memory for one read at a time. Shard::read() returns an address in this memory.
class ReadBuffer {
  public:
    explicit ReadBuffer(size_t n); // Allocates at least n bytes. Throws Error(MEMORY).
    ~ReadBuffer();
    ReadBuffer(const ReadBuffer &) = delete;
    ReadBuffer & operator=(const ReadBuffer &) = delete;

    uint8_t * data() const { return data_; }

  private:
    uint8_t * data_;
};

// A file descriptor that the destructor closes. fd < 0: no descriptor.
struct Descriptor {
    explicit Descriptor(int fd = -1) : fd(fd) {}
    ~Descriptor();
    Descriptor(const Descriptor &) = delete;
    Descriptor & operator=(const Descriptor &) = delete;

    const int fd;
};

// A range of n bytes in a file.
struct Span {
    uint64_t offset;
    size_t n;
};

// One open shard. Its descriptors stay open, so a renamed or deleted file can still be read. After a write to the file,
// reads fail, because slots may already hold experts from the old content.
//
// The size, modification time and change time show whether the file was written to. A new name, owner, mode or number
// of hard links also updates the change time. A new change time is accepted only if one of these differs and the
// sampled bytes are unchanged. The sample contains up to a page from the middle of every expert tensor (the matrices of
// one kind of all experts of a layer). The sample of another model, training run or quantisation would differ. A write
// goes unnoticed if it keeps the size and all sampled bytes, restores the modification time, and coincides with a new
// name, owner, mode or number of hard links.
class Shard {
  public:
    Shard(const std::string & path, bool direct, std::vector<Span> sampled); // Throws Error(IO) or Error(MEMORY).

    // Compares the size and sampled bytes of `copy` with this shard. Throws Error(INVALID) if `copy` is this very file
    // or differs, and Error(IO) if a sample of `copy` cannot be read. Skips samples that this shard itself could not
    // read.
    void check_copy(const Shard & copy) const;

    // Reads n bytes at an offset, and returns their address in `buffer`. Throws Error(IO) if the file has been written
    // to since it was opened, or if two attempts fail. `retries`: counter of retried reads. `cached`: the read uses the
    // page cache even if other reads bypass it.
    const uint8_t * read(uint64_t offset, size_t n, const ReadBuffer & buffer, uint64_t & retries,
                         bool cached = false) const;

    // Copies n bytes at an offset to `to`. Returns false if the page cache does not contain all of them, if the file
    // may have been written to, or if the read fails. Does not wait for a drive.
    bool read_cached(uint64_t offset, size_t n, uint8_t * to) const;

    // Asks the system to read n bytes at an offset into the page cache. Does not wait.
    void read_ahead(uint64_t offset, size_t n) const;

    bool direct() const { return use_direct_; }

    static constexpr uint64_t alignment = 4096;

  private:
    struct Sample { // result of reading a sampled span
        uint64_t digest;
        int error; // errno if the span could not be read; otherwise 0
        bool operator==(const Sample & other) const { return digest == other.digest && error == other.error; }
    };

    struct stat status() const;                      // Calls fstat. Throws Error(IO).
    bool may_be_same(const struct stat & now) const; // true: size and modification time are as when it was opened
    void check_unchanged() const;                    // Throws Error(IO) if the file was written to.
    std::vector<Sample> sample() const;              // Reads all sampled spans, and returns their digests.
    Error cannot_read(uint64_t offset, size_t n, int error) const;
    bool fill(int fd, uint8_t * data, uint64_t offset, size_t n, size_t needed, int & error) const;

    std::string path_;
    const std::vector<Span> sampled_;
    Descriptor buffered_;
    Descriptor direct_;
    struct stat opened_;
    std::vector<Sample> sample_;              // samples taken when the file was opened
    mutable std::mutex checking_;             // guards checked_
    mutable struct stat checked_;             // the latest status for which the content was accepted as unchanged
    mutable std::atomic<int64_t> changed_ns_; // change time (st_ctim) of checked_
    mutable std::atomic<bool> use_direct_{false};
};

using Shards = std::vector<std::unique_ptr<const Shard>>;

// Opens the shards of the model, or of a copy of the model, at these paths. Throws Error(IO) or Error(MEMORY).
Shards open_shards(const Layout & layout, const std::vector<std::string> & paths, bool direct);

} // namespace moegguf
