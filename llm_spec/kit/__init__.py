"""Building blocks for providers. Nothing here needs a decoder; import names from their modules.

Over HTTP
- `server_addresses`: parses a server's address, hides its secrets, and finds its proxy.
- `http_errors`: the error for a response's status, headers and body, with secrets masked.
- `session_headers`: headers of each call for the current answer
  (`SpeculativeConfig.session_header`).
- `event_loops`: a client for each event loop that uses the provider. `open_calls`: `aclose` ends calls.
- `event_loop_bridge`: calls from any thread and loop, brought to one event loop.
- `continuation`: whether a server continues an assistant's text.

Chunks of OpenAI's API
- `openai_chat`: chunks to events.
- `openai_chunks`: a server's own chunks in the API's form, for `ChunkStreaming`.
- `openai_calls`, `openai_logprobs`: tool calls and log-probabilities.
- `answer_parts`: counts, usage, finish reasons, unread parts, and the error for broken answers.
- `json`: JSON by orjson, if it is installed. `surrogates`: joins halves of characters.

Models in this process (with `llm_spec.local`: threads, caches, noise, sampling)
- `local_provider`: the provider around a token model; your own provider inherits from it.
- `model_folder`: tokenizer and chat template of a folder in Hugging Face's layout (needs tokenizers
  and jinja2).
- `model_options`: the options after the question mark of a model's string.

The contract is in `llm_spec.contract`, together with helpers for requests and answers
(`contract.fields`, `contract.tools`, `contract.response`, `contract.system_texts`,
`contract.checks`). The clock is in `llm_spec.measure.clock`.
"""
