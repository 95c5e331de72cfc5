"""Prefill and decode in separate pools (xPyD): prompts are computed here, tokens are made there.

    prefill replica    computes the prompt and makes the first token
    transfer           the KV cache of the prompt goes to a decode replica, but for what its prefix cache has
    decode replica     makes the others, one a step; it computes a prompt only after it preempted somebody

The user sees the first token when the cache has arrived (TTFT), because vLLM's and SGLang's answers are streamed by
the decode side; `first_token_from="prefill"` is an engine whose prefill side sends it at once.

A request that loses its decode replica starts again at a prefill replica, with the tokens it has made.
A prefill replica is taken to keep a cache until it is sent without running out of room.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from bstar.sim.cluster.decode import DecodeReplica
from bstar.sim.cluster.loop import LAND, READY, Cluster, Member
from bstar.sim.cluster.routers import Router
from bstar.sim.cluster.transfer import Transfers

FirstToken = Literal["decode", "prefill"]


@dataclass(slots=True, eq=False, kw_only=True)
class SplitCluster(Cluster):
    """Two pools, told apart by `takes_prompts`. `router` is that of arrivals.

    decode_router   of computed prompts
    first_token_from  which side shows a user the first token
    homeless        computed, and no decode replica is there
    """

    decode_router: Router
    transfers: Transfers
    max_model_len: int
    first_token_from: FirstToken = "decode"
    homeless: deque[int] = field(default_factory=deque)
    _computed: dict[int, tuple[int, float]] = field(default_factory=dict)  # request -> its prefill replica, when

    def done(self, member: Member, rank: int, at_s: float) -> None:
        ledger = self.ledger
        made = int(ledger.made[rank])
        whole = ledger.input_tokens[rank] + made >= self.max_model_len or made >= ledger.output_tokens[rank]
        if not member.replica.takes_prompts or whole:
            Cluster.done(self, member, rank, at_s)
            return
        ledger.prefill_replica[rank] = member.replica.number
        self._computed[rank] = (member.replica.number, at_s)
        self._pass_on(rank, at_s)
        self.emptied(member, at_s)

    def dispatch(self) -> None:
        homeless, self.homeless = self.homeless, deque()
        for rank in homeless:
            self._pass_on(rank, self.now)
        Cluster.dispatch(self)

    def _pass_on(self, rank: int, at_s: float) -> None:
        ready = [m.replica for m in self.members if m.state == READY and isinstance(m.replica, DecodeReplica)]
        if ready:
            self.decode_router.choose(rank, ready).expect(rank, at_s)
        else:
            self.homeless.append(rank)

    def reserved(self, receiver: int, rank: int, at_s: float, kept_tokens: int) -> None:
        """A decode replica has room for a prompt: its cache is sent."""
        ledger = self.ledger
        sender, computed_at_s = self._computed.pop(rank)
        tokens = ledger.input_tokens[rank] + int(ledger.made[rank]) - 1
        at_once = at_s == computed_at_s and not ledger.retries[rank]
        computed_s = at_s - float(ledger.scheduled_s[rank]) if at_once else 0.0
        arrival_s = self.transfers.arrival_s(sender, receiver, at_s, computed_s, tokens, kept_tokens)
        ledger.moved_bytes[rank] += self.transfers.content_bytes(tokens, kept_tokens)
        ledger.moved_s[rank] = arrival_s - computed_at_s
        self.at(arrival_s, LAND, (receiver, rank))

    def landed(self, what: object) -> None:
        assert isinstance(what, tuple)
        receiver, rank = what
        replica = self.members[receiver].replica
        assert isinstance(replica, DecodeReplica)
        ledger = self.ledger
        if self.first_token_from == "decode" and ledger.made[rank] == 1 and not ledger.retries[rank]:
            ledger.first_token_s[rank] = ledger.last_s[rank] = self.now
        replica.land(rank, self.now)
