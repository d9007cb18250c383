"""An MCP server over stdin and stdout with one tool, which greets."""

from __future__ import annotations

import json
import sys

TOOL = {
    "name": "greet",
    "description": "Greets somebody.",
    "inputSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
}

for line in sys.stdin:
    message = json.loads(line)
    match message.get("method"):
        case "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "demo", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            result = {"tools": [TOOL]}
        case "tools/call":
            name = message["params"]["arguments"].get("name")
            result = {"content": [{"type": "text", "text": f"Hello, {name}, from afar."}]}
        case _:
            result = {}
    if "id" in message:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}) + "\n")
        sys.stdout.flush()
