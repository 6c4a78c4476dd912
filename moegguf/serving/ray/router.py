"""The request router of each deployment: `preference.rank` over what Ray Serve knows of the replicas."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from moegguf.serving.ray.preference import Candidate, Conversation, Report, rank

REPORT_PERIOD_S = 5.0  # between two reports of a replica
NOTE_S = 3 * REPORT_PERIOD_S  # after that a report has what was sent


class ConversationRouter(RequestRouter):
    """Ranks replicas for requests whose first argument is a `Conversation`.

    Between two reports it goes by what it sent itself: the next turn of a chat comes sooner.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called by Ray Serve: `options` are `request_router_kwargs`, of which there are none."""
        self._sent: defaultdict[ReplicaID, deque[tuple[float, tuple[str, ...]]]] = defaultdict(deque)
        self._last_sent_s: dict[ReplicaID, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray Serve: replicas in ranks, preferred ones first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all are full
        # The first of equals is taken: the one whose cache is the oldest.
        replicas = sorted(candidate_replicas, key=lambda replica: self._last_sent_s.get(replica.replica_id, 0.0))
        ranks = rank(asked_conversation(pending_request), [self._candidate(replica) for replica in replicas])
        return [[replicas[i] for i in indices] for indices in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve: a replica has accepted a request."""
        prefixes = asked_conversation(pending_request).prefixes
        if prefixes:
            self._last_sent_s[replica_id] = now_s = time.monotonic()
            self._sent[replica_id].append((now_s, tuple(prefix.digest for prefix in prefixes)))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve: what it held is lost."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve: forgets the notes of those that are gone."""
        super().update_replicas(replicas)
        for gone in self._sent.keys() - {replica.replica_id for replica in replicas}:
            self._forget(gone)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._sent.pop(replica_id, None)
        self._last_sent_s.pop(replica_id, None)

    def _candidate(self, replica: RunningReplica) -> Candidate:
        sent, now_s = self._sent[replica.replica_id], time.monotonic()
        while sent and now_s - sent[0][0] > NOTE_S:
            sent.popleft()
        report = Report.from_json(replica.routing_stats).after([prefixes for _, prefixes in sent])
        return Candidate(report, self.replica_queue_len_cache.get(replica.replica_id))


def asked_conversation(pending: PendingRequest | None) -> Conversation:
    """The conversation of a request; an empty one where it is not one of moegguf's."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Conversation) else Conversation()
