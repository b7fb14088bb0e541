"""A search tool for verl's tool agent. It asks the server that ROLLWISE_SEARCH_URL names.

The server takes {"query": "...", "k": 3} and returns {"passages": ["...", ...]}.
"""

import json
import os
import urllib.request

from verl.tools.function_tool import function_tool

TIMEOUT_SECONDS = 20
URL = os.environ.get("ROLLWISE_SEARCH_URL")
if not URL:  # verl would go on, and give the agent every failed call as what was found
    raise RuntimeError("ROLLWISE_SEARCH_URL is not set; set it, on every node, to the address of the search server")


@function_tool
def search(query: str) -> str:
    """Search an encyclopedia.

    Args:
        query: What to look for.
    """
    request = urllib.request.Request(
        URL,
        data=json.dumps({"query": query, "k": 3}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        return "\n\n".join(json.load(response)["passages"])
