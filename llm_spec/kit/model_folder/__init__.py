"""Model folders in Hugging Face's layout: tokenizer, chat template and the facts that they give."""
