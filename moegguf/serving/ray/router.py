"""The request router of each deployment: `preference.rank` over what Ray Serve knows of the replicas."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from moegguf.serving.ray.preference import Candidate, Conversation, Sequences, after, rank


class ConversationRouter(RequestRouter):
    """Ranks replicas for requests whose first argument is a `Conversation`, by what it sent them before: all requests
    come through one ingress replica. A replica that has lost its KV cache since is preferred in vain, which costs
    nothing: no other one holds the conversation."""

    def initialize_state(self, n_sequences: int = 1) -> None:
        """Called by Ray Serve with `request_router_kwargs`. n_sequences: of a replica's KV cache."""
        self._n_sequences = n_sequences
        self._held: dict[ReplicaID, Sequences] = {}
        self._last_sent_s: dict[ReplicaID, float] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Ray Serve: replicas in ranks, preferred ones first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all are full
        # The first of equals is taken: the one whose cache is the oldest.
        replicas = sorted(candidate_replicas, key=lambda replica: self._last_sent_s.get(replica.replica_id, 0.0))
        queues = self.replica_queue_len_cache
        candidates = [Candidate(self._held.get(each.replica_id, ()), queues.get(each.replica_id)) for each in replicas]
        ranks = rank(asked_conversation(pending_request), candidates)
        return [[replicas[i] for i in indices] for indices in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray Serve: a replica has accepted a request."""
        conversation = asked_conversation(pending_request)
        if conversation.prefixes:
            self._last_sent_s[replica_id] = time.monotonic()
            self._held[replica_id] = after(self._held.get(replica_id, ()), conversation, self._n_sequences)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called by Ray Serve: what it held is lost."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve: forgets what those had that are gone."""
        super().update_replicas(replicas)
        for gone in self._held.keys() - {replica.replica_id for replica in replicas}:
            self._forget(gone)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._held.pop(replica_id, None)
        self._last_sent_s.pop(replica_id, None)


def asked_conversation(pending: PendingRequest | None) -> Conversation:
    """The conversation of a request; an empty one where it is not one of moegguf's."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Conversation) else Conversation()
