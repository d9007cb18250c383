"""An OpenAI-compatible server with a scripted answer, a latency model and faults.

Tests and benchmarks talk to it over real sockets. It stands for a greedy model that knows one text.
Its tokens are the pieces of `split_into_pieces`. A prompt is rendered as
`<|user|>…<|end|><|assistant|>`, each mark one token. The text behind the last `<|assistant|>` is
the beginning of the answer, in messages, text and token ids alike.
"""

from llm_spec.testing.server.app import ScriptedModelServer
from llm_spec.testing.server.faults import ServerFaults
from llm_spec.testing.server.latency import ServerLatency
from llm_spec.testing.server.replies import MODEL
from llm_spec.testing.server.script import make_disagreeing_draft
from llm_spec.testing.server.vocabulary import EOS_ID

__all__ = ["EOS_ID", "MODEL", "ScriptedModelServer", "ServerFaults", "ServerLatency", "make_disagreeing_draft"]
