"""Model folders as they are published: tokenizer, chat template, and what they say of the model."""
