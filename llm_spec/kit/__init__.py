"""Help for those who write a provider. Nothing here needs a decoder; import each name from its module.

Over HTTP
- `server_addresses`: parses a server's address, keeps secrets out of texts, and finds the proxy for an address.
- `http_errors`: the error for a response's status, headers and body, and texts without secrets.
- `session_headers`: headers that each call for the present answer has (`SpeculativeConfig.session_header`).
- `event_loops`: a client for each event loop that uses the provider. `open_calls`: `aclose` ends calls.
- `event_loop_bridge`: calls from any thread and loop, brought to one event loop.
- `continuation`: whether a server continues an assistant's text.

Chunks as OpenAI's API has them
- `openai_chat`: chunks to events. `openai_chunks`: a server's own chunks in the API's form, for `ChunkStreaming`.
- `openai_calls`, `openai_logprobs`: tool calls and log-probabilities. `answer_parts`: counts, usage, ends, what this
  library does not read, and the error for what cannot be read.
- `json`: JSON by orjson where it is installed. `surrogates`: halves of characters that come apart.

Models in this process (with `llm_spec.local`: threads, caches, noise, sampling)
- `local_provider`: the provider around a token model; a provider of your own inherits from it.
- `model_folder`: tokenizer and chat template of a folder in Hugging Face's layout (needs tokenizers and jinja2).
- `model_options`: options after the question mark of a model's string.

The contract, and what else requests and answers need (`contract.fields`, `contract.tools`, `contract.response`,
`contract.system_texts`, `contract.checks`), is in `llm_spec.contract`; the clock in `llm_spec.measure.clock`.
"""
