#include "link.h"

namespace moegguf {

// Field by field: copied as a whole right after it was made of parts, a job takes several times as long.
void Link::push(Tier & to, int s, SlotRef source, uint8_t kinds, bool demand) {
    const Slot & slot = to.residency.slot(s);
    Job & job = (demand ? demand_ : prefetch_).add();
    job.source = source;
    job.destination = to.ref(s);
    job.il = slot.il;
    job.expert = slot.expert;
    job.kinds = kinds;
    job.demand = demand;
    job.requests = slot.requests;
    job.streamed = -1;
    to.residency.queue(s, kinds);
}

// A slot that something is on its way to is never given away, so the job's generation still holds here.
bool Link::end(const Job & job, const std::string & why) {
    Tier & to = this->to(job);
    const int s = job.destination.slot;
    uncount(shared_.counters.chunks_reading);
    if (why.empty()) {
        count(job.demand ? to.counters.bytes_missed : to.counters.bytes_prefetched, job.bytes);
        if (job.streamed < 0) { to.publish(s, job.kinds); }
    }
    to.residency.end_read(s, job.kinds);
    if (why.empty()) { return true; }
    count(shared_.counters.read_errors);
    shared_.error = why;
    const Slot & slot = to.residency.slot(s);
    // A transfer from before the last routing event says nothing about that event's request: it gets one of its own.
    if (job.streamed < 0 && slot.pins > 0 && slot.requests != job.requests) {
        push(to, s, job.source, job.kinds, true);
        return true;
    }
    to.residency.fail(s);
    return false;
}

} // namespace moegguf
