"""Groups by their names, and a group as this process sees it: one call at a time, and exchanges of
words through its store.

Order is the caller's: as with any collective, all ranks make the calls of one group in the same
order, from whichever threads. The lock only keeps two calls from running into each other.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _get_group_size_by_name,
    _get_process_group_store,
    _resolve_process_group,
)

from agmm import _core, _env
from agmm.errors import AgmmError, InvalidArgument
from agmm.runtime import identity
from agmm.runtime.backends import is_fake
from agmm.runtime.callers import called
from agmm.runtime.empty_calls import EmptyCalls
from agmm.runtime.identity import check_alive as check_alive
from agmm.runtime.streams import Calls as Calls

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The time between looks at the store is a choice. Peers usually come at once; one that is late is
# not worth its server's time.
_FIRST_POLL_S = 2e-4
_LONGEST_POLL_S = 2e-2


def host_id() -> str:
    """What tells this host from others: a name may be shared by several."""
    return BOOT_ID.read_text().strip()


_CAPTURES = 4  # of which a group knows the last call, as a workspace of the core does


class Group:
    """What this process keeps of one group object; it ends with it. See `of`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weakly: it is kept by group.
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.own_name = identity.new_own_name(group)
        """The name for graphs and layers, which may outlive the group."""
        self.lock = threading.RLock()
        """Held for a call, from its first step that other ranks see to its last."""
        self.calls = 0
        """How many calls this process has begun in the group."""
        self.call: tuple[int, object] | None = None
        """The tag of the call under way on the CPU, and in words what it is."""
        self.captured_calls = 0
        """How many of `calls` a CUDA graph has recorded, which ranks may do a different number of
        times."""
        self.empty_calls = EmptyCalls()
        self._last_calls: dict[int, Calls] = {}
        self._turn: tuple[int, Calls | None] | None = None
        self.is_in_step = True
        """False once a call by copies has failed half-way."""
        self.token = ""
        self._exchanges = 0
        self._hosts: list[str] | None = None

    @property
    def eager_calls(self) -> int:
        """The number of `calls` that no CUDA graph has recorded."""
        return self.calls - self.captured_calls

    def last_before(self, calls: Calls, capture: int) -> Calls | None:
        """What made the group's last call, behind which a call on a GPU, by ``calls``, has to come;
        None where it comes behind it anyway. `lock` is held.

        Eager calls are one sequence, and so are those of each capture; the order of replays is the
        caller's. In a sequence the calls of a rank run one after the other, on whichever streams
        they come and of whichever kind they are. So the ranks cannot wait in a ring: of the calls
        that are not over on all ranks, the first waits for nothing else of the group on any rank.

        Args:
            calls: orders its own calls by itself.
            capture: that the call is in, by its id; 0: none.
        """
        last = self._last_calls.get(capture)
        self._turn = None
        if last is calls:
            return None
        if last is None and len(self._last_calls) > _CAPTURES:
            del self._last_calls[next(known for known in self._last_calls if known)]
        self._last_calls[capture] = calls
        self._turn = capture, last
        return last

    def give_turn_back(self) -> None:
        """The call that `last_before` was asked for last has enqueued nothing: the next one comes
        behind those before it. Under `lock`."""
        if self._turn is not None:
            capture, last = self._turn
            if last is None:
                del self._last_calls[capture]
            else:
                self._last_calls[capture] = last
            self._turn = None

    def check_in_step(self) -> None:
        """Raises AgmmError where this rank is not."""
        if not self.is_in_step:
            raise AgmmError(
                "group: an earlier call failed half-way, so its ranks may be out of step; wanted "
                "new processes"
            )

    def all_are_over(self) -> None:
        """The GPU has finished all eager calls. Under `lock`."""
        self._last_calls.pop(0, None)

    def exchange(self, topic: str, value: str) -> list[str]:
        """Every rank's value, by rank. Collective.

        Looks again and again instead of waiting in the store, which would hold up the other threads
        of this process that use it.

        Args:
            topic: what is exchanged, for messages; the same on all ranks.

        Raises:
            AgmmError: a rank did not come within AGMM_TIMEOUT_S, came with another topic, or calls
                without elements where another has some (`calling`).
        """
        if self.world_size == 1 or is_fake(self._alive()):
            return [value] * self.world_size
        call, empty = called()
        said = f"is about to exchange {topic}"
        if call is not None:
            said = f"is in {call}, about to exchange {topic}"
        with self.lock:
            store = self.store()
            prefix = f"{self.prefix()}/{self._agreed_token(store)}/{self._exchanges}"
            self._exchanges += 1
            keys = [f"{prefix}/{peer}" for peer in range(self.world_size)]
            store.set(keys[self.rank], json.dumps([topic, value, empty, said]))
            self._await(
                lambda: bool(store.check(keys)),
                lambda: [peer for peer, key in enumerate(keys) if not store.check([key])],
                f"to exchange {topic}",
            )
            found = [json.loads(store.get(key)) for key in keys]
        for peer, (their_topic, _, their_empty, theirs) in enumerate(found):
            if (their_topic, their_empty) != (topic, empty):
                raise AgmmError(
                    "group: found different calls on its ranks, wanted the same ones: rank "
                    f"{self.rank} {said}; rank {peer} {theirs}"
                )
        return [value for _, value, _, _ in found]

    def hosts(self) -> list[str]:
        """The host of each rank, by rank. Collective at first use."""
        with self.lock:
            if self._hosts is None:
                found = self.exchange("their hosts", identity.told(host_id()))
                self._hosts = identity.agreed(found)
            return self._hosts

    def tell(self, topic: str, value: str) -> None:
        """Leaves a word for the other ranks, who need not take part. See `told`."""
        self.store().set(self._told_key(topic, self.rank), value)

    def told(self, topic: str, peer: int, limit_s: float) -> str | None:
        """What a rank told; None where it tells nothing for ``limit_s`` seconds."""
        store, key = self.store(), self._told_key(topic, peer)
        deadline = time.monotonic() + limit_s
        while not store.check([key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_LONGEST_POLL_S)
        return bytes(store.get(key)).decode()

    def _told_key(self, topic: str, peer: int) -> str:
        return f"{self.prefix()}/{self.token}/{topic}/{peer}"

    def prefix(self) -> str:
        return f"agmm/{self._alive().group_name}"

    def store(self) -> dist.Store:
        return _get_process_group_store(self._alive())

    def _alive(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise InvalidArgument("group: found a destroyed one, wanted one in use")
        return group

    def _agreed_token(self, store: dist.Store) -> str:
        """The part of all keys that no earlier group of this name had: its keys may still be there.

        Rank 0 makes a token and each other rank a word of its own. A rank that has read a token
        leaves its word under it, and takes the token as the group's when rank 0 has answered that
        word. That is never so with a token of the past, whose maker knew none of today's words;
        then the rank looks again whether there is another one. Rank 0 answers when every rank has
        left its word, and nobody did so before it made the token. So all ranks take the same one.
        """
        if self.token:
            return self.token
        word = secrets.token_hex(8)
        prefix = self.prefix()
        if self.rank == 0:
            here = [f"{prefix}/{word}/here/{peer}" for peer in range(1, self.world_size)]
            store.set(f"{prefix}/token", word)
            self._await(
                lambda: bool(store.check(here)),
                lambda: [peer for peer, key in enumerate(here, 1) if not store.check([key])],
                "to make their first call in this group",
            )
            words = [bytes(store.get(key)).decode() for key in here]
            store.set(f"{prefix}/{word}/go", ",".join(words))
            self.token = word
            return word
        seen = ""

        def answered() -> bool:
            nonlocal seen
            if not store.check([f"{prefix}/token"]):
                return False
            token = bytes(store.get(f"{prefix}/token")).decode()
            if token != seen:
                store.set(f"{prefix}/{token}/here/{self.rank}", word)
                seen = token
            go = f"{prefix}/{token}/go"
            return store.check([go]) and word in bytes(store.get(go)).decode().split(",")

        def missing() -> list[int]:
            if not seen:
                return [0]
            here = {p: f"{prefix}/{seen}/here/{p}" for p in range(1, self.world_size)}
            return [p for p, key in here.items() if not store.check([key])] or [0]

        self._await(answered, missing, "to make their first call in this group")
        self.token = seen
        return seen

    def _await(self, ready: Callable[[], bool], missing: Callable[[], list[int]], to: str) -> None:
        limit_s, warn_s = _env.timeout_s(), _env.warn_s()
        begin, warned, pause_s, looks = time.monotonic(), False, _FIRST_POLL_S, 1
        while not ready():
            waited_s = time.monotonic() - begin
            if waited_s > looks and self.token and self._last_calls:
                looks += 1
                differ = self.empty_calls.look(self, waits_in_one=called()[1] != "")
                if differ:
                    raise AgmmError(differ)
            if waited_s > limit_s:
                raise AgmmError(
                    f"rank {self.rank}: waited {limit_s:g} s for ranks {missing()} {to}; wanted "
                    "the same calls on all ranks"
                )
            if warn_s and waited_s > warn_s and not warned:
                warned = True
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - waited_s))
                _core.write_line(
                    f"agmm: rank {self.rank} has waited {waited_s:.1f} s, since {since}, for ranks "
                    f"{missing()} {to}; waiting until it is {limit_s:g} s (AGMM_TIMEOUT_S)"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)


# Keyed by the group object: a name may come back for another group after destroy_process_group.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Group] = weakref.WeakKeyDictionary()
_groups_lock = threading.Lock()


def of(group: dist.ProcessGroup) -> Group:
    """What this process keeps of the group."""
    found = _groups.get(group)
    if found is None:
        check_alive(group)
        with _groups_lock:
            found = _groups.get(group)
            if found is None:
                found = _groups[group] = Group(group)
    return found


def all_known() -> list[Group]:
    """All groups of this process that have been asked for."""
    with _groups_lock:
        return list(_groups.values())


def group_of(group_name: str) -> dist.ProcessGroup:
    """The group of that name, or the one whose own name it is.

    Raises:
        InvalidArgument: this process has no group of that name, or the group whose own name it is
            has been destroyed.
    """
    if identity.is_own_name(group_name):
        group = identity.by_own_name(group_name)
        if group is None:  # a graph from another process may come before the group was asked for
            group = group_of(identity.backend_name(group_name))
            if of(group).own_name != group_name:
                raise identity.destroyed()
        check_alive(group)
        return group
    try:
        return _resolve_process_group(cast(Any, group_name))  # torch 2.13 wants a NewType of str
    except (RuntimeError, ValueError, KeyError):
        raise InvalidArgument(
            f"group: found {group_name!r}, wanted the name of a process group of this process"
        ) from None


def group_of_size(group_name: str, world_size: int) -> dist.ProcessGroup:
    """The group of that name. Raises InvalidArgument where its size is another one, as that of a
    graph which was compiled for more or fewer ranks and kept on disk."""
    group = group_of(group_name)
    if group.size() != world_size:
        raise InvalidArgument(
            f"world_size: found {world_size} in the call, wanted {group.size()}, the size of group "
            f"{group_name!r}: a graph compiled for another number of ranks; compile it anew with "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
        )
    return group


def group_or_default(
    group: dist.ProcessGroup | DeviceMesh | str | None,
) -> dist.ProcessGroup | str:
    """The group that was given, a 1-D mesh's group, or the default group for None."""
    given: Any = group  # not always what it should be: traced, a group is a stand-in
    if isinstance(given, (dist.ProcessGroup, str)):
        return given
    if given is None:
        if not dist.is_initialized():
            raise InvalidArgument(
                "group: found None without a default process group, wanted a group or "
                "torch.distributed.init_process_group"
            )
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise InvalidArgument(
                f"group: found a DeviceMesh of {given.ndim} dimensions, wanted 1, e.g. mesh['tp']"
            )
        if given.get_coordinate() is None:
            raise InvalidArgument(
                "group: found a DeviceMesh that this rank is not in, wanted a mesh of this rank"
            )
        return identity.group_of_mesh(given, 0)
    if torch.compiler.is_compiling():
        return cast(dist.ProcessGroup, given)
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidArgument(
            "group: found a group that this rank is not in, wanted a group of this rank"
        )
    raise InvalidArgument(
        f"group: found {given!r}, wanted a process group, its name or a 1-D DeviceMesh"
    )


def name_of(group: dist.ProcessGroup | DeviceMesh | str | None) -> str:
    """The name by which ops are given a group, the default group's for None: the group's own name,
    except in a trace, to which the group is a stand-in. Raises InvalidArgument where it has been
    destroyed."""
    found = group_or_default(group)
    if isinstance(found, str):
        return found
    if torch.compiler.is_compiling():
        return found.group_name
    check_alive(found)
    return of(found).own_name


def resolved(group: dist.ProcessGroup | DeviceMesh | str | None) -> dist.ProcessGroup:
    """The group itself, the default group for None."""
    found = group_or_default(group)
    return group_of(found) if isinstance(found, str) else found


def world_size_of(group_name: str) -> int:
    if torch.compiler.is_compiling():
        if identity.is_own_name(group_name):
            return identity.ranks_of(group_name)
        # torch traces this as a constant.
        return _get_group_size_by_name(group_name)  # type: ignore[arg-type]  # a NewType of str
    return group_of(group_name).size()
