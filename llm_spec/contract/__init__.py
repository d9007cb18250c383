"""The contract: what a provider, a draft and a local token model are, split by who implements it.

- `chat`: every provider.
- `draft`: every draft.
- `endpoint`: providers whose server takes token ids.
- `local`: providers that run a model in this process.
"""
