import asyncio

from checks import ASKED, CITIES, MODEL, V1, City, absent, check, was_called, weather

try:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
    from pydantic import BaseModel
except ImportError as error:
    absent(error)

set_tracing_disabled(True)


class Answer(BaseModel):
    city: City


def for_both(run):
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        asyncio.run(run(kind(model=MODEL, openai_client=AsyncOpenAI(base_url=V1, api_key="none", max_retries=0))))


async def stream(model):
    # Without a limit: the SDK takes a response that is cut off for a failure.
    result = Runner.run_streamed(Agent("a", model=model, model_settings=ModelSettings(temperature=0)), ASKED)
    pieces = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert pieces and "".join(pieces) == result.final_output


async def tool(model):
    settings = ModelSettings(tool_choice="weather", temperature=0)
    agent = Agent("a", model=model, tools=[function_tool(weather)], model_settings=settings)
    assert (await Runner.run(agent, ASKED)).final_output is not None
    was_called()


async def structured(model):
    result = await Runner.run(Agent("a", model=model, output_type=Answer), ASKED)
    assert result.final_output.city in CITIES


check(
    "openai-agents",
    stream=lambda: for_both(stream),
    tool=lambda: for_both(tool),
    structured=lambda: for_both(structured),
)
