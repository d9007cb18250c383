"""Fifty requests of agents with tools: files, search, shell, calendar, mail, tickets, data, travel, shop, home.

Each agent has tools, an example of a call in the conversation (small models call in the form that they have seen), and
five requests: two that one call answers, one that two calls answer, one with unicode or nested arguments, and one that
needs none. A guess at the answer is its prediction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llm_spec import ChatRequest

__all__ = ["ToolRequest", "make_tool_requests"]

Call = tuple[str, dict[str, Any]]


class ToolRequest(NamedTuple):
    """A request without a temperature, and what kind of answer it is meant to have."""

    kind: str
    request: ChatRequest
    seed: int


class Agent(NamedTuple):
    """`example`: a question and the calls that answered it; `asked`: five questions with guesses at their answers."""

    tools: Sequence[dict[str, Any]]
    example: tuple[str, Sequence[Call]]
    asked: Sequence[tuple[str, Sequence[Call] | str]]
    thought: str = ""  # what the model thought before the example's call


KINDS = ("one call", "one call", "two calls", "nested or unicode", "no call")
TEXT, NUMBER = {"type": "string"}, {"type": "number"}
TEXTS = {"type": "array", "items": TEXT}
OBJECT = {"type": "object"}


def make_tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


AGENTS = (
    Agent(
        [
            make_tool("read_file", "Read a file", path=TEXT),
            make_tool("write_file", "Write a file", path=TEXT, content=TEXT),
        ],
        ("Show me setup.py.", [("read_file", {"path": "setup.py"})]),
        [
            ("Show me src/app/main.py.", [("read_file", {"path": "src/app/main.py"})]),
            ("Write 'hello' to notes.txt.", [("write_file", {"path": "notes.txt", "content": "hello"})]),
            ("Show me a.txt and b.txt.", [("read_file", {"path": "a.txt"}), ("read_file", {"path": "b.txt"})]),
            (
                'Write the line print("grüß dich") to größe.py.',
                [("write_file", {"path": "größe.py", "content": 'print("grüß dich")\n'})],
            ),
            ("In one sentence: what is a file?", "A file is a named collection of data that is stored on a computer."),
        ],
    ),
    Agent(
        [make_tool("web_search", "Search the web", query=TEXT, limit=NUMBER), make_tool("open_url", "Open", url=TEXT)],
        ("Find news on solar power.", [("web_search", {"query": "solar power news", "limit": 5})]),
        [
            ("Find news on electric cars.", [("web_search", {"query": "electric cars news", "limit": 5})]),
            ("Open https://example.org/a?b=1&c=2.", [("open_url", {"url": "https://example.org/a?b=1&c=2"})]),
            (
                "Find 3 pages on tea and 3 pages on coffee.",
                [("web_search", {"query": "tea", "limit": 3}), ("web_search", {"query": "coffee", "limit": 3})],
            ),
            ("Find news on 東京 and Αθήνα.", [("web_search", {"query": "東京 Αθήνα", "limit": 5})]),
            ("Thanks! Say goodbye to me.", "Goodbye! Have a nice day."),
        ],
        thought="I need news, so I search the web.",
    ),
    Agent(
        [make_tool("run", "Run a command in a shell", command=TEXT, timeout_s=NUMBER)],
        ("How much disk space is free?", [("run", {"command": "df -h", "timeout_s": 10})]),
        [
            ("Which processes run?", [("run", {"command": "ps aux", "timeout_s": 10})]),
            ("Run the tests.", [("run", {"command": "pytest -q", "timeout_s": 600})]),
            (
                "Run git status, then git diff.",
                [
                    ("run", {"command": "git status", "timeout_s": 10}),
                    ("run", {"command": "git diff", "timeout_s": 10}),
                ],
            ),
            (
                'Run: grep -rn "naïve \\"quote\\"" src/',
                [("run", {"command": 'grep -rn "naïve \\"quote\\"" src/', "timeout_s": 10})],
            ),
            ("Explain what a shell is, in few words.", "A shell is a program that reads commands and runs them."),
        ],
    ),
    Agent(
        [
            make_tool("create_event", "Add to the calendar", title=TEXT, start=TEXT, people=TEXTS),
            make_tool("list_events", "The events of a day", day=TEXT),
        ],
        (
            "Lunch with Ana on 2025-03-01 at 12.",
            [("create_event", {"title": "Lunch", "start": "2025-03-01T12:00", "people": ["Ana"]})],
        ),
        [
            ("What do I have on 2025-03-04?", [("list_events", {"day": "2025-03-04"})]),
            (
                "Dinner with Ben on 2025-03-05 at 19.",
                [("create_event", {"title": "Dinner", "start": "2025-03-05T19:00", "people": ["Ben"]})],
            ),
            (
                "What do I have on 2025-04-01 and on 2025-04-02?",
                [("list_events", {"day": "2025-04-01"}), ("list_events", {"day": "2025-04-02"})],
            ),
            (
                "Kaffee with Jürgen, Zoë and 李雷 on 2025-05-06 at 9.",
                [
                    (
                        "create_event",
                        {"title": "Kaffee", "start": "2025-05-06T09", "people": ["Jürgen", "Zoë", "李雷"]},
                    )
                ],
            ),
            ("How many days has a week?", "A week has seven days."),
        ],
    ),
    Agent(
        [make_tool("send_email", "Send a mail", to=TEXTS, subject=TEXT, body=TEXT)],
        (
            "Tell bob@example.com that I am late.",
            [("send_email", {"to": ["bob@example.com"], "subject": "Late", "body": "I am late."})],
        ),
        [
            (
                "Tell eve@example.com that I am ill.",
                [("send_email", {"to": ["eve@example.com"], "subject": "Ill", "body": "I am ill."})],
            ),
            (
                "Thank team@example.org for the flowers.",
                [("send_email", {"to": ["team@example.org"], "subject": "Thanks", "body": "Thank you!"})],
            ),
            (
                "Send 'yes' to a@example.com and 'no' to b@example.com.",
                [
                    ("send_email", {"to": ["a@example.com"], "subject": "yes", "body": "yes"}),
                    ("send_email", {"to": ["b@example.com"], "subject": "no", "body": "no"}),
                ],
            ),
            (
                "Write to a@b.de and c@d.fr: Schöne Grüße aus Köln 🎉",
                [("send_email", {"to": ["a@b.de", "c@d.fr"], "subject": "Grüße", "body": "Schöne Grüße aus Köln 🎉"})],
            ),
            ("What makes a good subject line?", "A good subject line is short and says what the mail is about."),
        ],
        thought="The user wants me to tell Bob, so I send a mail.",
    ),
    Agent(
        [make_tool("create_issue", "File an issue", title=TEXT, labels=TEXTS, fields=OBJECT)],
        (
            "File a bug: login fails on Firefox.",
            [
                (
                    "create_issue",
                    {"title": "Login fails", "labels": ["bug"], "fields": {"browser": {"name": "Firefox"}}},
                )
            ],
        ),
        [
            (
                "File a bug: search fails on Safari.",
                [
                    (
                        "create_issue",
                        {"title": "Search fails", "labels": ["bug"], "fields": {"browser": {"name": "Safari"}}},
                    )
                ],
            ),
            (
                "File a wish: dark mode.",
                [("create_issue", {"title": "Dark mode", "labels": ["wish"], "fields": {}})],
            ),
            (
                "File two bugs: export is slow; import is slow.",
                [
                    ("create_issue", {"title": "Export is slow", "labels": ["bug"], "fields": {}}),
                    ("create_issue", {"title": "Import is slow", "labels": ["bug"], "fields": {}}),
                ],
            ),
            (
                "File a bug: print fails on Chrome 120 and Edge 119.",
                [
                    (
                        "create_issue",
                        {
                            "title": "Print fails",
                            "labels": ["bug"],
                            "fields": {"browsers": [{"name": "Chrome", "version": 120}, {"name": "Edge"}]},
                        },
                    )
                ],
            ),
            ("What is a bug?", "A bug is a fault in a program that makes it behave in a wrong way."),
        ],
    ),
    Agent(
        [make_tool("query", "Run SQL", sql=TEXT), make_tool("add", "The sum of two numbers", a=NUMBER, b=NUMBER)],
        ("How many users are there?", [("query", {"sql": "SELECT COUNT(*) FROM users"})]),
        [
            ("How many orders are there?", [("query", {"sql": "SELECT COUNT(*) FROM orders"})]),
            ("Add 1234 and -5.5.", [("add", {"a": 1234, "b": -5.5})]),
            (
                "How many cats and how many dogs are there?",
                [("query", {"sql": "SELECT COUNT(*) FROM cats"}), ("query", {"sql": "SELECT COUNT(*) FROM dogs"})],
            ),
            (
                "How many users are called O'Néill?",
                [("query", {"sql": "SELECT COUNT(*) FROM users WHERE name = 'O''Néill'"})],
            ),
            ("What does SQL stand for?", "SQL stands for Structured Query Language."),
        ],
    ),
    Agent(
        [
            make_tool("get_weather", "The weather of a city", city=TEXT),
            make_tool("book", "Book a trip", start=TEXT, goal=TEXT, people=NUMBER),
        ],
        ("What is the weather in Berlin?", [("get_weather", {"city": "Berlin"})]),
        [
            ("What is the weather in Paris?", [("get_weather", {"city": "Paris"})]),
            ("Book a trip from Rome to Oslo for 2.", [("book", {"start": "Rome", "goal": "Oslo", "people": 2})]),
            (
                "What is the weather in Lima and in Cairo?",
                [("get_weather", {"city": "Lima"}), ("get_weather", {"city": "Cairo"})],
            ),
            ("What is the weather in São Paulo?", [("get_weather", {"city": "São Paulo"})]),
            ("Write one sentence about Kraków.", "Kraków is one of the oldest cities in Poland."),
        ],
        thought="The user asks about the weather, so I call get_weather.",
    ),
    Agent(
        [make_tool("order", "Order dishes", items={"type": "array", "items": {"type": "array"}}, address=OBJECT)],
        (
            "Order 2 soup and 1 tea to Berlin 7.",
            [("order", {"items": [["soup", 2], ["tea", 1]], "address": {"city": "Berlin", "no": [7]}})],
        ),
        [
            ("Order 3 rice to Oslo 9.", [("order", {"items": [["rice", 3]], "address": {"city": "Oslo", "no": [9]}})]),
            ("Order 1 cake to Rome 4.", [("order", {"items": [["cake", 1]], "address": {"city": "Rome", "no": [4]}})]),
            (
                "Order 1 tea to Bern 1 and 2 tea to Bonn 2.",
                [
                    ("order", {"items": [["tea", 1]], "address": {"city": "Bern", "no": [1]}}),
                    ("order", {"items": [["tea", 2]], "address": {"city": "Bonn", "no": [2]}}),
                ],
            ),
            (
                "Order 2 crème brûlée, 4 寿司 and 1 żurek to Łódź 12.",
                [
                    (
                        "order",
                        {
                            "items": [["crème brûlée", 2], ["寿司", 4], ["żurek", 1]],
                            "address": {"city": "Łódź", "no": [12]},
                        },
                    )
                ],
            ),
            ("Is tea hot or cold?", "Tea may be hot or cold."),
        ],
    ),
    Agent(
        [
            make_tool("set_light", "Switch a light", room=TEXT, on={"type": "boolean"}, color=OBJECT),
            make_tool("play", "Play music", title=TEXT),
        ],
        (
            "Red light in the kitchen.",
            [("set_light", {"room": "kitchen", "on": True, "color": {"r": 255, "g": 0, "b": 0}})],
        ),
        [
            (
                "Blue light in the hall.",
                [("set_light", {"room": "hall", "on": True, "color": {"r": 0, "g": 0, "b": 255}})],
            ),
            ("Play Für Elise.", [("play", {"title": "Für Elise"})]),
            (
                "Turn off the lights in the bath and in the attic.",
                [
                    ("set_light", {"room": "bath", "on": False, "color": {}}),
                    ("set_light", {"room": "attic", "on": False, "color": {}}),
                ],
            ),
            (
                "Green light in the señora's café ☕.",
                [("set_light", {"room": "señora's café ☕", "on": True, "color": {"r": 0, "g": 255, "b": 0}})],
            ),
            ("Name three colours.", "Three colours are red, green and blue."),
        ],
    ),
)


def make_tool_requests(max_tokens: int) -> list[ToolRequest]:
    """All fifty, so ordered that the first ones are of every kind and agent; two calls may take twice `max_tokens`."""
    made = [list(_make_requests(agent, max_tokens)) for agent in AGENTS]
    turns = [(index % len(AGENTS), (index + index // len(AGENTS)) % len(KINDS)) for index in range(50)]
    return [ToolRequest(*made[agent][kind], seed) for seed, (agent, kind) in enumerate(turns)]


def _make_requests(agent: Agent, max_tokens: int) -> Iterator[tuple[str, ChatRequest]]:
    for kind, (question, guess) in zip(KINDS, agent.asked, strict=True):
        example, calls = agent.example
        shown = [*calls, *calls] if kind == "two calls" else calls
        messages = [{"role": "user", "content": example}, *_show_calls(agent.thought, shown)]
        if kind == "no call":
            messages += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thank you."}]
            messages += [{"role": "assistant", "content": "You are welcome."}]
        messages.append({"role": "user", "content": question})
        limit = max_tokens * 2 if kind == "two calls" else max_tokens
        prediction = guess if isinstance(guess, str) else "\n".join(map(_write_call, guess))
        yield kind, ChatRequest.create(messages, tools=agent.tools, max_tokens=limit, prediction=prediction)


def _show_calls(thought: str, calls: Sequence[Call]) -> list[dict[str, Any]]:
    """An assistant's message with calls, and their results."""
    shown: list[dict[str, Any]] = []
    for index, (name, given) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        shown.append({"id": f"call_{index}", "type": "function", "function": function})
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in shown]
    content = f"<think>\n{thought}\n</think>\n" if thought else None
    return [{"role": "assistant", "content": content, "tool_calls": shown}, *results]


def _write_call(call: Call) -> str:
    name, given = call
    body = json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
