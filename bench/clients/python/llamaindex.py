from checks import ASKED, CITIES, MODEL, V1, City, absent, check, was_called, weather

try:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel
except ImportError as error:
    absent(error)

llm = OpenAILike(
    model=MODEL, api_base=V1, api_key="none", is_chat_model=True, is_function_calling_model=True, max_retries=0
)


class Answer(BaseModel):
    """An answer."""

    city: City


def stream():
    text = "".join(piece.delta for piece in llm.stream_chat([ChatMessage(role="user", content=ASKED)], max_tokens=20))
    assert text


def tool():
    tools = [FunctionTool.from_defaults(weather)]
    *_, message = llm.stream_chat_with_tools(tools, user_msg=ASKED, tool_required=True)
    for call in llm.get_tool_calls_from_response(message):
        tools[0].call(**call.tool_kwargs)
    was_called()


def structured():
    assert llm.as_structured_llm(Answer).complete(ASKED).raw.city in CITIES


check("llama-index-llms-openai-like", stream=stream, tool=tool, structured=structured)
