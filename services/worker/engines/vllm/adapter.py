"""The adapter's process, in vLLM's environment: `python -m services.worker.engines.vllm.adapter SPEC`.

Makes vLLM's engine core, in a process of its own, and stands between its client and the socket to Tideway's instance.
It ends when the socket does.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from services.worker.engines.frames import READ_LIMIT_BYTES, FrameReader, FrameWriter
from services.worker.engines.hosted import SOCKET
from services.worker.engines.vllm.api_points import CLIENT, IMAGES, KNOWN_VERSIONS, SCHEDULER, missing
from services.worker.engines.vllm.images import Pictures, why_no_torchvision
from services.worker.engines.vllm.interrupting import ArrivalNumber
from services.worker.engines.vllm.spec import HostedSpec
from services.worker.engines.vllm.translate import core_request, lora_request, progress_of
from shared.engines.capabilities import Capability
from shared.engines.messages import (
    OFFLINE_PRIORITY,
    Abort,
    ClearCache,
    Command,
    EngineFacts,
    Export,
    Exported,
    Failed,
    Generate,
    Imported,
    Progress,
    Ready,
    Step,
    TakenOut,
    TakeOut,
)
from shared.messages.requests import Adapter as LoraAdapter
from shared.messages.requests import ErrorCode, ErrorInfo, FinishReason, Pooled, SamplingParams, pack_tokens
from shared.models.pooling import CLASSIFIER, Pooling

PACKAGE = "services.worker.engines.vllm.scheduler"
SCHEDULERS = (f"{PACKAGE}.HarvestingScheduler", f"{PACKAGE}.HarvestingAsyncScheduler")
STATS = "tideway"
ALWAYS_LACKS = (
    Capability.SEVERAL_MODELS,
    Capability.SEED_RESUME,
    Capability.PENALTY_RESUME,
)
STOCK_LACKS = (Capability.PREEMPTS, Capability.BUDGETS, Capability.GRAMMAR_RESUME)
WORKER_EXTENSION = "services.worker.engines.vllm.extensions.Worker"
POOLING_TYPES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
STAGING_SHARE = 0.125
"""Size of the staging memory, as a share of the KV pool."""
MIN_SLOTS, MAX_STAGING_BYTES = 16, 1 << 30


WORKERS_ERROR = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
"""vLLM's words around what an operator wants to read."""
WARM_UP_PROMPT, WARM_UP_TOKENS = 24, 3


class NotHostable(Exception):
    """This vLLM, or this model with it, cannot be hosted; the message is for the operator."""


def make_config(spec: HostedSpec) -> tuple[Any, tuple[str, ...], list[str]]:
    """vLLM's configuration, what the engine lacks, and notes for the log. Raises `NotHostable`."""
    from importlib.metadata import version

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if lost := missing(CLIENT):
        raise NotHostable(f"vLLM {version('vllm')} cannot be hosted: {'; '.join(lost)}")
    notes = []
    is_stock = spec.scheduler == "stock"
    if not is_stock and not version("vllm").startswith(KNOWN_VERSIONS):
        is_stock = True
        notes.append(f"vLLM {version('vllm')} was not tried: its stock scheduler runs")
    elif not is_stock and (lost := missing(SCHEDULER)):
        is_stock = True
        notes.append(f"vLLM's stock scheduler runs: {'; '.join(lost)}")
    arguments = ["--model", spec.source, *_defaults(spec), *spec.engine_args]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    try:
        args = AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))
    except SystemExit:
        raise NotHostable(f"vLLM does not take these arguments: {' '.join(arguments)}") from None
    args.disable_log_stats = False
    args.additional_config = {**(args.additional_config or {}), STATS: {"ttft_s": spec.ttft_s, "tpot_s": spec.tpot_s}}
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if not is_stock:
        config.scheduler_config.scheduler_cls = SCHEDULERS[bool(config.scheduler_config.async_scheduling)]
        if not config.parallel_config.worker_extension_cls:
            config.parallel_config.worker_extension_cls = WORKER_EXTENSION
    lacks = [*ALWAYS_LACKS, *(STOCK_LACKS if is_stock else ())]
    if config.lora_config is None:
        lacks.append(Capability.ADAPTERS)
        notes.append("requests with LoRA adapters are refused: --enable-lora is not among the engine's arguments")
    elif config.parallel_config.worker_extension_cls != WORKER_EXTENSION and config.device_config.device_type == "cpu":
        lacks += [Capability.ADAPTERS, Capability.PROMPT_LOGPROBS]
        notes.append("requests with LoRA adapters are refused: on a CPU, this vLLM computes others beside them wrongly")
    else:
        # With adapters, vLLM 0.32 fails in a step that scores a prompt's tokens.
        lacks.append(Capability.PROMPT_LOGPROBS)
    if not config.model_config.is_multimodal_model or spec.pooling is not None:
        lacks.append(Capability.IMAGES)
    elif lost := missing(IMAGES):
        lacks.append(Capability.IMAGES)
        notes.append(f"requests with images are refused: {'; '.join(lost)}")
    lacks += [Capability.PROMPT_LOGPROBS, Capability.GRAMMARS] if spec.pooling is not None else [Capability.POOLING]
    return config, tuple(dict.fromkeys(lacks)), notes


def _defaults(spec: HostedSpec) -> list[str]:
    """What the operator's own arguments, which come later, may say otherwise."""
    found = ["--dtype", spec.dtype, "--scheduling-policy", "priority"]
    if spec.max_model_len is not None:
        found += ["--max-model-len", str(spec.max_model_len)]
    if spec.quantization:
        found += ["--quantization", spec.quantization]
    given = {one.split("=")[0].replace("_", "-") for one in spec.engine_args}
    if spec.pool_bytes and not given & {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}:
        found += ["--kv-cache-memory-bytes", str(spec.pool_bytes)]
    if spec.pooling is not None and not given & {"--runner", "--pooler-config"}:
        pooler = {"pooling_type": POOLING_TYPES[spec.pooling.mode], "use_activation": spec.pooling.is_normalized}
        found += ["--runner", "pooling", "--pooler-config", json.dumps(pooler)]
        if spec.pooling.token_ids and "--hf-overrides" not in given:
            found += ["--hf-overrides", json.dumps(_classifier_of_tokens(spec.source, spec.pooling.token_ids))]
    if "--structured-outputs-config" not in given:
        found += ["--structured-outputs-config", '{"backend": "guidance"}']
    if "--mm-processor-cache-gb" not in given:
        # vLLM sends an image once, and then its hash alone: also where the first request with it was refused.
        found += ["--mm-processor-cache-gb", "0"]
    return found


def _classifier_of_tokens(source: str, token_ids: Sequence[int]) -> dict[str, Any]:
    """What has vLLM make a classifier with one score of a language model that scores pairs by these tokens' logits."""
    from transformers import AutoConfig, AutoTokenizer

    architectures = AutoConfig.from_pretrained(source).architectures or []
    if len(architectures) != 1:
        told = ", ".join(architectures) or "none"
        raise NotHostable(
            f"{source}: config.json names {told} as architectures; a model that scores pairs has exactly one"
        )
    names = AutoTokenizer.from_pretrained(source).convert_ids_to_tokens(list(reversed(token_ids)))
    return {
        "architectures": [f"{architectures[0].removesuffix('ForCausalLM')}{CLASSIFIER}"],
        "classifier_from_token": names,
        "method": "from_2_way_softmax" if len(names) == 2 else "no_post_processing",
        "num_labels": 1,
    }


class Adapter:
    def __init__(
        self,
        client: Any,
        max_model_len: int,
        reader: FrameReader[Command],
        writer: FrameWriter,
        arrivals: ArrivalNumber | None = None,
        *,
        pooling: Pooling | None = None,
        pictures: Pictures | None = None,
        max_adapters: int = 0,
    ) -> None:
        """`arrivals`: interrupts steps of offline work; None: they are not interrupted. `pooling`: of the model, where it
        generates no text. `pictures`: for prompts with images. `max_adapters`: those that the engine keeps."""
        self._client = client
        self._arrivals = arrivals
        self._pooling = pooling
        self._pictures = pictures
        self._num_prompt: dict[str, int] = {}
        """By key: tokens of a prompt with images, until they were told."""
        self._max_adapters = max_adapters
        self._adapters: OrderedDict[LoraAdapter, None] = OrderedDict()
        """Adapters that the engine has loaded, the last used one last."""
        self._num_online = 0
        """Online requests that were sent."""
        self._max_model_len = max_model_len
        self._reader = reader
        self._writer = writer
        self._num_top: dict[str, int] = {}
        """By key: alternatives that its log-probabilities have; below 0: it has none."""
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the socket ends, or the engine."""
        tasks = [asyncio.create_task(self._obey()), asyncio.create_task(self._tell())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for task in done:
            task.result()

    async def _obey(self) -> None:
        while (command := await self._reader.read()) is not None:
            if isinstance(command, Generate):
                await self._begin(command)
            elif isinstance(command, Abort):
                for key in command.keys:
                    self._num_top.pop(key, None)
                    self._num_prompt.pop(key, None)
                await self._client.abort_requests_async(list(command.keys))
            elif isinstance(command, ClearCache):
                await self._client.reset_prefix_cache_async()
            elif isinstance(command, Export):
                await self._call(command, "tideway_export", command.key, command.first_block, list(command.slots))
            elif isinstance(command, TakeOut):
                await self._call(command, "tideway_take_out", command.key, command.first_block, list(command.slots))

    async def _begin(self, message: Generate) -> None:
        is_online = message.priority < OFFLINE_PRIORITY
        self._num_online += is_online
        try:
            if message.adapter is not None:
                await self._load(message.adapter)
            number = self._num_online if is_online else 0
            pictured = None
            if message.images and self._pictures is not None:
                pictured = await asyncio.to_thread(self._pictures.in_prompt, message)
            request = core_request(message, self._max_model_len, number, self._pooling, pictured)
        except ValueError as error:
            param = "messages" if message.images else ""
            refused = ErrorInfo(ErrorCode.BAD_REQUEST, f"vLLM does not take the request: {error}", param)
            ended = Progress(key=message.key, finish_reason=FinishReason.ERROR, error=refused)
            self._writer.write(Step(progress=[ended]))
            if message.slots:
                self._writer.write(Imported(message.key))
            return
        self._num_top[message.key] = message.sampling.logprobs
        if pictured is not None:
            self._num_prompt[message.key] = len(pictured.tokens)
        await self._client.add_request_async(request)
        if is_online and self._arrivals is not None:
            self._arrivals.set(self._num_online)
        if message.slots:
            await self._call(message, "tideway_wait")

    async def _load(self, adapter: LoraAdapter) -> None:
        """Has the engine load an adapter before a request needs it: where a step fails to, the engine ends. Raises
        `ValueError`."""
        if adapter not in self._adapters:
            try:
                await self._client.add_lora_async(lora_request(adapter))
            except Exception as error:  # whatever vLLM makes of an error in its process
                told = WORKERS_ERROR.search(str(error))
                why = told[1] if told else str(error)
                raise ValueError(f"the adapter {adapter.name!r} cannot be loaded: {why}") from None
            self._adapters[adapter] = None
            if len(self._adapters) > self._max_adapters:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(adapter)

    async def _call(self, command: Generate | Export | TakeOut, method: str, *arguments: Any) -> None:
        """Has the engine carry something out between two steps. Returns when it was sent, before it was answered."""
        answering = asyncio.create_task(self._answer(command, method, arguments))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        await asyncio.sleep(0)

    async def _answer(self, command: Generate | Export | TakeOut, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            found = await self._client.call_utility_async(method, *arguments)
        except Exception as error:  # whatever vLLM makes of an error in its process
            print(f"{method} of {command.key}: {error}", file=sys.stderr, flush=True)
            found = (-1, -1) if isinstance(command, TakeOut) else False
            if isinstance(command, TakeOut):
                await self._client.abort_requests_async([command.key])
        while not self._client.outputs_queue.empty():  # what was made before goes first
            await asyncio.sleep(0)
        if isinstance(command, Export):
            self._writer.write(Exported(command.slots, bool(found)))
        elif isinstance(command, TakeOut):
            self._num_top.pop(command.key, None)
            self._writer.write(TakenOut(command.key, *map(int, found)))
        else:
            self._writer.write(Imported(command.key))

    async def _tell(self) -> None:
        while True:
            outputs = await self._client.get_output_async()
            progress = []
            for output in outputs.outputs:
                num_top = self._num_top.get(output.request_id)
                if num_top is None:
                    continue
                made = progress_of(output, num_top, self._pooling)
                if num_prompt := self._num_prompt.pop(output.request_id, 0):
                    made = msgspec.structs.replace(made, num_prompt=num_prompt)
                progress.append(made)
                if output.finish_reason is not None:
                    del self._num_top[output.request_id]
            stats = outputs.scheduler_stats
            if not progress and stats is None:
                continue
            told = _step_told(stats)
            *shape, seconds = told or [0.0]
            self._writer.write(
                Step(
                    progress=progress,
                    used_share=0.0 if stats is None else stats.kv_cache_usage,
                    shape=tuple(shape) if shape else None,
                    seconds=seconds,
                    is_interrupted=told == [],
                )
            )
            await self._writer.drain()


def _step_told(stats: Any) -> list[Any] | None:
    """A step's shape and seconds, as the scheduler tells them, empty if it was interrupted; None: it tells nothing."""
    told = stats.kv_connector_stats if stats is not None else None
    return list(told[STATS]) if told and STATS in told else None


async def main(spec: HostedSpec) -> None:
    ours = socket.socket(fileno=int(os.environ[SOCKET]))
    stream, stream_writer = await asyncio.open_connection(sock=ours, limit=READ_LIMIT_BYTES)
    reader: FrameReader[Command] = FrameReader(stream, Command)  # type: ignore[arg-type]  # a union
    writer = FrameWriter(stream_writer)
    try:
        client, facts, pictures = await _start(spec)
    except Exception as error:  # whatever vLLM raises is the operator's to read
        writer.write(Failed(f"{type(error).__name__}: {error}"[:2000], is_final=isinstance(error, NotHostable)))
        await writer.drain()
        raise
    try:
        facts = await _open_staging(client, facts, spec)
        facts, arrivals = await _watch(client, facts, spec)
        await _warm_up(client, facts, spec.pooling)
        writer.write(Ready(facts))
        adapter = Adapter(
            client, facts.max_model_len, reader, writer, arrivals, pooling=spec.pooling, pictures=pictures,
            max_adapters=facts.max_adapters,
        )  # fmt: skip
        await adapter.run()
    except Exception as error:
        writer.write(Failed(f"{type(error).__name__}: {error}"[:2000]))
        await writer.drain()
        print(f"the engine failed: {error!r}", file=sys.stderr, flush=True)
    finally:
        client.shutdown()


async def _open_staging(client: Any, facts: EngineFacts, spec: HostedSpec) -> EngineFacts:
    """Returns the facts with the staging memory, or with `KV_MOVES` among what the engine lacks, and why."""
    why = "" if spec.moves else "the settings say so"
    if spec.pooling is not None:
        why = "they end with their prompts"
    if Capability.GRAMMAR_RESUME in facts.lacks:
        why = "the stock scheduler runs"
    if not why:
        num_slots = max(MIN_SLOTS, int(STAGING_SHARE * facts.num_blocks))
        num_slots = max(1, min(num_slots, MAX_STAGING_BYTES // max(1, facts.block_bytes)))
        try:
            path, block_bytes, layout = await client.call_utility_async("tideway_open", num_slots)
        except Exception as error:  # whatever vLLM makes of an error in its process
            why = str(error)
        else:
            layout = f"vllm {facts.version} blocks of {facts.block_size}; {layout}"
            return msgspec.structs.replace(
                facts, staging=path, num_slots=num_slots, block_bytes=block_bytes, layout=layout
            )
    note = f"requests do not move with their KV: {why}"
    return msgspec.structs.replace(facts, lacks=(*facts.lacks, Capability.KV_MOVES), notes=(*facts.notes, note))


async def _watch(client: Any, facts: EngineFacts, spec: HostedSpec) -> tuple[EngineFacts, ArrivalNumber | None]:
    """Makes steps interruptible; else the facts have `INTERRUPTS` among what the engine lacks, and why."""
    why = "the settings say so" if not spec.interrupts else "the stock scheduler runs"
    if spec.interrupts and Capability.PREEMPTS not in facts.lacks:
        try:
            return facts, ArrivalNumber.at(await client.call_utility_async("tideway_watch"))
        except Exception as error:  # whatever vLLM makes of an error in its process
            why = str(error)
    note = f"steps are not interrupted: {why}"
    return msgspec.structs.replace(facts, lacks=(*facts.lacks, Capability.INTERRUPTS), notes=(*facts.notes, note)), None


async def _warm_up(client: Any, facts: EngineFacts, pooling: Pooling | None) -> None:
    """Computes a prompt and a token: vLLM compiles kernels in its first steps, which may take a minute."""
    pooled = None if pooling is None else Pooled()
    sampling = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, pooled=pooled)
    prompt = pack_tokens([0] * min(WARM_UP_PROMPT, facts.max_model_len - WARM_UP_TOKENS))
    request = Generate(key="warm-up", prompt=prompt, sampling=sampling, priority=0)
    await client.add_request_async(core_request(request, facts.max_model_len, pooling=pooling))
    while not any(output.finish_reason is not None for output in (await client.get_output_async()).outputs):
        pass


async def _start(spec: HostedSpec) -> tuple[Any, EngineFacts, Pictures | None]:
    from importlib.metadata import version

    config, lacks, notes = make_config(spec)
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    try:
        client = EngineCoreClient.make_async_mp_client(
            vllm_config=config, executor_class=Executor.get_class(config), log_stats=True
        )
    except Exception as error:
        if config.model_config.is_multimodal_model and (why := why_no_torchvision()):
            raise NotHostable(f"vLLM's models with images need torchvision, built for its torch: {why}") from error
        raise
    cache, scheduling = config.cache_config, config.scheduler_config
    # One is vLLM's own. An encoder keeps no KV: what is reported are its rows, each as long as a text may be.
    num_blocks = cache.num_gpu_blocks - 1
    num_blocks = num_blocks or scheduling.max_num_seqs * -(-config.model_config.max_model_len // cache.block_size)
    processes = getattr(client.resources.engine_manager, "processes", [])
    pictures = None if Capability.IMAGES in lacks else Pictures(config)
    facts = EngineFacts(
        version=version("vllm"),
        lacks=lacks,
        # A pooled prompt counts with the one token behind it, which is never computed.
        max_model_len=config.model_config.max_model_len + (spec.pooling is not None),
        block_size=cache.block_size,
        num_blocks=num_blocks,
        block_bytes=(cache.kv_cache_memory_bytes or spec.pool_bytes) // max(1, num_blocks),
        max_running=scheduling.max_num_seqs,
        max_step_tokens=scheduling.max_num_batched_tokens,
        pid=processes[0].pid if processes else 0,
        notes=tuple(notes),
        max_adapters=0 if config.lora_config is None else config.lora_config.max_cpu_loras,
    )
    return client, facts, pictures


if __name__ == "__main__":
    # Its life is the socket's: an instance that is told to end gives its requests away first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    hosted = msgspec.json.decode(sys.argv[1], type=HostedSpec)
    asyncio.run(main(hosted))
    os._exit(0)
