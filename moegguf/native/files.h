// files.h: bytes of the GGUF's shards, read past the page cache where the file system can be trusted with it.
//
// It may only read, at offsets that the layout has checked against the file. Knows no slot and no expert.
#pragma once

#include "layout.h"

#include <sys/stat.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace moegguf {

// A reader's own aligned memory; read() returns a pointer into it.
class ReadBuffer {
  public:
    explicit ReadBuffer(size_t n); // Throws Error(MEMORY).
    ~ReadBuffer();
    ReadBuffer(const ReadBuffer &) = delete;
    ReadBuffer & operator=(const ReadBuffer &) = delete;

    uint8_t * data() const { return data_; }
    size_t size() const { return size_; }

  private:
    uint8_t * data_;
    size_t size_;
};

// A file descriptor that closes itself.
struct Descriptor {
    explicit Descriptor(int fd = -1) : fd(fd) {}
    ~Descriptor();
    Descriptor(const Descriptor &) = delete;
    Descriptor & operator=(const Descriptor &) = delete;

    const int fd;
};

// Bytes of a file.
struct Span {
    uint64_t offset;
    size_t n;
};

// One open shard. Descriptors stay open, so a renamed or deleted file keeps serving. A file that was written to since
// it was opened gives no more bytes: those in slots are of the file before.
//
// Size, modification time and change time say whether it was written to. A change time alone may come from another
// name, owner or mode. It is accepted only where one of these differs, and `sampled`, read when the shard was opened
// and now, has the same bytes. With a page of every expert matrix that tells another model, training or quantisation.
// It cannot tell a write that leaves each of these pages as it was, hides its modification time, and comes with
// another name, owner or mode.
class Shard {
  public:
    Shard(const std::string & path, bool direct, std::vector<Span> sampled); // Throws Error(IO).

    // Compares the size and sampled bytes of `copy` with this shard. Throws Error(INVALID) if `copy` is this very file
    // or differs, and Error(IO) if its samples cannot be read.
    void check_copy(const Shard & copy) const;

    // n bytes at offset. Throws Error(IO): the file was written to since it was opened, or twice the same system error.
    // retries: a counter (shared.h) of reads that were tried again.
    const uint8_t * read(uint64_t offset, size_t n, const ReadBuffer & buffer, uint64_t & retries) const;

    bool direct() const { return use_direct_; }

    static constexpr uint64_t alignment = 4096;

  private:
    struct Sample { // the sample of a span
        uint64_t digest;
        int error; // errno of a span that cannot be read; 0: it can
        bool operator==(const Sample & other) const { return digest == other.digest && error == other.error; }
    };

    struct stat status() const;         // Throws Error(IO).
    void check_unchanged() const;       // Throws Error(IO).
    std::vector<Sample> sample() const; // Reads each of the sampled spans as it is now.
    Error cannot_read(uint64_t offset, size_t n, int error) const;
    bool fill(int fd, uint8_t * data, uint64_t offset, size_t n, size_t needed, int & error) const;

    std::string path_;
    const std::vector<Span> sampled_;
    Descriptor buffered_;
    Descriptor direct_;
    struct stat opened_;
    std::vector<Sample> sample_;              // samples at the time when the file was opened
    mutable std::mutex checking_;             // guards checked_
    mutable struct stat checked_;             // the last status that was accepted
    mutable std::atomic<int64_t> changed_ns_; // st_ctim of checked_
    mutable std::atomic<bool> use_direct_{false};
};

using Shards = std::vector<std::unique_ptr<const Shard>>;

// paths: the model's own shards, or the shards of a copy. Throws Error(IO).
Shards open_shards(const Layout & layout, const std::vector<std::string> & paths, bool direct);

} // namespace moegguf
