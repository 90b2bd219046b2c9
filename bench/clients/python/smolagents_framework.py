import json

from checks import ASKED, CITIES, MODEL, SCHEMA, V1, absent, check, was_called, weather

try:
    from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool
except ImportError as error:
    absent(error)


class Weather(Tool):
    name = "weather"
    description = "Tells the weather."
    inputs = {"city": {"type": "string", "description": "the city", "enum": list(CITIES)}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        return weather(city)


model = OpenAIModel(MODEL, api_base=V1, api_key="none", max_tokens=60)
MESSAGES = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": ASKED}])]


def stream():
    assert "".join(piece.content or "" for piece in model.generate_stream(MESSAGES, max_tokens=20))


def tool():
    own = Weather()
    message = model.generate(MESSAGES, tools_to_call_from=[own])
    for call in message.tool_calls:
        arguments = call.function.arguments
        own(**(json.loads(arguments) if isinstance(arguments, str) else arguments))
    was_called()


def structured():
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    assert json.loads(model.generate(MESSAGES, response_format=form).content)["city"] in CITIES


check("smolagents", stream=stream, tool=tool, structured=structured)
