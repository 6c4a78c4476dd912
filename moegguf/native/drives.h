// drives.h: reads the model's files, from copies on several drives or from the only copy. Reader threads and the row
// thread (row_tables.h) read the files only through class Drives, which uses files.h. Compute threads use it to copy
// rows that are in the page cache. Each read goes to the copy that is expected to finish it first. A copy that fails is
// no longer used, unless it is the last one.
//
// This file only reads. It does not know about slots or experts.
#pragma once

#include "files.h"

namespace moegguf {

class Drives {
  public:
    // Opens the model's own files and its mirrors (copies on other drives). A mirror that cannot be read is dropped.
    // Throws Error(INVALID) if a file of a mirror is the model's own file, or has a different size or different bytes
    // in the middle of an expert tensor. No other bytes are compared. Throws Error(IO) if the model's own files cannot
    // be opened, and Error(MEMORY) if memory is refused.
    Drives(const Layout & layout, bool direct);

    // Reads n bytes at an offset of a shard, and returns their address in `buffer`. If one copy fails, reads from
    // another copy. `retries`: counter of retried reads. Any thread may call this. Throws Error(IO) if the last copy
    // fails.
    const uint8_t * read(int shard, uint64_t offset, size_t n, const ReadBuffer & buffer, uint64_t & retries);

    // Reads a row of a table: n bytes at an offset of a shard. Returns their address in `buffer`. Uses the page cache,
    // because few rows are read often. The read does not count towards a drive's speed, because a row is small. If one
    // copy fails, reads from another copy. Any thread may call this. Throws Error(IO) if the last copy fails.
    const uint8_t * read_row(int shard, uint64_t offset, size_t n, const ReadBuffer & buffer, uint64_t & retries) const;

    const Shard & first_shard(int shard) const; // this shard of the first copy in use; any thread may call this
    size_t size() const { return drives_.size(); }
    bool direct() const; // true: all copies in use are read with O_DIRECT
    void describe(size_t index, moegguf_drive_info & info) const;

  private:
    struct Drive { // one copy of the model's files
        Shards shards;
        uint64_t n_reads = 0;
        uint64_t n_bytes = 0;
        uint64_t under_way = 0; // number of bytes that were requested but have not been read yet
        uint64_t silent_ns = 0; // time (now_ns()) when the last read ended, or when a read began on an idle drive
        float ns_per_byte = 0;  // moving average of the read time per byte; 0: not measured yet
        std::string dropped;    // reason why this copy is no longer read; empty: it is read

        float expected_ns(size_t n, uint64_t now) const; // expected time until a new read of n bytes would end
    };
    struct Turn { // a read in progress
        Drive & drive;
        uint64_t begun_ns;
        uint64_t under_way; // number of bytes under way on the drive when this read began, including this read
    };

    bool is_read(const Drive & drive) const; // false: the drive was dropped
    Turn begin(size_t n);
    void end(const Turn & turn, size_t n);
    bool drop(const Turn & turn, size_t n, const char * why); // false: it is the last copy, which stays in use

    mutable std::mutex mutex_;
    std::vector<Drive> drives_; // first the model's own files, then the mirrors
};

} // namespace moegguf
