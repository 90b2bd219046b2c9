from checks import ASKED, CITIES, MODEL, V1, City, absent, check, was_called, weather

try:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool as as_tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel
except ImportError as error:
    absent(error)

llm = ChatOpenAI(model=MODEL, base_url=V1, api_key="none", max_retries=0)


class Answer(BaseModel):
    city: City


def stream():
    assert "".join(piece.content for piece in llm.bind(max_tokens=20).stream(ASKED))


def tool():
    own = as_tool(weather)
    whole = None
    for piece in llm.bind_tools([own], tool_choice="any", parallel_tool_calls=False).stream(ASKED):
        whole = piece if whole is None else whole + piece
    results = [own.invoke(call) for call in whole.tool_calls]
    was_called()
    assert llm.bind_tools([own]).bind(max_tokens=8).invoke([HumanMessage(ASKED), whole, *results]) is not None


def structured():
    for method in ("json_schema", "function_calling"):
        assert llm.with_structured_output(Answer, method=method).invoke(ASKED).city in CITIES


check("langchain-openai", stream=stream, tool=tool, structured=structured)
