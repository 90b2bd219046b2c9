from checks import ASKED, CITIES, MODEL, TOOL, V1, City, absent, check, was_called, weather

try:
    from openai import OpenAI
    from pydantic import BaseModel, TypeAdapter
except ImportError as error:
    absent(error)

client = OpenAI(base_url=V1, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": ASKED}]


class Answer(BaseModel):
    city: City


def stream():
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=20) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
        assert text and events.current_completion_snapshot.choices[0].message.content == text


def tool():
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    result = weather(**TypeAdapter(dict[str, str]).validate_json(call.function.arguments))
    was_called()
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=8).choices


def structured():
    whole = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
    assert whole.choices[0].message.parsed.city in CITIES
    assert client.responses.parse(model=MODEL, input=ASKED, text_format=Answer).output_parsed.city in CITIES


check("openai", stream=stream, tool=tool, structured=structured)
