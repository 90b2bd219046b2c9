import json

from checks import ASKED, CITIES, MODEL, V1, City, absent, check, was_called, weather

try:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret
    from pydantic import BaseModel
except ImportError as error:
    absent(error)


class Answer(BaseModel):
    city: City


def generator(**more):
    return OpenAIChatGenerator(model=MODEL, api_base_url=V1, api_key=Secret.from_token("none"), **more)


MESSAGES = [ChatMessage.from_user(ASKED)]


def stream():
    pieces = []
    run = generator(streaming_callback=lambda piece: pieces.append(piece.content), generation_kwargs={"max_tokens": 20})
    assert run.run(MESSAGES)["replies"][0].text == "".join(pieces) != ""


def tool():
    tools = [create_tool_from_function(weather)]
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    replies = generator(tools=tools, generation_kwargs=forced).run(MESSAGES)["replies"]
    calls = replies[0].tool_calls
    results = [ChatMessage.from_tool(tools[0].invoke(**call.arguments), origin=call) for call in calls]
    was_called()
    assert generator(tools=tools, generation_kwargs={"max_tokens": 8}).run([*MESSAGES, *replies, *results])["replies"]


def structured():
    reply = generator(generation_kwargs={"response_format": Answer}).run(MESSAGES)["replies"][0]
    assert json.loads(reply.text)["city"] in CITIES


check("haystack-ai", stream=stream, tool=tool, structured=structured)
