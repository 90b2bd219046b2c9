from checks import ASKED, CITIES, MODEL, V1, City, absent, check, was_called, weather

try:
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
except ImportError as error:
    absent(error)

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1, api_key="none"))

ONE_CALL = {"parallel_tool_calls": False}


class Answer(BaseModel):
    city: City


def stream():
    with_text = Agent(model).run_stream_sync(ASKED, model_settings={"max_tokens": 20})
    pieces = list(with_text.stream_text(delta=True))
    assert len("".join(pieces)) > 1


def tool():
    assert Agent(model, output_type=weather).run_sync(ASKED, model_settings=ONE_CALL).output == "Rain"
    was_called()


def structured():
    for kind in (Answer, NativeOutput(Answer)):
        assert Agent(model, output_type=kind).run_sync(ASKED, model_settings=ONE_CALL).output.city in CITIES


check("pydantic-ai-slim", stream=stream, tool=tool, structured=structured)
