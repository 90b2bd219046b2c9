"""`tideway bench` as a person types it. What it needs is imported when it runs: the other subcommands do without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tideway.data_folder import DataFolder, OperatorError
from tideway.options import DEFAULT_DATA_DIR, SERVER_KEY_VARIABLE, DataDir, is_default

ARRIVALS = (
    "poisson:RATE, gamma:RATE:CV, constant:RATE, onoff:ON_S:ON_RATE:OFF_S[:OFF_RATE[:CV]], closed:CONCURRENCY,"
    " trace:PATH; rates in requests per second"
)
LENGTHS = "N, uniform:MIN:MAX, lognormal:MEAN:CV[:MIN:MAX], zipf:ALPHA:MIN:MAX"
FAILED_EXIT_CODE = 1
ONLINE, OFFLINE, TRACES, SERVER, RESULT = "Online load", "Offline load", "Traces", "Server", "Result"


def bench(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Option(
            rich_help_panel=SERVER,
            help="URL of any server with OpenAI's API. Default: the gateway that runs on the data folder, otherwise "
            "http://127.0.0.1:8000.",
        ),
    ] = "",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    model: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=SERVER,
            help="Model to send requests to: NAME or NAME=WEIGHT; repeatable. Default: the first one the server lists.",
        ),
    ] = None,
    endpoint: Annotated[
        str, typer.Option(rich_help_panel=SERVER, help="Endpoint: completions or chat.")
    ] = "completions",
    workload: Annotated[
        Path | None,
        typer.Option(help="Workload file (TOML or JSON) in place of the options below; see docs/benchmarks.md."),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of load. Default: the file's.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds to wait for answers after the last request is sent.")] = 60.0,
    warmup: Annotated[float, typer.Option(help="Seconds at the start whose requests do not count.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed and workload give the same requests. Default: the file's, or 0.")
    ] = None,
    arrivals: Annotated[str, typer.Option(rich_help_panel=ONLINE, help=ARRIVALS)] = "",
    num_requests: Annotated[
        int | None, typer.Option(rich_help_panel=ONLINE, min=1, help="Maximum number of online requests.")
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
        float,
        typer.Option(
            rich_help_panel=ONLINE, min=0, max=1, help="Share of each prompt that all prompts have in common."
        ),
    ] = 0.0,
    max_total_tokens: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=ONLINE, min=2, help="Maximum prompt plus output tokens; longer requests are scaled down."
        ),
    ] = None,
    trace_start: Annotated[
        float, typer.Option(rich_help_panel=TRACES, help="Start of the part that is replayed, in seconds of the trace.")
    ] = 0.0,
    trace_length: Annotated[
        float | None,
        typer.Option(rich_help_panel=TRACES, help="Length of the part that is replayed, in seconds of the trace."),
    ] = None,
    trace_keep: Annotated[
        float, typer.Option(rich_help_panel=TRACES, help="Share of the trace's requests to send.")
    ] = 1.0,
    time_scale: Annotated[
        float,
        typer.Option(rich_help_panel=TRACES, help="Factor on the times of the trace; 0.5 replays it twice as fast."),
    ] = 1.0,
    rate_scale: Annotated[
        float, typer.Option(rich_help_panel=TRACES, help="Factor on the rates of a trace of rates.")
    ] = 1.0,
    trace_series: Annotated[
        str, typer.Option(rich_help_panel=TRACES, help="Model whose rates to use, from a trace of several models.")
    ] = "",
    prompt_scale: Annotated[
        float, typer.Option(rich_help_panel=TRACES, help="Factor on the prompt tokens of a trace.")
    ] = 1.0,
    output_scale: Annotated[
        float, typer.Option(rich_help_panel=TRACES, help="Factor on the output tokens of a trace.")
    ] = 1.0,
    offline_arrivals: Annotated[
        str, typer.Option(rich_help_panel=OFFLINE, help="Arrivals of offline requests, written as --arrivals.")
    ] = "",
    offline_prompt_tokens: Annotated[
        str,
        typer.Option(rich_help_panel=OFFLINE, help="Prompt tokens of offline requests, written as --prompt-tokens."),
    ] = "",
    offline_output_tokens: Annotated[
        str,
        typer.Option(rich_help_panel=OFFLINE, help="Output tokens of offline requests, written as --output-tokens."),
    ] = "",
    offline_lengths_from: Annotated[
        str, typer.Option(rich_help_panel=OFFLINE, help="Trace from which pairs of offline lengths are drawn.")
    ] = "",
    offline_requests: Annotated[
        int | None, typer.Option(rich_help_panel=OFFLINE, min=1, help="Maximum number of offline requests.")
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(rich_help_panel=ONLINE, help="Objective for the time to the first token, in milliseconds."),
    ] = None,
    tpot_ms: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=ONLINE, help="Objective for the time per output token after the first, in milliseconds."
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(rich_help_panel=SERVER, help="Send ignore_eos, so that answers have their planned length.")
    ] = False,
    flex: Annotated[
        bool, typer.Option(rich_help_panel=SERVER, help="Send service_tier=flex with offline requests.")
    ] = True,
    send_objectives: Annotated[
        bool, typer.Option(rich_help_panel=SERVER, help="Send the objectives with each request.")
    ] = False,
    extra_body: Annotated[
        str, typer.Option(rich_help_panel=SERVER, help="JSON object with fields to add to every request.")
    ] = "",
    vocabulary: Annotated[
        int,
        typer.Option(
            rich_help_panel=SERVER,
            min=0,
            help="Vocabulary size: send prompts as random token ids below it, instead of text.",
        ),
    ] = 0,
    max_tokens_field: Annotated[
        str,
        typer.Option(
            rich_help_panel=SERVER,
            help="Name of the request field that limits the output, if it is not the usual one.",
        ),
    ] = "",
    temperature: Annotated[
        float, typer.Option(rich_help_panel=SERVER, help="Sampling temperature of all requests.")
    ] = 0.0,
    api_key: Annotated[
        str,
        typer.Option(
            rich_help_panel=SERVER, envvar=SERVER_KEY_VARIABLE, show_envvar=True, help="API key of the server."
        ),
    ] = "",
    timeout: Annotated[float, typer.Option(rich_help_panel=SERVER, help="Timeout of one request, in seconds.")] = 600.0,
    metrics_url: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=SERVER, help="Prometheus endpoints to plot. Default: the server's /metrics."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(rich_help_panel=RESULT, help="Folder for result.json and the plots.")
    ] = None,
    rows: Annotated[
        str,
        typer.Option(
            rich_help_panel=RESULT,
            help="Detail in result.json: none, requests (one row each), or tokens (with the time of each token).",
        ),
    ] = "requests",
    plots: Annotated[bool, typer.Option(rich_help_panel=RESULT, help="Draw plots; needs matplotlib.")] = True,
) -> None:
    """Load-test a server and report the results. Ctrl-C stops early and reports what was measured."""
    import msgspec
    import uvloop

    from tideway.bench.client import BenchError, Target
    from tideway.bench.options import parse_weights, read_workload, simple_workload
    from tideway.bench.session import Session, discover_models, run_session
    from tideway.bench.traces import TraceError
    from tideway.bench.workload import WorkloadError
    from tideway.operations import find_gateway

    if rows not in ("none", "requests", "tokens"):
        raise OperatorError("--rows must be none, requests or tokens")
    gateway = find_gateway(DataFolder(data_dir), url, may_guess=is_default(context, "data_dir"))
    base = gateway.url
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
        place=f"{gateway}",
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
