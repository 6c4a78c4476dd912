// drives.h: copies of the model's files on several drives. Each read goes to the copy that is expected to have it
// first, and a copy that fails is dropped while another one is left.
//
// It may only read. Knows no slot and no expert.
#pragma once

#include "files.h"

namespace moegguf {

class Drives {
  public:
    // Opens the model's own files and its mirrors. A mirror that cannot be read is dropped. Throws Error(INVALID) for a
    // mirror that differs from the model's own files, and Error(IO) where these cannot be opened.
    Drives(const Layout & layout, bool direct);

    // Reads n bytes at offset of a shard, from another copy where one fails. retries: as of Shard::read. Any thread.
    // Throws Error(IO) where the last copy fails, which is not dropped.
    const uint8_t * read(int shard, uint64_t offset, size_t n, const ReadBuffer & buffer, uint64_t & retries);

    size_t size() const { return drives_.size(); }
    bool direct() const; // every copy that is not dropped
    void describe(size_t index, moegguf_drive_info & info) const;

  private:
    struct Drive { // one copy
        Shards shards;
        uint64_t n_reads = 0;
        uint64_t n_bytes = 0;
        uint64_t under_way = 0; // bytes
        uint64_t silent_ns = 0; // since when nothing came of them
        float ns_per_byte = 0;  // a moving average; 0: not measured yet
        std::string dropped;    // the reason why the drive is not read any more; empty: it is read

        float expected_ns(size_t n, uint64_t now) const; // until n more bytes would be there
    };
    struct Turn { // a read that has begun
        Drive & drive;
        uint64_t begun_ns;
        uint64_t under_way; // bytes under way on the drive at that time, with the bytes of this read
    };

    Turn begin(size_t n);
    void end(const Turn & turn, size_t n);
    bool drop(const Turn & turn, size_t n, const char * why); // false: it is the last one

    mutable std::mutex mutex_;
    std::vector<Drive> drives_; // the model's own files first
};

} // namespace moegguf
