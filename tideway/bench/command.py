"""`tideway bench` as a person types it. What it needs is imported when it runs: the other subcommands do without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tideway.data_folder import OperatorError

ARRIVALS = (
    "poisson:RATE, gamma:RATE:CV, constant:RATE, onoff:ON_S:ON_RATE:OFF_S[:OFF_RATE[:CV]], closed:CONCURRENCY,"
    " trace:PATH; rates in requests per second"
)
LENGTHS = "N, uniform:MIN:MAX, lognormal:MEAN:CV[:MIN:MAX], zipf:ALPHA:MIN:MAX"
FAILED_EXIT_CODE = 1
ONLINE, OFFLINE, TRACES, SERVER, RESULT = "Online load", "Offline load", "Traces", "Server", "Result"


def bench(
    url: Annotated[
        str, typer.Option(rich_help_panel=SERVER, help="Any server that speaks OpenAI's API.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=SERVER, help="NAME or NAME=WEIGHT; repeatable. Default: the first the server names."
        ),
    ] = None,
    endpoint: Annotated[str, typer.Option(rich_help_panel=SERVER, help="completions or chat.")] = "completions",
    workload: Annotated[
        Path | None,
        typer.Option(help="TOML or JSON with streams of load, in place of the options below; see docs/benchmarks.md."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds after which nothing is sent. Default: the file's.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds that the last requests have after the last is sent.")] = 60.0,
    warmup: Annotated[float, typer.Option(help="Requests of the first seconds are not counted.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed and workload give the same requests. Default: the file's, or 0.")
    ] = None,
    arrivals: Annotated[str, typer.Option(rich_help_panel=ONLINE, help=ARRIVALS)] = "",
    num_requests: Annotated[
        int | None, typer.Option(rich_help_panel=ONLINE, min=1, help="At most so many online requests.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(rich_help_panel=ONLINE, help=LENGTHS + ". Default 256, or the trace's.")
    ] = "",
    output_tokens: Annotated[
        str, typer.Option(rich_help_panel=ONLINE, help=LENGTHS + ". Default 64, or the trace's.")
    ] = "",
    lengths_from: Annotated[
        str, typer.Option(rich_help_panel=ONLINE, help="Trace from which pairs of lengths are drawn.")
    ] = "",
    prefix_share: Annotated[
        float, typer.Option(rich_help_panel=ONLINE, min=0, max=1, help="Share of each prompt that all have alike.")
    ] = 0.0,
    max_total_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=ONLINE, min=2, help="Longer requests are scaled down to it.")
    ] = None,
    trace_start: Annotated[float, typer.Option(rich_help_panel=TRACES, help="Seconds into the trace.")] = 0.0,
    trace_length: Annotated[float | None, typer.Option(rich_help_panel=TRACES, help="Seconds of the trace.")] = None,
    trace_keep: Annotated[float, typer.Option(rich_help_panel=TRACES, help="Share of the trace's requests.")] = 1.0,
    time_scale: Annotated[
        float, typer.Option(rich_help_panel=TRACES, help="Seconds for one of the trace's; 0.5: twice as fast.")
    ] = 1.0,
    rate_scale: Annotated[float, typer.Option(rich_help_panel=TRACES, help="For a trace of rates.")] = 1.0,
    trace_series: Annotated[
        str, typer.Option(rich_help_panel=TRACES, help="Whose rates, in a trace of several models.")
    ] = "",
    prompt_scale: Annotated[float, typer.Option(rich_help_panel=TRACES, help="For lengths from a trace.")] = 1.0,
    output_scale: Annotated[float, typer.Option(rich_help_panel=TRACES, help="For lengths from a trace.")] = 1.0,
    offline_arrivals: Annotated[
        str, typer.Option(rich_help_panel=OFFLINE, help="Load that may wait beside it, as --arrivals.")
    ] = "",
    offline_prompt_tokens: Annotated[str, typer.Option(rich_help_panel=OFFLINE, help="As --prompt-tokens.")] = "",
    offline_output_tokens: Annotated[str, typer.Option(rich_help_panel=OFFLINE, help="As --output-tokens.")] = "",
    offline_lengths_from: Annotated[str, typer.Option(rich_help_panel=OFFLINE, help="As --lengths-from.")] = "",
    offline_requests: Annotated[
        int | None, typer.Option(rich_help_panel=OFFLINE, min=1, help="At most so many.")
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(rich_help_panel=ONLINE, help="Objective: time to the first token.")
    ] = None,
    tpot_ms: Annotated[
        float | None, typer.Option(rich_help_panel=ONLINE, help="Objective: time per token after it.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(rich_help_panel=SERVER, help="Send ignore_eos: answers have their planned length.")
    ] = False,
    flex: Annotated[
        bool, typer.Option(rich_help_panel=SERVER, help="Send service_tier flex with offline requests.")
    ] = True,
    send_objectives: Annotated[bool, typer.Option(rich_help_panel=SERVER, help="Send ttft_ms and tpot_ms.")] = False,
    extra_body: Annotated[
        str, typer.Option(rich_help_panel=SERVER, help="JSON object; its fields are sent with every request.")
    ] = "",
    vocabulary: Annotated[
        int, typer.Option(rich_help_panel=SERVER, min=0, help="Prompts as token ids below it instead of text.")
    ] = 0,
    max_tokens_field: Annotated[
        str, typer.Option(rich_help_panel=SERVER, help="Name of the field, where a server wants another.")
    ] = "",
    temperature: Annotated[float, typer.Option(rich_help_panel=SERVER)] = 0.0,
    api_key: Annotated[str, typer.Option(rich_help_panel=SERVER, envvar="OPENAI_API_KEY", show_envvar=True)] = "",
    timeout: Annotated[float, typer.Option(rich_help_panel=SERVER, help="Seconds for one request.")] = 600.0,
    metrics_url: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=SERVER, help="Prometheus addresses to plot; default: the server's /metrics."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(rich_help_panel=RESULT, help="Folder for result.json and the plots.")
    ] = None,
    rows: Annotated[
        str,
        typer.Option(rich_help_panel=RESULT, help="Per request in result.json: none, requests or tokens (each time)."),
    ] = "requests",
    plots: Annotated[bool, typer.Option(rich_help_panel=RESULT, help="Needs matplotlib.")] = True,
) -> None:
    """Put load on a server and say how it did. Ctrl-C ends it and sums up what was done."""
    import msgspec
    import uvloop

    from tideway.bench.client import BenchError, Target
    from tideway.bench.options import parse_weights, read_workload, simple_workload
    from tideway.bench.session import Session, discover_models, run_session
    from tideway.bench.traces import TraceError
    from tideway.bench.workload import WorkloadError

    if rows not in ("none", "requests", "tokens"):
        raise OperatorError("--rows must be none, requests or tokens")
    base = url.rstrip("/").removesuffix("/v1")
    try:
        target = msgspec.convert(
            {
                "url": base,
                "endpoint": endpoint,
                "timeout_s": timeout,
                "temperature": temperature,
                "ignore_eos": ignore_eos,
                "sends_service_tier": flex,
                "sends_objectives": send_objectives,
                "max_tokens_field": max_tokens_field,
                "vocabulary": vocabulary,
                "extra_body": msgspec.json.decode(extra_body) if extra_body else {},
            },
            Target,
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise OperatorError(f"{error}") from None
    if target.vocabulary and target.endpoint != "completions":
        raise OperatorError("--vocabulary: chat has no token ids")
    session = Session(
        target=target,
        api_key=api_key,
        drain_s=drain,
        warmup_s=warmup,
        metrics_urls=metrics_url or [f"{base}/metrics"],
    )

    async def run() -> Any:
        if workload is not None:
            if arrivals or offline_arrivals:
                raise OperatorError("--workload takes the place of --arrivals and --offline-arrivals")
            given = {"duration_s": duration, "seed": seed}
            planned = msgspec.structs.replace(
                read_workload(workload), **{name: value for name, value in given.items() if value is not None}
            )
        else:
            names = model or (await discover_models(target, api_key))[:1]
            planned = simple_workload(
                models=parse_weights(names),
                arrivals=arrivals,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                lengths_from=lengths_from,
                trace_options={
                    "start_s": trace_start,
                    "length_s": trace_length,
                    "keep": trace_keep,
                    "time_scale": time_scale,
                    "rate_scale": rate_scale,
                    "series": trace_series,
                    "prompt_scale": prompt_scale,
                    "output_scale": output_scale,
                },
                offline_arrivals=offline_arrivals,
                offline_prompt_tokens=offline_prompt_tokens,
                offline_output_tokens=offline_output_tokens,
                offline_lengths_from=offline_lengths_from,
                offline_requests=offline_requests,
                num_requests=num_requests,
                duration_s=duration,
                seed=seed or 0,
                max_total_tokens=max_total_tokens,
                prefix_share=prefix_share,
                ttft_ms=ttft_ms,
                tpot_ms=tpot_ms,
            )
        return await run_session(session, planned, sys.stderr)

    try:
        result = uvloop.run(run())
    except (BenchError, WorkloadError, TraceError, OSError) as error:
        raise OperatorError(str(error)) from None
    if not present(result, output, rows, with_plots=plots):
        raise typer.Exit(FAILED_EXIT_CODE)


def present(result: Any, output: Path | None, rows: str, *, with_plots: bool) -> bool:
    """Prints the table and writes the files; whether any request succeeded."""
    from rich.console import Console

    from tideway.bench.plots import PlotsUnavailable, write_plots
    from tideway.bench.report import lateness_sentence, table, write_result

    console = Console(soft_wrap=True)
    console.print(table(result.summary))
    print(lateness_sentence(result.lateness, min((group.ttft_s.p50 for group in result.summary.groups), default=0.0)))
    first_errors = {record.error: record.error_message for record in reversed(result.records) if record.error_message}
    for reason, message in sorted(first_errors.items()):
        print(f"{reason}, the first: {message}")
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
            if with_plots:
                try:
                    names = ", ".join(str(path) for path in write_plots(result.records, output, result.series))
                    print(f"Plots: {names}")
                except PlotsUnavailable as error:
                    print(f"No plots: {error}")
            for record in result.records if rows != "tokens" else ():
                record.token_times = []
            if rows == "none":
                result.records = []
            write_result(result, output / "result.json")
            print(f"Result: {output / 'result.json'}")
        except OSError as error:
            raise OperatorError(f"{output}: {error}") from None
    return any(group.num_succeeded for group in result.summary.groups)
