"""Prefill and decode apart: which requests are computed on one instance and decoded on another, and how many instances
prefer either (DistServe, OSDI'24, with roles that follow the load as Llumnix's adaptive ones do).

A role is a preference of the scheduler. An instance of any role does what it is sent, and can change its role at any time.

    short prompt       computed where it is decoded: it lengthens few steps there
    long prompt        computed on a prefill instance, and handed over to a decoder while it is computed
    late there         computed by the decoder after all, where that begins it sooner
    no decoder         decoded where it was computed: none has the memory, or its output is short

Prompts of several steps' length are what makes other requests' tokens late, so only those are long. Those that are cached at
a decoder are short there.

Adaptive roles are chosen by prediction (`pressure`): how near the later of both objectives is with each number of prefill
instances, and with none. The present ones stay where others would be little better. All do both, as without roles, where
that is predicted to be better, and where the others' memory would not do for all that decodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from shared.messages.cluster import Role
from shared.policies.dispatch import Candidate

SHORT_STEPS = 2.0
"""A prompt that takes as long as so many decode steps is short."""
LATE_SHARE, LEAST_LATE_SHARE = 0.5, 0.25
"""Share of the TTFT objective within which a first token is early enough on a prefill instance, where nobody names a TPOT
objective, and at least."""
LEAST_OUTPUT = 16
"""A request of fewer output tokens at most is not handed over."""

LEAST_CHUNK, MOST_CHUNK = 512, 2048
CHUNK_SHARE = 2 / 3
"""Chunks of a prompt that is handed over, in tokens: a share of what is left, within these."""

LEAST_WORK = 0.05
"""Long prompts that take a smaller share of one instance's time are left to decoders."""
MOST_FILL, SPARE_FILL = 0.8, 0.7
"""Share of the decoders' KV pools that may be used, to keep a prefill instance and to make one."""
GOOD = 0.85
"""Pressure up to which roles are as good as can be: both objectives are met with some room."""
BETTER = 0.85
"""Pressure of other roles over that of the present ones, up to which they are worth a change."""
NEARLY = 0.95
"""Pressure of the best roles over that of others that are as good."""
TAIL = 1.5
"""Waits of late prompts over the mean wait, and of prompts of one length over those of random ones: 3 * 1/2."""
UNBOUNDED = 1e3
"""Pressure where instances cannot keep up."""
NO_OBJECTIVE_STEPS = 4.0
"""Decode steps that a token may take at most where nobody names an objective."""


def is_short(prompt_s: float, step_s: float) -> bool:
    """Whether a prompt is computed where it is decoded. `step_s`: of the decode steps there; 0: not known."""
    return not step_s or prompt_s <= SHORT_STEPS * step_s


def is_apart(here: Candidate, there: Candidate, step_s: float, ttft_s: float, tpot_s: float) -> bool:
    """Whether a prompt is computed `there`, by a prefill instance, and not `here`, where it is decoded.

    `step_s`: decode steps here; `ttft_s`, `tpot_s`: objectives of a first and of each later token, 0: none. Seconds."""
    if here.missing_merged > 0 or there.missing_merged > 0:
        return there.missing_merged < here.missing_merged
    if is_short(here.prompt_s, step_s):
        return False
    first_here_s, first_there_s = here.start_s + here.prompt_s, there.start_s + there.prompt_s
    return first_there_s <= max(first_here_s, late_share(step_s, tpot_s) * ttft_s)


def late_share(step_s: float, tpot_s: float) -> float:
    """Share of the TTFT objective within which a first token is early enough on a prefill instance: the more, the less time
    the decoders' steps leave of the TPOT objective. A prompt beside them makes all of their streams late."""
    if not tpot_s:
        return LATE_SHARE
    return min(1.0, max(LEAST_LATE_SHARE, step_s / (GOOD * tpot_s)))


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
    ttft_s: float
    """Objective of a first token; 0: none."""
    tpot_s: float
    """Objective of each later one; 0: none."""


class PhaseLoad(NamedTuple):
    """What comes to all instances, in instances: seconds of their time for each second."""

    prompts: float
    """Long prompts."""
    short_prompts: float
    prompt_s: float
    """Seconds of one long prompt."""
    decodes: float
    """What decoding requests add to the steps that there are in any case."""


def decode_load(views: Collection[RoleView], prompts: float, short_prompts: float) -> float:
    """`PhaseLoad.decodes`: by Little's law the tokens that decode each second are those that run over the time of a token,
    and each takes what it adds to a step. A token takes the longer the more of its instance's time prompts take."""
    num_prefill = sum(view.role is Role.PREFILL for view in views)
    num_decoders = len(views) - num_prefill
    found = 0.0
    for view in views:
        if not view.step_s:
            continue
        if view.role is Role.PREFILL:
            share = prompts / num_prefill
        else:
            share = (short_prompts + (0.0 if num_prefill else prompts)) / num_decoders
        added_s = view.num_running * view.request_s
        found += added_s / (view.step_s + added_s) * (1.0 - min(share, 0.95))
    return found


def pressure(views: Collection[RoleView], load: PhaseLoad, num_prefill: int) -> float:
    """How near the later of both objectives is with so many prefill instances, 0: none are. 1: it is just met.

    A token takes one step, longer by what else is computed on its instance. A prompt waits as in a queue with as many
    servers as instances compute prompts (Sakasegawa's approximation of M/M/c, halved since prompts are alike)."""
    num_decoders = len(views) - num_prefill
    servers = num_prefill or num_decoders
    beside = (load.decodes + load.short_prompts + (0.0 if num_prefill else load.prompts)) / num_decoders
    use = load.prompts / servers
    left = 1.0 - beside
    if left <= 0.0 or use >= 1.0:
        return UNBOUNDED * (use + beside)
    first_s = load.prompt_s * (1.0 + TAIL * use ** (2 * (servers + 1)) ** 0.5 / (servers * (1.0 - use)))
    of_firsts = max((first_s / view.ttft_s for view in views if view.ttft_s), default=use / GOOD)
    of_steps = [view.step_s / (view.tpot_s or NO_OBJECTIVE_STEPS * view.step_s) for view in views if view.step_s]
    return max(of_firsts, max(of_steps, default=0.0) / left)


def has_room(decoders: Collection[RoleView], fill: float) -> bool:
    """Whether the decoders have the memory for all that decodes there. `fill`: share of their pools that this may take. What
    prefill instances hold comes and goes."""
    used, whole = sum(view.used_merged for view in decoders), sum(view.num_merged for view in decoders)
    return bool(decoders) and used <= fill * whole


def next_roles(views: Sequence[RoleView], load: PhaseLoad) -> list[tuple[str, Role]]:
    """Instances whose roles are to change now, all of them at once: with fewer of them prompts would queue meanwhile."""
    prefills = [view for view in views if view.role is Role.PREFILL]
    decoders = [view for view in views if view.role is not Role.PREFILL]
    free = sorted((view for view in prefills if not view.is_fixed), key=lambda view: (view.prompts_s, view.instance_id))
    num, spared = len(prefills), _spared(decoders)
    wanted = _wanted(views, load, num, num - len(free), num + len(spared))
    num_over = max(num - wanted, 0 if has_room(decoders, MOST_FILL) else 1)
    if num_over > 0:
        return [(view.instance_id, Role.BOTH) for view in free[:num_over]]
    return [(view.instance_id, Role.PREFILL) for view in spared[: wanted - num]]


def _spared(decoders: Sequence[RoleView]) -> list[RoleView]:
    """Decoders that can compute prompts for the others, all of them together, the one with the least to decode first: the
    others serve all of their models, and have the memory for all that decodes."""
    num_serving = Counter(model for view in decoders for model in view.models)
    used, whole = sum(view.used_merged for view in decoders), sum(view.num_merged for view in decoders)
    spared = []
    for view in sorted(decoders, key=lambda view: (view.num_running, view.instance_id)):
        left = whole - view.num_merged
        are_served = view.models and all(num_serving[model] > 1 for model in view.models)
        if not view.is_fixed and are_served and left and used <= SPARE_FILL * left:
            spared.append(view)
            whole = left
            num_serving.subtract(view.models)
    return spared


def _wanted(views: Sequence[RoleView], load: PhaseLoad, num_now: int, num_fixed: int, most: int) -> int:
    """Prefill instances that there should be: as many as make the later objective nearly as easy as it can be, as far as
    this is good, or better than with none. `num_fixed`: at least; `most`: that there can be."""
    most = min(most, len(views) - 1)
    if load.prompts < LEAST_WORK / (2 if num_now > num_fixed else 1) or most < max(1, num_fixed):
        return num_fixed
    pressures = [pressure(views, load, num) for num in range(most + 1)]
    least, none = min(pressures[max(1, num_fixed) :]), pressures[0]
    if not num_fixed and least > (max(GOOD, none / BETTER) if num_now else BETTER * max(GOOD, none)):
        return 0
    if num_now and (pressures[num_now] if num_now <= most else math.inf) <= least / BETTER:
        return num_now
    return next(num for num in range(max(1, num_fixed), most + 1) if pressures[num] <= least / NEARLY)
