"""The invariants of the scheduler, restated: tests look after every step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from glmjax.serving.request import Status

if TYPE_CHECKING:
    from glmjax.serving.scheduler import Scheduler


def check_scheduler(scheduler: "Scheduler") -> None:
    """Raise unless every invariant holds."""
    holders: list[Sequence[int]] = [r.blocks for r in scheduler.running]
    if scheduler.handoff is not None:
        scheduler.handoff.check()
    if scheduler.offload is not None:
        scheduler.offload.check(scheduler.running)
        for r in scheduler.running:
            fetched = scheduler.handoff is not None and scheduler.handoff.is_arriving(r)
            _require(fetched == scheduler.offload.is_arriving(r), f"{r.request_id} waits for nothing, or does not wait")
        holders += scheduler.offload.holders()
    scheduler.pool.check(holders)
    for queue, status in ((scheduler.running, Status.RUNNING), (scheduler.waiting, Status.WAITING)):
        _require(queue == sorted(queue, key=scheduler.precedence), "a queue is out of order")
        _require(all(r.status is status for r in queue), "a request is in the wrong queue")
    members = {r.request_id for r in (*scheduler.running, *scheduler.waiting)}
    _require(members == set(scheduler.requests), "a request is lost")
    _require(len(members) == len(scheduler.running) + len(scheduler.waiting), "a request is in twice")
    _require(len(scheduler.running) <= scheduler.config.max_num_seqs, "too many run")
    slots = sorted([*scheduler.free_slots, *(r.slot for r in scheduler.running)])
    _require(slots == list(range(scheduler.config.max_num_seqs)), "a slot is lost or in use twice")
    for r in scheduler.waiting:
        _require(not r.blocks and r.num_computed == 0 and not r.in_flight, f"{r.request_id} waits with KV")
    for r in scheduler.running:
        room = len(r.blocks) * scheduler.config.block_size
        _require(r.num_computed < r.num_tokens + r.in_flight, f"{r.request_id} has nothing to compute")
        _require(r.num_computed <= room, f"{r.request_id} computed past its blocks")


def _require(ok: bool, fault: str) -> None:
    if not ok:
        raise AssertionError(f"scheduler: {fault}")
