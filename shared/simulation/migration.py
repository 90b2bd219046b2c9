"""Migrations in virtual time: the cores of all instances, and what is between them. A message takes `CONTROL_S`, a copy its
bytes over the rate, which the copies out of an instance share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count

from shared.engine import calls as engine_calls
from shared.engine.driver import StepStats
from shared.engine.engine import Effect
from shared.engine.handover import Detached, PromptChunk
from shared.engine.requests import Ended
from shared.messages.cluster import InstanceInfo, MigrationOutcome
from shared.messages.migration import (
    AbortMigration,
    BackUp,
    BackupRooms,
    Commit,
    Committed,
    FetchPrefix,
    KeepBackups,
    OwnsQuery,
    OwnsReply,
    PreAllocate,
    PrefixSent,
    Rebalance,
    Reserved,
)
from shared.messages.requests import Cancel, ErrorCode, ErrorInfo, GenerationRequest, TokenEntry
from shared.migration import calls, commands
from shared.migration.calls import Call, Reply, calls_of
from shared.migration.commands import Command
from shared.migration.estimates import copy_s
from shared.migration.incoming import Intake, held_after, with_busy
from shared.migration.outgoing import MOVED
from shared.migration.questions import EngineHost, Surroundings
from shared.migration.recording import Configuration, recorded
from shared.policies.kv_backup import NO_BACKUP, BackupSettings
from shared.policies.prefix_fetch import WAIT_S
from shared.simulation.events import Events, Timer
from shared.simulation.fleet import CONTROL_S, Fleet, Instance

Answer = Reserved | Committed | OwnsReply | ErrorInfo

TICKET = b"ticket"


class Network:
    """Between the instances. `fate(what)`: of a message, after how long each of its copies arrives (none: it is lost), and
    of the blocks of a stage, how much longer they take than they should; `what` is the message's or the command's type."""

    def __init__(self, events: Events, fate: Callable[[type], tuple[float, ...]] = lambda _: (CONTROL_S,)) -> None:
        self.events = events
        self.fate = fate
        self.reach: Callable[[str], VirtualMigrations | None] = lambda _: None
        """Migrations of an instance; None: it is dead."""

    def send(self, what: type, arrive: Callable[[], None]) -> None:
        for delay_s in self.fate(what):
            self.events.after(delay_s, arrive)


class _Transfer:
    """Blocks of a stage on their way."""

    def __init__(self, source: VirtualMigrations, destination: VirtualMigrations, command: commands.SendBlocks) -> None:
        self.source, self.destination, self.command = source, destination, command
        self.is_over = False
        source.num_transfers += 1
        source.num_out += 1
        destination.num_transfers += 1

    def end(self) -> bool:
        """False: it was over before."""
        if self.is_over:
            return False
        self.is_over = True
        self.source.num_transfers -= 1
        self.source.num_out -= 1
        self.destination.num_transfers -= 1
        return True


class VirtualMigrations:
    """Hosts one instance's."""

    def __init__(
        self,
        network: Network,
        engine: EngineHost,
        intake: Intake,
        peers: Callable[[], Mapping[str, InstanceInfo]],
        new_id: Callable[[], str],
        block_bytes: Callable[[str], int],
        bandwidth_bytes_s: float,
        *,
        max_migrations: int,
        max_stages: int,
        rate_share: float,
        backup: BackupSettings = NO_BACKUP,
        write: Callable[[bytes], object] | None = None,
    ) -> None:
        """`block_bytes`: of a model's KV block. `backup`: which requests have copies of their KV elsewhere. `write`: where
        what is decided is recorded; None: nowhere."""
        self.address = intake.instance_id
        self.intake = intake
        self.num_transfers = 0
        """Under way, in or out."""
        self.num_out = 0
        """Migrations out among these."""
        self.num_bytes = 0
        """Sent."""
        self.num_held_blocks = 0
        """Blocks of requests that moved away which were not sent, since destinations had them."""
        self.is_dead = False
        self.handoffs_s: list[float] = []
        """What requests waited that were handed over to here: from the end of their prompts to that of their first step."""
        self.on_over: Callable[[MigrationOutcome, GenerationRequest, Detached | None], None] = lambda *_: None
        self.on_adopted: Callable[[Commit, int], None] = lambda *_: None
        self.on_blocks: Callable[[VirtualMigrations, commands.SendBlocks, list[int]], None] = lambda *_: None
        """Called with a source's `SendBlocks`, whose contents now lie in these blocks."""
        self.on_backup: Callable[[VirtualMigrations, commands.SendBackup, list[int]], None] = lambda *_: None
        """Called likewise with a `SendBackup`, and blocks of host memory."""
        self.num_backed_up = 0
        """Blocks that have got copies elsewhere."""
        self._network, self._events, self._engine = network, network.events, engine
        self._bandwidth_bytes_s, self._rate_share = bandwidth_bytes_s, rate_share
        self._block_bytes = block_bytes
        configuration = Configuration(
            instance_id=self.address, address=self.address, max_migrations=max_migrations, max_stages=max_stages,
            rate_share=rate_share, backup_classes=backup.classes, backup_min_tokens=backup.min_tokens,
            fetches=True,
        )  # fmt: skip
        around = Surroundings(engine=engine, transport=self, intake=intake, peers=peers, new_id=new_id)
        self.core = configuration.build(around) if write is None else recorded(configuration, around, write)
        self._out: dict[str, list[_Transfer]] = {}
        self._expected: dict[tuple[str, int], list[int]] = {}
        self._coming: dict[tuple[str, int], _Transfer] = {}
        self._rooms: dict[tuple[str, int], list[Callable[[Answer], None]]] = {}
        self._verdicts: dict[str, list[Callable[[Answer], None]]] = {}
        self._backups: dict[str, list[Callable[[BackupRooms | ErrorInfo], None]]] = {}
        """Who waits for an answer to BackUp, by its id."""
        self._expected_backups: dict[str, list[int]] = {}
        self._prefixes: dict[str, list[Callable[[PrefixSent | ErrorInfo], None]]] = {}
        """Who waits for an answer to FetchPrefix, by its id."""
        self.fetched = Counter[str]()
        """How fetches of prefixes into here ended."""
        self._fetching: dict[str, Callable[[], None]] = {}
        """By request that waits for its prefix: what is to be done then."""
        self._timer = Timer(self._events, lambda: self.tell(calls.OnTime()))

    # ------------------------------------------------------------------------------------------------ as `KvEnd`

    def block_bytes(self, pool: str, /) -> int | None:
        where, _, model = pool.partition("/")
        has_host = self._engine.ask(lambda engine: engine.memory.host.pool is not None)
        return self._block_bytes(model) if where == "device" or has_host else None

    def bandwidth_bytes_s(self, _address: str, /) -> float | None:
        return self._bandwidth_bytes_s

    # ------------------------------------------------------------------------------------------ from the instance

    def tell(self, *told: Call[object]) -> None:
        """Something for the core."""
        if not self.is_dead:
            for call in told:
                self.core.apply(call, self._events.now)
            self.act()

    def on_effects(self, effects: list[Effect]) -> None:
        """Takes effects of the engine; acts on them after what else happens at this moment."""
        if any(isinstance(effect, Detached | Ended | PromptChunk) for effect in effects):
            self._events.after(0.0, self.tell, *calls_of(effects))

    def on_step(self, stats: StepStats) -> None:
        self.core.apply(calls.OnStep(stats), self._events.now)
        if self.core.backups.is_on and not self.is_dead:
            self.act()

    # ------------------------------------------------------------------------------------------ time, commands

    def act(self) -> None:
        while due := self.core.take_commands(self._events.now):
            for command in due:
                self._carry_out(command)
        self._timer.set(self.core.next_wakeup())

    def _carry_out(self, command: Command) -> None:
        migration_id, core, after = command.migration_id, self.core, self._events.after
        match command:
            case commands.BeginOut():
                self._out[migration_id] = []
            case commands.Ask():
                self._ask(command)
            case commands.Tell(_, destination_id, message):
                self._network.send(type(message), lambda: self._deliver(destination_id, message))
            case commands.Connect(_, stage):
                assert stage.reserved is not None
                is_there = self._network.reach(stage.reserved.address) is not None
                after(0.0, self.tell, calls.OnConnected(migration_id, stage.number, is_there))
            case commands.SendBlocks():
                self._send(command)
            case commands.CancelTransfers():
                self._cancel(migration_id)
            case commands.OutOver(_, outcome, request, taken):
                self.on_over(outcome, request, taken)
            case commands.NotHandedOver(_, outcome, request):
                self.on_over(outcome, request, None)
            case commands.WindUp(_, grace_s, outcome, num_held=num_held):
                self.num_held_blocks += num_held if outcome == MOVED else 0
                if grace_s and any(not transfer.is_over for transfer in self._out[migration_id]):
                    after(grace_s, self._end_out, migration_id)
                else:
                    self._end_out(migration_id)
            case commands.ClaimBlocks(_, number):
                after(0.0, self.tell, calls.OnClaimed(migration_id, number, ""))
            case commands.ExpectBlocks(_, number, _, blocks, deadline_s):
                self._expected[migration_id, number] = blocks
                after(deadline_s, self.on_stage, migration_id, number, "too late")
                core.apply(calls.OnExpected(migration_id, number, self.address, TICKET, ""), self._events.now)
            case commands.AnswerRoom(_, number, room):
                if isinstance(room, Reserved):
                    room = with_busy(room, self._engine, self._events.now)
                for answer in self._rooms.pop((migration_id, number), ()):
                    answer(room)
            case commands.AnswerCommit(_, verdict):
                for answer in self._verdicts.pop(migration_id, ()):
                    answer(verdict)
            case commands.StopWriting():
                for key in [key for key in self._expected if key[0] == migration_id]:
                    del self._expected[key]
                    if (coming := self._coming.pop(key, None)) is not None:
                        after(0.0, coming.source._fail, coming)
                after(0.0, self.tell, calls.OnQuiet(migration_id))
            case commands.Adopted(_, commit, num_output):
                self.on_adopted(commit, num_output)
            case commands.Fault(_, error):
                raise error
            case commands.Paused(_, _, handoff_s):
                if handoff_s is not None:
                    self.handoffs_s.append(handoff_s)
            case commands.AskBackup():
                self._ask_backup(command)
            case commands.SendBackup():
                self._send_backup(command)
            case commands.AnswerBackup(_, answer):
                for hear in self._backups.pop(migration_id, ()):
                    hear(answer)
            case commands.ExpectBackup(_, _, blocks, deadline_s):
                self._expected_backups[migration_id] = blocks
                after(deadline_s, self.on_backup_in, migration_id, "too late")
                core.apply(calls.OnBackupExpected(migration_id, self.address, TICKET, ""), self._events.now)
            case commands.BackupOver(_, _, num_blocks):
                self.num_backed_up += num_blocks
            case commands.BackedUp():
                pass
            case commands.AskPrefix():
                self._ask_prefix(command)
            case commands.AnswerPrefix(_, sent):
                for hear_of in self._prefixes.pop(migration_id, ()):
                    hear_of(sent)
            case commands.Fetched(_, request_id, outcome):
                self.fetched[outcome] += 1
                self._go_on(request_id)
            case commands.BeginIn() | commands.EndIn() | commands.RefusedIn() | commands.BeginTransfer():
                pass

    # ---------------------------------------------------------------------------------------------- messages

    def _ask(self, command: commands.Ask) -> None:
        message = command.message
        is_answered = False

        def answered(reply: Reply) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                self.tell(calls.answered(command, reply))

        def arrive() -> None:
            peer = self._network.reach(command.destination_id)
            if peer is not None:
                peer.hear(message, lambda reply: self._network.send(type(reply), lambda: answered(reply)))
            elif isinstance(message, PreAllocate):
                answered(ErrorInfo(ErrorCode.UNAVAILABLE, "nobody is there"))
            else:
                answered(None)

        is_room = isinstance(message, PreAllocate)
        late = ErrorInfo(ErrorCode.DEADLINE, "no answer") if is_room else None
        self._network.send(type(message), arrive)
        self._events.after(command.timeout_s, answered, late)

    def hear(self, message: PreAllocate | Commit | OwnsQuery, answer: Callable[[Answer], None]) -> None:
        """A message with a reply."""
        if isinstance(message, PreAllocate):
            self._rooms.setdefault((message.migration_id, message.stage), []).append(answer)
            self.tell(calls.OnPreAllocate(message))
        elif isinstance(message, Commit):
            self._verdicts.setdefault(message.migration_id, []).append(answer)
            self.tell(calls.OnCommit(message))
        else:
            answer(self.core.apply(calls.OnOwns(message), self._events.now))
            self.act()

    def _deliver(self, destination_id: str, message: AbortMigration | Cancel | KeepBackups) -> None:
        if (peer := self._network.reach(destination_id)) is None:
            return
        if isinstance(message, KeepBackups):
            peer.tell(calls.OnKeepBackups(message))
            return
        if isinstance(message, AbortMigration):
            peer.tell(calls.OnAbort(message))
            return
        epoch = peer._engine.ask(lambda engine: engine.held_epoch(message.request_id))
        if epoch is not None and (message.epoch is None or epoch <= message.epoch):
            peer._engine.apply(engine_calls.Cancel(message.request_id))

    def _ask_backup(self, command: commands.AskBackup) -> None:
        message = command.message
        is_answered = False

        def answered(reply: BackupRooms | ErrorInfo | None) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                error = reply if isinstance(reply, ErrorInfo) else None
                rooms = reply if isinstance(reply, BackupRooms) else None
                self.tell(calls.OnBackupRooms(message.backup_id, rooms, error))

        def arrive() -> None:
            if (peer := self._network.reach(command.destination_id)) is not None:
                answer = partial(self._network.send, BackupRooms)
                peer._backups.setdefault(message.backup_id, []).append(lambda reply: answer(lambda: answered(reply)))
                peer.tell(calls.OnBackUp(message))
            else:
                answered(ErrorInfo(ErrorCode.UNAVAILABLE, "nobody is there"))

        self._network.send(BackUp, arrive)
        self._events.after(command.timeout_s, answered, None)

    def fetch(self, request: GenerationRequest, block_size: int, then: Callable[[], None]) -> None:
        """Fetches what the request names of its prompt. `then` follows when it is there, cannot be had or is late."""
        self._fetching[request.request_id] = then
        self._events.after(WAIT_S, self._go_on, request.request_id)
        self.tell(calls.Fetch(request, block_size))

    def _go_on(self, request_id: str) -> None:
        if (then := self._fetching.pop(request_id, None)) is not None and not self.is_dead:
            then()

    def _ask_prefix(self, command: commands.AskPrefix) -> None:
        message = command.message
        is_answered = False

        def answered(reply: PrefixSent | ErrorInfo | None) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                error = reply if isinstance(reply, ErrorInfo) else None
                sent = reply if isinstance(reply, PrefixSent) else None
                self.tell(calls.OnFetchAnswer(message.fetch_id, sent, error))

        def arrive() -> None:
            if (peer := self._network.reach(command.destination_id)) is not None:
                answer = partial(self._network.send, PrefixSent)
                peer._prefixes.setdefault(message.fetch_id, []).append(lambda reply: answer(lambda: answered(reply)))
                peer.tell(calls.OnFetchPrefix(message))
            else:
                answered(ErrorInfo(ErrorCode.UNAVAILABLE, "nobody is there"))

        self._network.send(FetchPrefix, arrive)
        self._events.after(command.timeout_s, answered, None)

    # ------------------------------------------------------------------------------------------------ blocks

    def _send_backup(self, command: commands.SendBackup) -> None:
        backup_id = command.migration_id
        num_bytes = len(command.blocks) * self._block_bytes(command.pool.partition("/")[2])
        rate_share = 1.0 if command.is_urgent else self._rate_share
        seconds = copy_s(num_bytes, self._bandwidth_bytes_s, rate_share) * (self.num_out + 1)
        is_over = False

        def end(is_sent: bool) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                self.tell(calls.OnBackupSent(backup_id, is_sent))

        def arrive() -> None:
            peer = self._network.reach(command.address)
            blocks = None if peer is None else peer._expected_backups.get(backup_id)
            if is_over or peer is None or blocks is None or self.is_dead:
                end(False)
                return
            self.num_bytes += num_bytes
            peer.on_backup(self, command, blocks)
            peer.on_backup_in(backup_id, "")
            end(True)

        for delay_s in self._network.fate(commands.SendBackup)[:1]:
            self._events.after(seconds + delay_s - CONTROL_S, arrive)
        self._events.after(command.timeout_s, end, False)

    def on_backup_in(self, backup_id: str, failure: str) -> None:
        """The blocks of a backup are here, or will not come."""
        if self._expected_backups.pop(backup_id, None) is not None:
            self.tell(calls.OnBackupIn(backup_id, failure))

    def _send(self, command: commands.SendBlocks) -> None:
        stage = command.stage
        assert stage.reserved is not None
        peer = self._network.reach(stage.reserved.address)
        key = command.migration_id, stage.number
        if peer is None or key not in peer._expected:
            self._network.send(commands.SendBlocks, lambda: self.tell(calls.OnSent(command.migration_id, False)))
            return
        num_bytes = len(command.blocks) * self._block_bytes(command.pool.partition("/")[2])
        self.num_bytes += num_bytes
        seconds = copy_s(num_bytes, self._bandwidth_bytes_s, 1.0 if stage.is_urgent else self._rate_share)
        seconds *= self.num_out + 1
        transfer = peer._coming[key] = _Transfer(self, peer, command)
        self._out[command.migration_id].append(transfer)
        for delay_s in self._network.fate(commands.SendBlocks)[:1]:
            self._events.after(seconds + delay_s - CONTROL_S, self._arrive, transfer)
        self._events.after(command.timeout_s, self._fail, transfer)

    def _arrive(self, transfer: _Transfer) -> None:
        peer, command = transfer.destination, transfer.command
        key = command.migration_id, command.stage.number
        blocks = peer._expected.get(key)
        if self.is_dead or peer.is_dead or blocks is None:
            self._fail(transfer)
        elif transfer.end():
            peer.on_blocks(self, command, blocks)
            peer.on_stage(*key, "")
            self.tell(calls.OnSent(command.migration_id, True))

    def _fail(self, transfer: _Transfer) -> None:
        """Both ends notice."""
        if transfer.end():
            command = transfer.command
            transfer.destination.on_stage(command.migration_id, command.stage.number, "they were stopped")
            self.tell(calls.OnSent(command.migration_id, False))

    def on_stage(self, migration_id: str, stage: int, failure: str) -> None:
        """Its blocks are here, or will not come."""
        if self._expected.pop((migration_id, stage), None) is not None:
            coming = self._coming.pop((migration_id, stage), None)
            self.tell(calls.OnStage(migration_id, stage, failure))
            if coming is not None:
                coming.source._fail(coming)

    def _cancel(self, migration_id: str) -> None:
        for transfer in self._out[migration_id]:
            if transfer.end():
                key = migration_id, transfer.command.stage.number
                self._network.send(
                    commands.CancelTransfers, partial(transfer.destination.on_stage, *key, "they were cancelled")
                )

    def _end_out(self, migration_id: str) -> None:
        self._cancel(migration_id)
        del self._out[migration_id]
        self._events.after(0.0, self.tell, calls.OnRest(migration_id))


class _Registry(Mapping[str, InstanceInfo]):
    """Registry of a fleet; entries are made when they are looked at."""

    def __init__(self, fleet: Fleet) -> None:
        self._instances = fleet.instances

    def __getitem__(self, instance_id: str) -> InstanceInfo:
        return self._instances[instance_id].info()

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._instances

    def __iter__(self) -> Iterator[str]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)


class FleetMigrations:
    """Those of a fleet: `Fleet(..., migrations=FleetMigrations)`."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_migrations: int = 1,
        max_stages: int = 8,
        backup: BackupSettings = NO_BACKUP,
        fetches: bool = False,
    ) -> None:
        """Limits as in `InstanceSettings`. `fetches`: prefixes travel."""
        self._backup = backup
        self._fetches = fetches
        self.outcomes: dict[str, int] = {}
        """How migrations ended: "moved", "moved waiting" or an `AbortReason` -> how many."""
        self._fleet = fleet
        self._max_migrations, self._max_stages = max_migrations, max_stages
        self._registry = _Registry(fleet)
        self._network = Network(fleet.events)
        self._network.reach = self._reach
        self._hosts: dict[str, VirtualMigrations] = {}
        self._ids = count()
        self._num_bytes = self._num_held_blocks = 0

    @property
    def num_bytes(self) -> int:
        """Sent, by all."""
        return self._num_bytes + sum(host.num_bytes for host in self._hosts.values())

    @property
    def num_held_blocks(self) -> int:
        """`VirtualMigrations.num_held_blocks`, of all."""
        return self._num_held_blocks + sum(host.num_held_blocks for host in self._hosts.values())

    @property
    def fetched(self) -> Counter[str]:
        """How fetches of prefixes ended, of all."""
        return sum((host.fetched for host in self._hosts.values()), Counter[str]())

    def tell_fetch_cost(self, instance: Instance, model: str) -> None:
        """The instance serves the model from now on."""
        if self._fetches and instance.engine.memory.host.pool is not None:
            shape, device = instance.models[model].shape, instance.device
            token_s = device.merged_bytes / shape.tokens_per_merged / device.bandwidth_bytes_s
            instance.host.apply(engine_calls.SetFetchCost(model, token_s))

    def add(self, instance: Instance, /) -> VirtualMigrations:
        before = self._hosts.get(instance.instance_id)
        if before is not None:
            self._num_bytes += before.num_bytes
            self._num_held_blocks += before.num_held_blocks
        host = self._hosts[instance.instance_id] = self._host(instance)
        return host

    def _reach(self, instance_id: str) -> VirtualMigrations | None:
        instance = self._fleet.reach(instance_id)
        if instance is None:
            return None
        host = self._hosts[instance_id]
        host.intake.is_draining = instance.state == "draining"
        host.intake.models = set() if instance.state == "starting" else instance.ready_models
        return host

    def _host(self, instance: Instance) -> VirtualMigrations:
        device = instance.device
        host = VirtualMigrations(
            self._network,
            instance.host,
            Intake(instance.instance_id),
            lambda: self._registry,
            lambda: str(next(self._ids)),
            lambda model: device.merged_bytes // instance.models[model].shape.blocks_per_merged,
            device.bandwidth_bytes_s,
            max_migrations=self._max_migrations,
            max_stages=self._max_stages,
            rate_share=device.rate_share,
            backup=self._backup,
        )

        def on_over(outcome: MigrationOutcome, request: GenerationRequest, taken: Detached | None) -> None:
            gateway, how = self._fleet.gateway, outcome.reason
            if outcome.is_migrated:
                is_waiting = taken is None or not taken.progress.num_computed
                how = "moved waiting" if is_waiting else "moved"
                gateway.on_moved(request.request_id)
            elif outcome.epoch != request.epoch:
                entry = TokenEntry(request_id=request.request_id, epoch=outcome.epoch, offset=0, tokens=b"")
                gateway.on_entries([entry], instance.instance_id)
            self.outcomes[how] = self.outcomes.get(how, 0) + 1
            instance.report_migration(outcome)

        def on_adopted(commit: Commit, num_output: int) -> None:
            request = commit.request
            entry = TokenEntry(request_id=request.request_id, epoch=request.epoch, offset=num_output, tokens=b"")
            self._fleet.gateway.on_entries([entry], instance.instance_id)
            instance.report_migrated_in(held_after(commit))

        host.on_over, host.on_adopted = on_over, on_adopted
        return host

    # ------------------------------------------------------------------------------------------ from the fleet

    def on_rebalance(self, instance_id: str, rebalance: Rebalance) -> None:
        if (host := self._reach(instance_id)) is not None:
            host.tell(calls.OnRebalance(rebalance))

    def end_drain(self, instance_id: str) -> None:
        if (host := self._reach(instance_id)) is not None:
            host.tell(calls.EndDrain())

    def give_away(self, instance_id: str, model: str) -> None:
        """The model is being unloaded there; again and again, until `stop_giving`."""
        if (host := self._reach(instance_id)) is not None:
            host.tell(calls.GiveAway(model))

    def stop_giving(self, instance_id: str, model: str) -> None:
        if (host := self._reach(instance_id)) is not None:
            host.core.apply(calls.StopGiving(model), self._fleet.events.now)

    def on_instance(self, instance_id: str, info: InstanceInfo | None) -> None:
        """Its entry in the registry is another, or gone."""
        for host in list(self._hosts.values()):
            host.tell(calls.OnInstance(instance_id, info))
