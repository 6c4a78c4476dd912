// row_tables.cpp: implements row_tables.h: reads the rows of a GET_ROWS, and converts them to floats.
#include "row_tables.h"

#include "reserved.h"
#include "threads.h"

namespace moegguf {
namespace {

constexpr size_t most_bytes = 1 << 20; // maximum size of the rows that are read before they are converted

const char * get_name(ggml_backend_buffer_type_t) { return "moegguf-rows"; }

// Row i of a GET_ROWS: its place in the table, and the address of its result. The rows of all planes are numbered
// consecutively.
struct Row {
    uint64_t offset; // position in the table, in bytes
    float * out;

    Row(const ggml_tensor & op, int64_t i) {
        const ggml_tensor &from = *op.src[0], &ids = *op.src[1];
        const int64_t i0 = i % ids.ne[0], i1 = i / ids.ne[0] % ids.ne[1], i2 = i / (ids.ne[0] * ids.ne[1]);
        const auto * id = (const int32_t *)((const char *)ids.data + i0 * ids.nb[0] + i1 * ids.nb[1] + i2 * ids.nb[2]);
        GGML_ASSERT(*id >= 0 && *id < from.ne[1]);
        offset = *id * from.nb[1] + i1 * from.nb[2] + i2 * from.nb[3];
        out = (float *)((char *)op.data + i0 * op.nb[1] + i1 * op.nb[2] + i2 * op.nb[3]);
    }
};

void to_floats(ggml_type type, const uint8_t * row, float * out, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(out, row, n * sizeof(float));
    } else {
        ggml_get_type_traits(type)->to_float(row, out, n);
    }
}

} // namespace

RowTables::RowTables(const moegguf_config & config, Shared & shared, const Transfers & transfers)
    : shared_(shared),
      transfers_(transfers),
      buft_(std::make_shared<ggml_backend_buffer_type>()),
      rows_(std::make_shared<Rows>()) {
    for (int i = 0; i < config.n_row_tables; i++) {
        const moegguf_row_table & t = config.row_tables[i];
        if (!t.name || t.shard < 0 || t.shard >= config.n_shards) {
            throw Error(MOEGGUF_INVALID, "a row table needs a name, and a shard that exists");
        }
        Table table = {};
        table.get = [](const moegguf_rows * rows, ggml_tensor * op) {
            const Table & of = *static_cast<const Table *>(rows);
            of.owner->get(of, *op);
        };
        table.owner = this;
        table.name = t.name;
        table.shard = t.shard;
        table.offset = t.offset;
        tables_.push_back(table);
    }
    buft_->iface.get_name = get_name;
    buft_->iface.alloc_buffer = [](ggml_backend_buffer_type_t buft, size_t size) {
        ggml_backend_buffer_t buffer = reserve_buffer(buft, size);
        if (!buffer) { return buffer; }
        buffer->iface.init_tensor = [](ggml_backend_buffer_t of, ggml_tensor * t) {
            return ((const RowTables *)of->buft->context)->attach(t);
        };
        return buffer;
    };
    buft_->iface.get_alignment = [](ggml_backend_buffer_type_t) { return (size_t)64; };
    buft_->iface.is_host = [](ggml_backend_buffer_type_t) { return true; }; // ggml then lets the CPU compute GET_ROWS
    buft_->context = this;
    if (!tables_.empty() && !shared.has(MOEGGUF_SIMULATE)) {
        thread_ = start_thread("the thread that reads rows", [this] { run(); });
    }
}

void RowTables::stop() {
    if (!thread_.joinable()) { return; }
    {
        Lock lock(shared_.mutex);
        shared_.stopping = true;
    }
    request_.notify_all();
    thread_.join();
}

bool RowTables::has(const ggml_tensor * t) {
    return t && t->buffer && ggml_backend_buffer_get_type(t->buffer)->iface.get_name == get_name;
}

// Writes the address of the table with this name into the tensor's op_params. Fails if there is no such table.
ggml_status RowTables::attach(ggml_tensor * t) const {
    for (const Table & table : tables_) {
        if (table.name != t->name) { continue; }
        const moegguf_rows * rows = &table;
        memcpy(t->op_params, &rows, sizeof(rows));
        return GGML_STATUS_SUCCESS;
    }
    return GGML_STATUS_FAILED;
}

// Functions for the compute thread.

// Lets no exception escape, because the caller is C. After a failure, the results are not used, because the pass ends
// after this node (Store::must_abort).
void RowTables::get(const Table & table, ggml_tensor & op) {
    if (shared_.forked()) { return; } // the thread belongs to the parent, and Store::acquire fails the pass
    const ggml_tensor & from = *op.src[0];
    const ggml_tensor & whole = from.view_src ? *from.view_src : from;
    const uint64_t first_byte = table.offset + ((const char *)from.data - (const char *)whole.data);
    const size_t row_bytes = ggml_row_size(from.type, from.ne[0]);
    const int64_t n = ggml_nelements(op.src[1]), step = std::max<int64_t>(1, most_bytes / row_bytes);
    try {
        for (int64_t begin = 0; begin < n; begin += step) {
            const int64_t end = std::min(n, begin + step);
            renew_rows();
            rows_->shard = table.shard;
            rows_->row_bytes = row_bytes;
            rows_->offsets.clear();
            for (int64_t i = begin; i < end; i++) { rows_->offsets.push_back(first_byte + Row(op, i).offset); }
            rows_->bytes.resize((end - begin) * row_bytes);
            if (!read_cached(*rows_) && !await(rows_)) { return; }
            for (int64_t i = begin; i < end; i++) {
                to_floats(from.type, rows_->bytes.data() + (i - begin) * row_bytes, Row(op, i).out, from.ne[0]);
            }
        }
    } catch (const std::bad_alloc &) {
        Lock lock(shared_.mutex);
        lose(MOEGGUF_MEMORY, "no memory for rows of '" + table.name + "'");
    }
}

// Replaces the rows if an earlier pass was cancelled while the thread was reading them, because the thread may still
// write into them. The thread releases rows under the lock, so its writes are complete if it does not hold them.
void RowTables::renew_rows() {
    Lock lock(shared_.mutex);
    if (rows_.use_count() > 1) { rows_ = std::make_shared<Rows>(); }
}

// Copies the rows from the page cache. Returns false if one of them is not there.
bool RowTables::read_cached(Rows & rows) const {
    const Shard & shard = transfers_.drives()->first_shard(rows.shard);
    uint8_t * to = rows.bytes.data();
    for (uint64_t offset : rows.offsets) {
        if (!shard.read_cached(offset, rows.row_bytes, to)) { return false; }
        to += rows.row_bytes;
    }
    return true;
}

// Waits until the thread has read the rows. Returns false if they cannot be read, or if the store is cancelled.
bool RowTables::await(const std::shared_ptr<Rows> & rows) {
    Lock lock(shared_.mutex);
    rows->is_read = false;
    requested_ = rows;
    request_.notify_one();
    if (!shared_.wait(lock, [&] { return rows->is_read; })) {
        lose(MOEGGUF_CANCELLED, "cancelled");
        return false;
    }
    if (!rows->error.empty()) {
        count(shared_.counters.read_errors);
        lose(MOEGGUF_IO, rows->error);
        return false;
    }
    return true;
}

// Records that rows were not read, so that the pass fails (Context::note_failures). Needs the store's lock.
void RowTables::lose(moegguf_status status, const std::string & why) {
    shared_.lost_rows_status = status;
    shared_.error = why;
    shared_.lost_rows += 1;
}

// Functions for the thread that reads rows.

void RowTables::run() {
    Lock lock(shared_.mutex);
    while (!shared_.stopping) {
        if (!requested_) {
            request_.wait(lock);
            continue;
        }
        std::shared_ptr<Rows> rows = std::move(requested_);
        lock.unlock();
        std::string error;
        try {
            read(*rows);
        } catch (const std::exception & e) { // also catches std::bad_alloc
            error = e.what();
        }
        lock.lock();
        rows->error = error;
        rows->is_read = true;
        rows.reset(); // the compute thread may reuse the object
        shared_.done.notify_all();
    }
}

void RowTables::read(Rows & rows) const {
    const Drives & drives = *transfers_.drives();
    const ReadBuffer buffer(rows.row_bytes);
    if (rows.offsets.size() > 1) { // the drive reads all rows at the same time
        const Shard & shard = drives.first_shard(rows.shard);
        for (uint64_t offset : rows.offsets) { shard.read_ahead(offset, rows.row_bytes); }
    }
    uint8_t * to = rows.bytes.data();
    for (uint64_t offset : rows.offsets) {
        uint64_t & retries = shared_.counters.read_retries;
        memcpy(to, drives.read_row(rows.shard, offset, rows.row_bytes, buffer, retries), rows.row_bytes);
        to += rows.row_bytes;
    }
}

} // namespace moegguf
