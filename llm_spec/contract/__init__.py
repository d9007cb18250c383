"""The contract of providers, drafts and local token models, split by who implements it.

- `provider`: every provider.
- `draft`: every draft.
- `endpoint`: providers whose server takes token ids.
- `token_model`: providers that run a model in this process.
"""
