// row_tables.h: tensors whose rows are read from the model's files when a pass needs them, such as token embeddings.
// ggml's CPU backend calls moegguf_rows::get (kernels/multiply.h) to compute GET_ROWS from such a tensor. The compute
// thread copies rows that are in the system's page cache. A second thread reads other rows, so that the compute thread
// can stop waiting for a slow drive when the store is cancelled. Rows that were read stay in the page cache, which the
// system frees when memory is needed.
#pragma once

#include "transfers.h"

#include "kernels/multiply.h"

namespace moegguf {

class RowTables {
  public:
    // Starts the thread that reads rows, unless there is no table. Throws Error(INVALID) if a table's shard does not
    // exist, and Error(MEMORY) if the thread is refused.
    RowTables(const moegguf_config & config, Shared & shared, const Transfers & transfers);
    ~RowTables() { stop(); }
    RowTables(const RowTables &) = delete;
    RowTables & operator=(const RowTables &) = delete;

    // Sets Shared::stopping, and waits for the end of the thread. The store's files must still be open.
    void stop();

    // Returns the buffer type of the tables' tensors. Its buffers have addresses but no memory, so only GET_ROWS may
    // use such a tensor.
    ggml_backend_buffer_type_t buft() const { return buft_.get(); }
    static bool has(const ggml_tensor * t); // true: the tensor is a table of some store

  private:
    struct Table : moegguf_rows {
        RowTables * owner;
        std::string name;
        int shard;
        uint64_t offset;
    };
    struct Rows { // rows that a compute thread waits for
        int shard = 0;
        size_t row_bytes = 0;
        std::vector<uint64_t> offsets; // position of each row in the shard
        std::vector<uint8_t> bytes;
        bool is_read = false; // the thread is done with this object; guarded by the store's lock
        std::string error;    // reason why not all rows were read; empty: all rows were read
    };

    ggml_status attach(ggml_tensor * t) const;
    void get(const Table & table, ggml_tensor & op);
    void renew_rows();
    bool read_cached(Rows & rows) const;
    bool await(const std::shared_ptr<Rows> & rows);
    void lose(moegguf_status status, const std::string & why);
    void run();
    void read(Rows & rows) const;

    Shared & shared_;
    const Transfers & transfers_;
    std::vector<Table> tables_;
    const std::shared_ptr<ggml_backend_buffer_type> buft_;
    std::shared_ptr<Rows> rows_;      // reused by each GET_ROWS; only the compute thread uses this pointer
    std::shared_ptr<Rows> requested_; // next rows to read; guarded by the store's lock
    std::condition_variable request_;
    std::thread thread_;
};

} // namespace moegguf
