import json

from checks import ASKED, CITIES, MODEL, SCHEMA, URL, absent, check, was_called, weather

try:
    from anthropic import Anthropic
except ImportError as error:
    absent(error)

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": ASKED}]
TOOL = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}


def stream():
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=20) as events:
        text = "".join(events.text_stream)
        assert text and events.get_final_message().content[0].text == text


def tool():
    chosen = {"type": "tool", "name": "weather"}
    with client.messages.stream(
        model=MODEL, messages=MESSAGES, max_tokens=100, tools=[TOOL], tool_choice=chosen
    ) as events:
        message = events.get_final_message()
    (call,) = message.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(**call.input)}
    was_called()
    history = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, messages=history, tools=[TOOL], max_tokens=8).content


def structured():
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=100, extra_body={"output_config": form})
    assert json.loads(answer.content[0].text)["city"] in CITIES


check("anthropic", stream=stream, tool=tool, structured=structured)
