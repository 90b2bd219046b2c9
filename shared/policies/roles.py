"""Prefill and decode apart: which requests are computed on one instance and decoded on another, and how many instances
prefer either (DistServe, OSDI'24, with roles that follow the load as Llumnix's adaptive ones do).

A role is a preference of the scheduler. An instance of any role does what it is sent, and can change its role at any time.

    short prompt       computed where it is decoded: it lengthens few steps there
    long prompt        computed on a prefill instance, and handed over to a decoder while it is computed
    late there         computed by the decoder after all, where that begins it sooner
    no decoder         decoded where it was computed: none has the memory, or its output is short

Prompts of several steps' length are what makes other requests' tokens late, so only those are long. Those that are cached at
a decoder are short there.

Adaptive roles: prefill instances are as many as keep long prompts from queueing (`MOST_WORK`), as far as the other instances
still have the memory and the speed for all that decodes. Where not even one can be spared, all do both, as without roles.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from shared.messages.cluster import Role
from shared.policies.dispatch import Candidate

SHORT_STEPS = 2.0
"""A prompt that takes as long as so many decode steps is short."""
LATE_SHARE = 0.5
"""Share of the TTFT objective within which a first token is early enough on a prefill instance."""
LEAST_OUTPUT = 16
"""A request of fewer output tokens at most is not handed over."""

LEAST_CHUNK, MOST_CHUNK = 512, 2048
CHUNK_SHARE = 2 / 3
"""Chunks of a prompt that is handed over, in tokens: a share of what is left, within these."""

LEAST_WORK = 0.05
"""Long prompts that take a smaller share of one instance's time are left to decoders."""
MOST_WORK, SPARE_WORK = 0.7, 0.5
"""Share of the time of prefill instances that long prompts take: above the first there is one more, and with one less at
most the second."""
MOST_FILL, SPARE_FILL = 0.7, 0.6
"""Share of the decoders' KV pools that may be used, to keep a prefill instance and to make one."""
MOST_STEP, SPARE_STEP = 0.9, 0.75
"""Share of the TPOT objective that their steps may take, likewise."""
BEGIN_S = 1.0
"""Time for which there is to be a reason for the first prefill instance: what has come in the last seconds has not filled
the decoders yet. Others follow at once: while there are too few, most prompts are still computed by fewer decoders."""


def is_short(prompt_s: float, step_s: float) -> bool:
    """Whether a prompt is computed where it is decoded. `step_s`: of the decode steps there; 0: not known."""
    return not step_s or prompt_s <= SHORT_STEPS * step_s


def is_apart(here: Candidate, there: Candidate, step_s: float, ttft_s: float) -> bool:
    """Whether a prompt is computed `there`, by a prefill instance, and not `here`, where it is decoded.

    `step_s`: decode steps here; `ttft_s`: objective of a first token, 0: none. Seconds."""
    if here.missing_merged > 0 or there.missing_merged > 0:
        return there.missing_merged < here.missing_merged
    if is_short(here.prompt_s, step_s):
        return False
    first_here_s, first_there_s = here.start_s + here.prompt_s, there.start_s + there.prompt_s
    return first_there_s <= max(first_here_s, LATE_SHARE * ttft_s)


def is_handed_over(decoder: Candidate, tokens_left: int) -> bool:
    """Whether a request whose prompt is computed elsewhere goes on at the decoder. `tokens_left`: most output tokens."""
    return decoder.missing_merged <= 0 and tokens_left >= LEAST_OUTPUT


def most_chunk(num_left: int) -> int:
    """Most tokens of the next chunk of a prompt that is handed over. Each chunk is sent while the next one is computed, so
    that chunks become smaller towards the end: what the first decode step waits for is the last one."""
    return max(LEAST_CHUNK, min(MOST_CHUNK, int(CHUNK_SHARE * num_left)))


class RoleView(NamedTuple):
    """An instance as roles see it."""

    instance_id: str
    role: Role
    is_fixed: bool
    models: frozenset[str]
    num_running: int
    """Online requests that decode there, or are about to."""
    used_merged: float
    """Merged blocks of its pool that online requests use or need."""
    num_merged: int
    prompts_s: float
    """Predicted time of the prompts that wait there."""
    step_s: float
    """Seconds of a step that decodes one request; 0: not known."""
    request_s: float
    """What each more of them adds to it."""
    tpot_s: float
    """Objective of a token; 0: none."""


def has_room(decoders: Collection[RoleView], fill: float, step: float, left: RoleView | None = None) -> bool:
    """Whether the decoders have room for all that decodes there, and for that of one that decodes no more. `fill`, `step`:
    shares of their pools and of their objectives that this may take. What prefill instances hold comes and goes."""
    if not decoders:
        return False
    views = decoders if left is None else (*decoders, left)
    if sum(view.used_merged for view in views) > fill * sum(view.num_merged for view in decoders):
        return False
    each = sum(view.num_running for view in views) / len(decoders)
    return all(not view.tpot_s or view.step_s + each * view.request_s <= step * view.tpot_s for view in decoders)


def patience_s(num_prefill: int) -> float:
    """Time for which one more prefill instance is to be wanted before it is made."""
    return 0.0 if num_prefill else BEGIN_S


def next_role(views: Sequence[RoleView], work: float) -> tuple[str, Role] | None:
    """The one instance whose role is to change now, and to what; None: they are as they should be.

    `work`: seconds of long prompts that come each second."""
    prefills = [view for view in views if view.role is Role.PREFILL]
    decoders = [view for view in views if view.role is not Role.PREFILL]
    free = [view for view in prefills if not view.is_fixed]
    num = len(prefills)
    is_idle = work < LEAST_WORK / 2 or (num > 1 and work <= SPARE_WORK * (num - 1))
    if free and (is_idle or not has_room(decoders, MOST_FILL, MOST_STEP)):
        return min(free, key=lambda view: (view.prompts_s, view.instance_id)).instance_id, Role.BOTH
    if work < LEAST_WORK or work <= MOST_WORK * num:
        return None
    able = [
        view
        for view in decoders
        if not view.is_fixed
        and view.models
        and view.models <= frozenset().union(*(other.models for other in decoders if other is not view))
        and has_room([other for other in decoders if other is not view], SPARE_FILL, SPARE_STEP, view)
    ]
    if not able:
        return None
    return min(able, key=lambda view: (view.num_running, view.instance_id)).instance_id, Role.PREFILL
